"""``put`` and ``import``: store records in a topic."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import click
import msgspec

from persisting.cli import output, parameters, topics_access
from persisting.cli.formats import compression_of, decompressed, holds_lines, imported_format
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Names, Setting
from persisting.cli.topics_access import TopicPlace
from persisting.errors import InvalidArgument, SchemaError
from persisting.options import DURABLE

if TYPE_CHECKING:
    from persisting.cli.ingest import BadLines, Feed, Source
    from persisting.queue import QueueWriter

_GENERATED_ID = re.compile(r"put-\d{8}-\d{6}-[0-9a-f]{8}")
_TABLES = ("LanceBackend", "PersistingBackend")


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
    write_id: str | None = None
    """The write id, given or generated; None if the backend cannot store one."""
    skipped: int = 0
    """Lines that could not be stored and were set aside."""


@dataclass(frozen=True)
class _Target:
    """Where to store records: options of the topic, and of the command."""

    buckets: int | None
    bucket_column: str | None
    backend: str | None
    settings: tuple[tuple[str, Any], ...]
    write_id: str | None
    skip_bad: str | None
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
    click.option(
        "--skip-bad",
        metavar="FILE",
        type=click.Path(dir_okay=False),
        help="Append lines that cannot be stored to FILE and continue.",
    ),
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

    Prints how many records are durable, even if an error or Ctrl-C stops it; then a write id is
    printed too, under which the command can be repeated without duplicates. A topic that does not
    exist is created durable, as by 'persisting create'. If another process of the same user has the
    topic open, the records go through it. A file whose name ends in .gz or .zst is decompressed.

    \b
    Examples:
      echo '{"id": "a", "score": 1.5}' | persisting put events
      persisting put events records.jsonl --buckets 8 --bucket-column user
      persisting put events records.jsonl --write-id load-2026-11-15
      persisting put events records.jsonl.gz --skip-bad bad.jsonl
    """

    if file != "-" and not holds_lines(file):
        raise click.UsageError(f"put reads JSON lines; use 'persisting import' for {file}.")

    def sources(bad: BadLines | None) -> Iterator[Source]:
        from persisting.cli.ingest import JsonLines

        compression = None if file == "-" else compression_of(file)
        with _opened(file) as source, decompressed(source, compression) as read:
            yield JsonLines(read, bad=bad)

    _feed(topic, target, sources)


@click.command("import")
@parameters.topic
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--text",
    "texts",
    type=Names(),
    metavar="A,B",
    help="Columns of CSV files that are text even if they look like numbers or dates.",
)
@_target
@prints("import", "persisting.cli.commands.write:PutResult")
def import_(topic: str, files: tuple[str, ...], texts: list[str] | None, target: _Target) -> None:
    """Store the rows of Parquet, Lance, JSON lines, CSV or TSV files in a topic.

    The extension of each file decides its format; JSON lines, CSV and TSV may be compressed (.gz,
    .zst). The first line of a CSV file names its columns, whose types are inferred. An import that
    stops prints a write id, under which it can be repeated without duplicates.

    \b
    Examples:
      persisting import events january.parquet february.parquet
      persisting import events old.lance --write-id from-old
      persisting import events visits.csv.gz --bucket-column user --text zip
    """
    forms = {name: imported_format(name) for name in files}
    kinds = {form.kind for form in forms.values()}
    if texts and not kinds & {"csv", "tsv"}:
        raise click.UsageError("--text is for CSV and TSV files; none is given.")
    if target.skip_bad is not None and not kinds & {"jsonl", "csv", "tsv"}:
        raise click.UsageError("--skip-bad is for JSON lines, CSV and TSV files; none is given.")

    def sources(bad: BadLines | None) -> Iterator[Source]:
        from persisting.cli.ingest import ArrowRows, JsonLines

        for name, form in forms.items():
            if form.kind == "jsonl":
                with _opened(name) as file, decompressed(file, form.compression) as read:
                    yield JsonLines(read, name, bad)
            else:
                yield ArrowRows(name, form, texts or [], bad)

    _feed(topic, target, sources)


def _opened(file: str) -> Any:
    if file == "-" and sys.stdin is None:
        raise click.UsageError("The standard input is closed; name a file.")
    return os.fdopen(os.dup(sys.stdin.fileno()), "rb") if file == "-" else open(file, "rb")


def _feed(
    topic: str, target: _Target, sources: Callable[[BadLines | None], Iterator[Source]]
) -> None:
    """Open the topic, put everything, and print what is stored even if it fails."""
    from persisting.cli.ingest import BadLines

    path = topics_access.place_of(topic, target.storage)
    made = not path.exists
    state: dict[str, Feed] = {}
    started = time.monotonic()
    with ExitStack() as stack:
        bad = None
        if target.skip_bad is not None:
            bad = BadLines(target.skip_bad)
            stack.callback(bad.close)
        write_id = target.write_id or _new_write_id()

        def result() -> PutResult:
            feed, seconds = state["feed"], time.monotonic() - started
            return PutResult(
                path.name,
                str(path),
                feed.acknowledged,
                feed.repeated,
                seconds,
                made,
                write_id if feed.numbered else None,
                0 if bad is None else bad.count,
            )

        try:
            topics_access.run(_put_all(path, made, target, write_id, sources(bad), bad, state))
        except BaseException as exc:
            if "feed" in state:
                stopped = result()
                _print_result(stopped, target)
                _explain_repetition(exc, stopped, state["feed"].bucket_column)
            raise
        _print_result(result(), target)


async def _put_all(
    path: TopicPlace,
    made: bool,
    target: _Target,
    write_id: str,
    sources: Iterator[Source],
    bad: BadLines | None,
    state: dict[str, Feed],
) -> None:
    """Put everything; ``state`` gets the feed, which counts what is stored."""
    from persisting.cli.ingest import Feed
    from persisting.topic.spec import DEFAULT_COLUMN

    first = next(sources)
    if made:
        await first.check(target.bucket_column or DEFAULT_COLUMN)
    async with await _writer(path, made, target, write_id) as writer:
        stats = await writer.stats()
        synced = bool(stats.get("wal_enabled")) and stats.get("wal_sync_interval") == 0
        numbered = target.write_id is not None or stats.get("backend") in _TABLES
        stored = await writer.last_sequences() if numbered else None
        feed = state["feed"] = Feed(writer, durable_puts=synced, stored=stored, bad=bad)
        try:
            with topics_access.progress(f"into {path.name}", quiet=target.as_json) as progress:
                for source in chain([first], sources):
                    await source.feed(feed, progress)
        finally:
            await writer.close()
            feed.writer_closed()


def _new_write_id() -> str:
    return f"put-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"


def _explain_repetition(exc: BaseException, stopped: PutResult, column: str) -> None:
    """Say how to repeat a command that stopped, so that nothing is stored twice."""
    if stopped.write_id is None or stopped.acknowledged == 0:
        return
    again = f"repeat the command with --write-id {stopped.write_id}; it skips what is stored"
    if isinstance(exc, (SchemaError, InvalidArgument)):
        raise type(exc)(
            f"{exc}. To continue, fix the input in place (a line may be emptied, but other lines "
            f"keep their numbers, and a fixed line its {column!r}) and {again}"
        ) from exc
    output.say(f"note: to continue, {again}")


def _print_result(result: PutResult, target: _Target) -> None:
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
        if result.skipped:
            output.line(
                f"{output.plural(result.skipped, 'line')} could not be stored: see "
                f"{target.skip_bad}"
            )

    output.show(result, target.as_json, print_text)


async def _writer(path: TopicPlace, made: bool, target: _Target, write_id: str) -> QueueWriter:
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
        storage_path=path.root,
        num_buckets=target.buckets,
        bucket_column=target.bucket_column,
        backend=backend,
        backend_options=options,
        writer_id=f"~{write_id}" if _GENERATED_ID.fullmatch(write_id) else write_id,
    )
