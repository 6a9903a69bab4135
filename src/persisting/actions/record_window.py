"""Reads records of a bucket with their positions and timestamps. Blocking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

    from persisting.bucket.snapshot import Snapshot
    from persisting.topic.spec import TopicConfig
    from persisting.topic.topic_files import TopicFolder


_STEP_GROWTH = 8
"""How many times more records are read than in the step before, whose size is known."""


class Found(msgspec.Struct):
    """A record with its position."""

    bucket: int
    offset: int
    record: dict[str, Any]
    time: str | None = None
    """When the record was accepted; None if only its owner knows."""


def as_records(
    batch: pa.RecordBatch, schema: pa.Schema, names: list[str], config: TopicConfig
) -> list[dict[str, Any]]:
    """Convert rows to records as the queue returns them: all fields, with the topic's defaults."""
    import pyarrow as pa

    from persisting.records.arrow import align

    target = pa.schema([schema.field(name) for name in names])
    converted: list[dict[str, Any]] = align(
        batch, target, config.options.get("schema_defaults") or {}
    ).to_pylist()
    return converted


def record_window(
    source: TopicFolder,
    bucket: int,
    snapshot: Snapshot,
    first: int,
    count: int,
    names: list[str] | None = None,
) -> list[Found]:
    """Return ``count`` records of a bucket from offset ``first`` on, with all fields or ``names``.

    The names must be fields of the topic.
    """
    end = min(snapshot.end, first + count)
    batches = _batches(source, source.schema(), bucket, snapshot, first, end, names)
    return [found for batch, _ in batches for found in batch]


class BoundedWindow(msgspec.Struct):
    """Records that follow each other in a bucket."""

    first: int
    """The offset of the first record."""
    rows: list[Found]
    is_cut: bool = False
    """Whether records were left out because the others are so large."""

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return self.first + len(self.rows)


def bounded_window(
    source: TopicFolder,
    bucket: int,
    snapshot: Snapshot,
    first: int,
    end: int,
    nbytes: int,
    names: list[str] | None = None,
    *,
    newest: bool = False,
    schema: pa.Schema | None = None,
) -> BoundedWindow:
    """Return the records from offset ``first`` to ``end`` that take at most ``nbytes`` in memory.

    The first of them, or with ``newest`` the last; at least one. How well records are compressed
    is not known before they are read, so it reads one record, then more at a time. With ``schema``,
    which is that of the topic, threads may read several buckets at the same time.
    """
    low, high = max(first, snapshot.start), min(end, snapshot.end)
    start, stop, schema = low, high, source.schema() if schema is None else schema
    rows: list[Found] = []
    left, step = nbytes, 1
    while low < high:
        step = min(step, high - low)
        begin = high - step if newest else low
        part: list[Found] = []
        size = 0
        for batch, batch_size in _batches(
            source, schema, bucket, snapshot, begin, begin + step, names
        ):
            part += batch
            size += batch_size
            if size >= left:
                break
        if newest and len(part) < step:  # the newest ones are missing
            step = max(1, len(part) // 2)
            continue
        left -= size
        rows = part + rows if newest else rows + part
        low, high = (low, begin) if newest else (begin + len(part), high)
        if left <= 0:
            break
        fitting = left * len(rows) // max(1, nbytes - left)
        step = min(step * _STEP_GROWTH, max(1, fitting))
    shown = stop - len(rows) if newest else start
    return BoundedWindow(shown, rows, low < high)


def _batches(
    source: TopicFolder,
    schema: pa.Schema,
    bucket: int,
    snapshot: Snapshot,
    first: int,
    end: int,
    names: list[str] | None,
) -> Iterator[tuple[list[Found], int]]:
    """Yield records in order, with the bytes that they took as Arrow data."""
    from persisting.topic.scan import divided, read_snapshot

    if first >= end:
        return
    chosen = schema.names if names is None else names
    for batch in read_snapshot(snapshot, bucket, first, end, chosen):
        rows, *metadata = divided(batch)
        kept = as_records(rows, schema, chosen, source.config)
        found = [
            Found(number, offset, record, timestamp.isoformat())
            for number, offset, timestamp, record in zip(
                *(column.to_pylist() for column in metadata), kept, strict=True
            )
        ]
        yield found, batch.nbytes


def by_arrival(found: Found) -> tuple[bool, str, int, int]:
    """Return the key that sorts records of several buckets in order of arrival.

    Records whose time is not known are not flushed yet, so they are the newest.
    """
    return found.time is None, found.time or "", found.bucket, found.offset
