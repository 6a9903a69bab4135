"""Slow queries run in processes of their own, so that they can be stopped.

Nothing can interrupt a search inside Lance. A query that takes too long, or whose reader has left,
is stopped by killing its process, which holds no lock. At most two run at a time; others wait. The
memory of each process is limited.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from persisting import errors
from persisting.actions.text_values import format_size
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument, StorageError

_T = TypeVar("_T")
_PROCESSES = 2
_QUERIES_PER_PROCESS = 200
_POLL_SECONDS = 0.2
_END_SECONDS = 5.0
_MAX_ANSWER_BYTES = 64 << 20


class Hit(msgspec.Struct):
    """A record that a query found."""

    bucket: int
    offset: int
    record: dict[str, Any]
    time: str | None = None
    score: float | None = None
    distance: float | None = None


class SearchQuery(msgspec.Struct, tag=True):
    """Records nearest to a vector, with some words, that match a condition, or all of these."""

    storage: str
    topic: str
    k: int
    text: str | None = None
    vector: list[float] | None = None
    like: tuple[int, int] | None = None
    """Search for the vector of the record at this bucket and offset."""
    text_field: str | None = None
    vector_field: str | None = None
    where: str | None = None


class RunsQuery(msgspec.Struct, tag=True):
    """The runs of a topic: the values of a field in its newest records."""

    storage: str
    topic: str
    field: str
    most: int


class RunQuery(msgspec.Struct, tag=True):
    """The records of one run."""

    storage: str
    topic: str
    field: str
    value: Any
    limit: int
    order: str | None = None
    """The field that numbers the steps; None: by arrival."""


class VerifyQuery(msgspec.Struct, tag=True):
    """Compare all files of a topic with their checksums."""

    storage: str
    topic: str


class DeadLettersQuery(msgspec.Struct, tag=True):
    """The first dead letters of a work group that can be re-driven and meet a condition."""

    storage: str
    topic: str
    group: str
    where: str | None
    most: int


Query = SearchQuery | RunsQuery | RunQuery | VerifyQuery | DeadLettersQuery


class DeadLetter(msgspec.Struct):
    """A record that a work group has given up, and why."""

    number: int
    bucket: int
    offset: int
    attempts: int
    time: str | None
    reason: str
    record: str
    """The record as one short line."""


class DeadLetters(msgspec.Struct):
    """Dead letters of a work group."""

    identity: str
    """Of the group: one that is created again has another."""
    letters: list[DeadLetter]
    is_cut: bool
    """Whether there are more."""


class Run(msgspec.Struct):
    """Records with the same value of a field."""

    value: Any
    records: int
    first_time: str
    last_time: str
    bucket: int
    offset: int
    """Where the newest record is."""


class Answer(msgspec.Struct):
    """What a process returns: a result, or an error."""

    result: Any = None
    error: str | None = None
    message: str = ""
    is_last: bool = False
    """Whether the process ends after this answer."""


class ReaderLeft(Exception):
    """The reader has left the page, so nobody waits for the answer."""


class QueryStopped(StorageError):
    """The query took too long and was stopped."""


class QueryTooLarge(QueryStopped):
    """The query needed more memory than it may have."""


_ERRORS = {cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type)}
_OUT_OF_MEMORY = (-signal.SIGABRT, -signal.SIGKILL)
"""How a process ends that gets no more memory: a library gives up, or the system chooses it."""


class QueryPool:
    """Runs queries in processes."""

    def __init__(self, seconds: float, memory: int) -> None:
        """A query may take ``seconds``, and allocate ``memory`` bytes."""
        self._seconds, self._memory = seconds, memory
        self._turns = asyncio.Semaphore(_PROCESSES)
        self._long_turns = asyncio.Semaphore(_PROCESSES)
        self._idle: list[_Process] = []
        self._has_started = False
        """Whether a process was started."""
        self._closed = False

    async def prepare(self) -> None:
        """Start a process before the first query needs it, unless a query was faster."""
        async with self._turns:
            if not self._has_started and not self._closed:
                self._idle.append(await self._start())

    async def _start(self) -> _Process:
        self._has_started = True
        return await _Process.start(self._memory)

    async def run(self, query: Query, result: type[_T], seconds: float | None = None) -> _T:
        """Return the result of a query; cancelling the call kills its process.

        With ``seconds`` it may take that long, and does not delay the queries of other readers.
        """
        limit = self._seconds if seconds is None else seconds
        async with self._turns if seconds is None else self._long_turns:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await asyncio.wait_for(process.ask(query), limit)
            except (TimeoutError, asyncio.TimeoutError):
                process.kill()
                raise QueryStopped(
                    f"the query took longer than {limit:g} seconds and was stopped; narrow it with "
                    "a condition, create an index, or start the console with a larger "
                    "--query-timeout"
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError, OSError) as exc:
                if await process.ended() in _OUT_OF_MEMORY:
                    raise self._too_large() from exc
                raise StorageError("the process of the query died; try again") from exc
            except BaseException:
                process.kill()
                raise
            is_done = answer.is_last or process.asked >= _QUERIES_PER_PROCESS
            if not is_done and not self._closed:
                self._idle.append(process)
            else:
                process.kill()
        if answer.error == QueryTooLarge.__name__:
            raise self._too_large()
        if answer.error is not None:
            raise _ERRORS.get(answer.error, StorageError)(answer.message)
        return msgspec.convert(answer.result, result)

    def _too_large(self) -> QueryTooLarge:
        return QueryTooLarge(
            f"the query needed more than {format_size(self._memory)} of memory and was stopped; "
            "narrow it with a condition, create an index, or start the console with a larger "
            "--query-memory"
        )

    async def close(self) -> None:
        """Kill the processes that wait for a query."""
        self._closed = True
        idle, self._idle = self._idle, []
        for process in idle:
            process.kill()
            await process.ended()


class _Process:
    """A process that answers one query at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self.asked = process, 0

    @classmethod
    async def start(cls, memory: int) -> _Process:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "persisting.ui.query_worker",
                str(memory),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C stops the console, which ends this process
                # Each further arena reserves address space, which is limited.
                env={**os.environ, "MALLOC_ARENA_MAX": "2"},
            )
        )

    async def ask(self, query: Query) -> Answer:
        self.asked += 1
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        body = msgspec.msgpack.encode(query)
        self._process.stdin.write(len(body).to_bytes(4, "big") + body)
        await self._process.stdin.drain()
        size = int.from_bytes(await self._process.stdout.readexactly(4), "big")
        if size > _MAX_ANSWER_BYTES:
            raise InvalidArgument("the result is too large to show; choose fewer records or fields")
        body = await self._process.stdout.readexactly(size)
        return await in_thread(lambda: msgspec.msgpack.decode(body, type=Answer))

    async def ended(self) -> int | None:
        """Return how the process has ended; kill it if it has not."""
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        code = self._process.returncode
        self.kill()
        return code

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()


async def unless_left(request: Request, work: Awaitable[_T]) -> _T:
    """Await some work; cancel it when the reader leaves the page or presses Stop."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_POLL_SECONDS))[0]:
            if await request.is_disconnected():
                raise ReaderLeft
        return task.result()
    finally:
        task.cancel()
        with suppress(BaseException):
            await task
