"""The process that runs queries of the console: reads them from its input, writes answers.

It ends with its input: when the console ends, by whatever means, so do its queries. Its memory is
limited, and it reads files only, so a query harms neither the console nor the owner of a topic.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import resource
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec

from persisting.actions.verification import Verified, verify
from persisting.arrow_loading import load_without_pandas
from persisting.errors import StorageError
from persisting.queue import QueueReader, read_queue
from persisting.topic.topic_files import TopicFolder
from persisting.ui import letters, matches, runs
from persisting.ui.queries import (
    Answer,
    DeadLetters,
    DeadLettersQuery,
    Hit,
    Query,
    QueryTooLarge,
    Run,
    RunQuery,
    RunsQuery,
    SearchQuery,
    VerifyQuery,
)
from persisting.ui.storage_view import TopicsView
from persisting.ui.store_view import view_of

_Result: TypeAlias = list[Hit] | list[Run] | Verified | DeadLetters
_RESERVED_BYTES = 512 << 20
_THREAD_BYTES = 32 << 20
_NO_MEMORY = ("start new thread", "Cannot allocate memory", "out of memory", "memory allocation")
"""How libraries say that the system refused memory."""

_views: dict[str, TopicsView] = {}
"""Topics stay open between queries."""


def main() -> None:
    """Answer queries until the input ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever a library prints must not mix with the answers
    logging.disable(logging.WARNING)
    asked: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read, args=(source, asked), daemon=True).start()
    load_without_pandas()
    import lance  # noqa: F401 (loaded before the first query needs it)

    _limit_memory(int(sys.argv[1]))
    is_last = False
    while not is_last:
        body, is_last = _encoded(_answered(asked.get()))
        target.write(len(body).to_bytes(4, "big") + body)
        target.flush()
    os._exit(0)  # threads of a library that failed may not end


def _limit_memory(nbytes: int) -> None:
    """Let queries allocate about so much: the system refuses more."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return  # only Linux enforces such a limit
    limit = used + reserved_bytes() + nbytes
    with suppress(ValueError):  # the process already has a lower limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def reserved_bytes() -> int:
    """Return the address space that libraries and their threads reserve and mostly do not use."""
    return _RESERVED_BYTES + (os.cpu_count() or 1) * _THREAD_BYTES


def _read(source: BinaryIO, asked: queue.Queue[bytes]) -> None:
    while len(header := source.read(4)) == 4:
        asked.put(source.read(int.from_bytes(header, "big")))
    os._exit(0)


def _encoded(answer: Answer) -> tuple[bytes, bool]:
    """Return an answer as bytes, and whether it is the last one."""
    try:
        return msgspec.msgpack.encode(answer, enc_hook=str), answer.is_last
    except MemoryError:
        return msgspec.msgpack.encode(Answer(error=QueryTooLarge.__name__)), True


def _answered(body: bytes) -> Answer:
    try:
        return Answer(result=_run(msgspec.msgpack.decode(body, type=Query)))
    except (StorageError, ValueError) as exc:
        return Answer(error=type(exc).__name__, message=str(exc))
    except BaseException as exc:  # also a panic of Lance, which is not an Exception
        if isinstance(exc, MemoryError) or any(part in str(exc) for part in _NO_MEMORY):
            return Answer(error=QueryTooLarge.__name__, is_last=True)
        message = f"{type(exc).__name__}: {exc}"
        return Answer(error="StorageError", message=message, is_last=True)


def _run(query: Query) -> _Result:
    view = _views.get(query.storage)
    if view is None:
        view = _views[query.storage] = view_of(query.storage)
    return view.read_now(query.topic, lambda source: _result(view, source, query))


def _result(view: TopicsView, source: TopicFolder, query: Query) -> _Result:
    if isinstance(query, DeadLettersQuery):
        return letters.find_letters(view, source, query.group, query.where, query.most)
    if isinstance(query, RunsQuery):
        return runs.newest_runs(source, query.field, query.most)
    if isinstance(query, RunQuery):
        return runs.records_of_run(source, query.field, query.value, query.limit, query.order)
    if isinstance(query, VerifyQuery):
        return asyncio.run(_verify(source, query.storage))
    return asyncio.run(_search(source, query))


async def _verify(source: TopicFolder, storage: str) -> Verified:
    async def verify_tables() -> dict[str, Any]:
        async with await _open(source, storage) as reader:
            return await reader.verify()

    return await verify(source, verify_tables)


async def _open(source: TopicFolder, storage: str) -> QueueReader:
    """Open the files of a topic and its log.

    The owner is not asked: a call to it could neither be stopped nor be limited in its memory.
    """
    return await read_queue(topic=source.config.topic, storage_path=storage, local_socket=False)


async def _search(source: TopicFolder, query: SearchQuery) -> list[Hit]:
    vector, vector_field = query.vector, query.vector_field
    if query.like is not None:
        vector_field, vector = matches.vector_of(source, *query.like, vector_field)
    if vector is None and query.text is None:
        return matches.matching(source, query.where, query.k)
    async with await _open(source, query.storage) as reader:
        fields = [
            name
            for name, used in (
                (vector_field, vector is not None),
                (query.text_field, query.text is not None),
            )
            if used and name is not None
        ]
        found = await reader.search(vector, query.text, fields or None, query.k, query.where)
    return [
        Hit(
            bucket=hit.pop("_bucket"),
            offset=hit.pop("_offset"),
            score=hit.pop("_score", None),
            distance=hit.pop("_distance", None),
            record=hit,
        )
        for hit in found
    ]


if __name__ == "__main__":
    main()
