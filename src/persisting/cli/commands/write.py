"""``put`` and ``import``: store records in a topic."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from persisting.cli import output, parameters, topics_access
from persisting.cli.formats import format_of
from persisting.cli.ingest import ArrowRows, Feed, JsonLines, Source
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Setting
from persisting.topic.spec import DEFAULT_COLUMN

if TYPE_CHECKING:
    from persisting.queue import QueueWriter

DURABLE = {"enable_wal": True, "wal_sync_interval": 0.0}
"""Topics created here sync each put before acknowledging it, so they survive a power failure."""


class PutResult(msgspec.Struct):
    """What a put or an import stored."""

    topic: str
    path: str
    acknowledged: int
    """Records that are durable."""
    repeated: int
    """Acknowledged records that an earlier run under the same write id had stored."""
    seconds: float
    made: bool
    """Whether the topic was created."""


@dataclass(frozen=True)
class _Target:
    """Where to store records: options of the topic, and of the command."""

    buckets: int | None
    bucket_column: str | None
    backend: str | None
    settings: tuple[tuple[str, Any], ...]
    write_id: str | None
    storage: str
    as_json: bool


_target = parameters.bundled(
    "target",
    _Target,
    parameters.buckets,
    parameters.bucket_column,
    click.option("--backend", help="Backend of a new topic.  [default: persisting]"),
    click.option(
        "--set",
        "settings",
        type=Setting(),
        multiple=True,
        help="Option of the backend; may be repeated.",
    ),
    parameters.write_id,
    parameters.storage,
    parameters.as_json,
)


@click.command()
@parameters.topic
@click.argument("file", default="-", type=click.Path(exists=True, allow_dash=True, dir_okay=False))
@_target
@prints("put", "persisting.cli.commands.write:PutResult")
def put(topic: str, file: str, target: _Target) -> None:
    """Store JSON lines from a pipe or a file durably in a topic.

    Prints how many records are durable, also if an error or Ctrl-C stops it. A topic that does not
    exist is created with a log that is synced before each acknowledgement. The topic must not be
    open for writing in another process.

    \b
    Examples:
      echo '{"id": "a", "score": 1.5}' | persisting put events
      persisting put events records.jsonl --buckets 8 --bucket-column user
      persisting put events records.jsonl --write-id load-2026-11-15
    """
    with _opened(file) as source:
        lines = JsonLines(source.fileno())
        _feed(topic, target, iter([lines]))


@click.command("import")
@parameters.topic
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True))
@_target
@prints("import", "persisting.cli.commands.write:PutResult")
def import_(topic: str, files: tuple[str, ...], target: _Target) -> None:
    """Store the rows of Parquet, Lance or JSON lines files in a topic.

    The extension of each file decides its format. With --write-id an interrupted import can be
    repeated without duplicates.

    \b
    Examples:
      persisting import events january.parquet february.parquet
      persisting import events old.lance --write-id from-old
    """
    kinds = {name: format_of(name) for name in files}

    def sources() -> Iterator[Source]:
        for name, kind in kinds.items():
            if kind == "jsonl":
                with _opened(name) as file:
                    yield JsonLines(file.fileno())
            else:
                yield ArrowRows(name, kind)

    _feed(topic, target, sources())


def _opened(file: str) -> Any:
    if file == "-" and sys.stdin is None:
        raise click.UsageError("The standard input is closed; name a file.")
    return os.fdopen(os.dup(sys.stdin.fileno()), "rb") if file == "-" else open(file, "rb")


def _feed(topic: str, target: _Target, sources: Iterator[Source]) -> None:
    """Open the topic, put everything, and print what is stored even if it fails."""
    path = topics_access.folder_of(topic, target.storage)
    made = not (path / "topic.json").exists()
    state: dict[str, Feed] = {}
    started = time.monotonic()

    async def run() -> None:
        first = next(sources)
        if made:
            await first.check(target.bucket_column or DEFAULT_COLUMN)
        async with await _writer(path, made, target) as writer:
            stats = await writer.stats()
            synced = bool(stats.get("wal_enabled")) and stats.get("wal_sync_interval") == 0
            stored = None if target.write_id is None else await writer.last_sequences()
            feed = state["feed"] = Feed(writer, durable_puts=synced, stored=stored)
            try:
                with topics_access.progress(f"into {path.name}", quiet=target.as_json) as progress:
                    for source in chain([first], sources):
                        await source.feed(feed, progress)
            finally:
                await writer.close()
                feed.writer_closed()

    def result() -> PutResult:
        feed, seconds = state["feed"], time.monotonic() - started
        return PutResult(path.name, str(path), feed.acknowledged, feed.repeated, seconds, made)

    try:
        topics_access.run(run())
    except BaseException:
        if "feed" in state:
            _print_result(result(), target.as_json)
        raise
    _print_result(result(), target.as_json)


def _print_result(result: PutResult, as_json: bool) -> None:
    def print_text() -> None:
        rate = result.acknowledged / result.seconds if result.seconds else 0.0
        records = output.plural(result.acknowledged, "record")
        output.line(
            f"{records} acknowledged in {'the new ' if result.made else ''}topic {result.topic} "
            f"({output.seconds(result.seconds)}, {rate:,.0f}/s)"
        )
        if result.repeated:
            output.line(
                f"{result.repeated:,} of them had already been stored under this write id and were "
                "skipped; use a new write id for another input"
            )

    output.show(result, as_json, print_text)


async def _writer(path: Path, made: bool, target: _Target) -> QueueWriter:
    from persisting.queue import write_queue

    settings, backend = dict(target.settings), target.backend
    options = settings or None
    if made:
        backend = backend or "persisting"
        if backend == "memory":
            raise click.UsageError(
                "The backend 'memory' keeps nothing after this command; choose another --backend."
            )
        options = {**DURABLE, **settings} if backend == "persisting" else options
    return await write_queue(
        topic=path.name,
        storage_path=str(path.parent),
        num_buckets=target.buckets,
        bucket_column=target.bucket_column,
        backend=backend,
        backend_options=options,
        writer_id=target.write_id,
    )
