"""``export``: writes a topic to a file."""

from __future__ import annotations

import datetime as dt
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from persisting.actions.text_values import format_size
from persisting.cli import output, parameters, topics_access
from persisting.cli.formats import FORMATS, format_of
from persisting.cli.json_contract import prints
from persisting.cli.parameters import LocalPath
from persisting.fs import remove_all

if TYPE_CHECKING:
    import pyarrow as pa

    from persisting.topic.scan import Slice
    from persisting.topic.topic_files import TopicFolder


class Exported(msgspec.Struct):
    """The result of an export."""

    topic: str
    file: str
    format: str
    rows: int
    bytes: int
    seconds: float


@click.command()
@parameters.topic
@click.argument("file", type=LocalPath(allow_dash=True))
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="Format of the file.  [default: by its extension]",
)
@parameters.where
@parameters.columns
@parameters.bucket
@parameters.tag("Export")
@parameters.at("Export")
@click.option(
    "--flush",
    is_flag=True,
    help="First have the owner of the topic write all acknowledged records to the table.",
)
@click.option("--metadata", is_flag=True, help="Add the fields _bucket, _offset and _time.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@parameters.storage
@parameters.as_json
@prints("export", "persisting.cli.commands.export:Exported")
def export(
    topic: str,
    file: str,
    kind: str | None,
    where: str | None,
    columns: list[str] | None,
    bucket: int | None,
    tag: str | None,
    timestamp: dt.datetime | None,
    flush: bool,
    metadata: bool,
    overwrite: bool,
    storage: str,
    as_json: bool,
) -> None:
    """Write the records of a topic to a file: Parquet, Lance or JSON lines.

    Buckets are written one after another, in order, with bounded memory. The file appears when it
    is complete. '-' writes JSON lines to the standard output. For partitioned exports and clusters
    see 'persisting pipeline export'.

    Records that a process has put to an open topic are missing until that process flushes them;
    --flush asks it to. In an object store --flush also replays the log of a killed owner, once its
    lease expires.

    \b
    Examples:
      persisting export events events.parquet
      persisting export events good.jsonl --where "score > 0.5" --columns id,text
      persisting export events - --tag v1 | wc -l
    """
    if tag is not None and timestamp is not None:
        raise click.UsageError("Pass either --tag or --at, not both.")
    is_newest = tag is None and timestamp is None
    if flush and not is_newest:
        raise click.UsageError("--flush adds to the newest state; it cannot change that of a tag.")
    chosen = kind or ("jsonl" if file == "-" else format_of(file))
    if file == "-" and chosen != "jsonl":
        raise click.UsageError(f"{chosen} cannot be written to the standard output; name a file.")
    if file != "-" and os.path.exists(file) and not overwrite:
        raise click.UsageError(f"{file} exists; choose another name or pass --overwrite.")
    source = topics_access.find_recovered(topic, storage)
    if flush:
        from persisting.topic import handover

        handover.flush(source.handover_place, source.config)
    elif is_newest:
        topics_access.note_unflushed(source, hint="with --flush it does")
    parts = _parts(source, bucket, tag if tag is not None else timestamp)
    total = None if where is not None else sum(part.end - part.start for part in parts)
    started = time.monotonic()
    with topics_access.progress(f"from {source.config.topic}", total, quiet=as_json) as progress:
        schema, rows = _rows(source, parts, columns, where, metadata, progress.advance)
        size = _write_whole(rows, schema, file, chosen)
    seconds = time.monotonic() - started
    result = Exported(source.config.topic, file, chosen, progress.done, size, seconds)
    if file != "-":
        output.show(
            result,
            as_json,
            lambda: output.line(
                f"{output.plural(result.rows, 'record')} to {file} "
                f"({format_size(size)}, {output.seconds(seconds)})"
            ),
        )


def _parts(
    source: TopicFolder, bucket: int | None, version: str | dt.datetime | None
) -> list[Slice]:
    """Return the slices to read: the whole topic now, or at a version."""
    from persisting.topic.scan import Slice

    chosen = None if version is None else source.versions(version)
    slices = []
    for number in topics_access.buckets(source, bucket):
        table = source.table(number)
        at = None if chosen is None else chosen[number]
        view = table.view if at is None else table.at(at)
        if view.rows:
            slices.append(
                Slice(source.place, number, view.start, view.end, len(table.restores), at)
            )
    return slices


def _rows(
    source: TopicFolder,
    parts: list[Slice],
    columns: list[str] | None,
    where: str | None,
    metadata: bool,
    count: Callable[[int], None],
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    import pyarrow as pa

    from persisting.records.arrow import align
    from persisting.topic.scan import METADATA, Filter, divided, read

    schema, names = source.schema(), topics_access.columns(source, columns)
    taken = [name for name in names if metadata and name in METADATA.names]
    if taken:
        raise click.UsageError(
            f"--metadata adds {taken[0]!r}, but the records already have a field of that name."
        )
    target = pa.schema([schema.field(name) for name in names])
    condition = None if where is None else Filter.checked(where, schema)
    defaults: dict[str, Any] = source.config.options.get("schema_defaults") or {}
    whole = pa.schema([*target, *METADATA]) if metadata else target

    def rows() -> Iterator[pa.RecordBatch]:
        for part in parts:
            for batch in read(part, names, condition, metadata=metadata):
                plain, *places = divided(batch) if metadata else (batch,)
                aligned = align(plain, target, defaults)
                count(batch.num_rows)
                yield pa.RecordBatch.from_arrays([*aligned.columns, *places], schema=whole)

    return whole, rows()


def _write_whole(rows: Iterator[pa.RecordBatch], schema: pa.Schema, file: str, kind: str) -> int:
    """Write a file that gets its name when it is complete; return its size in bytes."""
    if file == "-":
        return _jsonl(rows, sys.stdout.buffer)
    target = Path(file)
    draft = target.with_name(f".{target.name}.partial")
    remove_all(draft)
    try:
        with _unsupported_types(kind):
            _write(rows, schema, draft, kind)
        remove_all(target)
        os.replace(draft, target)
    finally:
        remove_all(draft)
    if target.is_dir():
        return sum(part.stat().st_size for part in target.rglob("*") if part.is_file())
    return target.stat().st_size


@contextmanager
def _unsupported_types(kind: str) -> Iterator[None]:
    """Explain what to do if a format does not support a type."""
    import pyarrow as pa

    from persisting.errors import InvalidArgument, StorageError
    from persisting.table.lance_errors import reason

    try:
        yield
    except StorageError:
        raise
    except (pa.ArrowException, OSError, ValueError) as exc:
        if isinstance(exc, OSError) and exc.errno is not None:
            raise
        raise InvalidArgument(
            f"cannot write {kind}: {reason(exc)}. Leave out the field with --columns, or export as "
            "jsonl"
        ) from exc


def _write(rows: Iterator[pa.RecordBatch], schema: pa.Schema, draft: Path, kind: str) -> None:
    if kind == "jsonl":
        with draft.open("wb") as out:
            _jsonl(rows, out)
    elif kind == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetWriter(draft, schema, compression="zstd") as writer:
            for batch in rows:
                writer.write_batch(batch)
    else:
        import lance
        import pyarrow as pa

        lance.write_dataset(pa.RecordBatchReader.from_batches(schema, rows), str(draft))


def _jsonl(rows: Iterator[pa.RecordBatch], out: Any) -> int:
    total = 0
    for batch in rows:
        for start in range(0, batch.num_rows, 1000):
            for record in batch.slice(start, 1000).to_pylist():
                total += out.write(output.encoded(record) + b"\n")
    out.flush()
    return total
