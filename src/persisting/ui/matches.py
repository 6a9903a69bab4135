"""Records with their positions that match a condition, and vectors to search for. Blocking."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any

from persisting.bucket.snapshot import Snapshot
from persisting.bucket.snapshot_search import SnapshotSearch
from persisting.errors import InvalidArgument
from persisting.records.evolution import is_vector
from persisting.topic.topic_files import TopicFolder
from persisting.ui.queries import RecordHit


def matching(
    source: TopicFolder, where: str | None, limit: int, buckets: Iterable[int] | None = None
) -> list[RecordHit]:
    """Return records that match a condition, the first ones of the first buckets, at most
    ``limit``."""
    hits: list[RecordHit] = []
    for bucket, snapshot, search in searches(source, buckets):
        if len(hits) >= limit:
            break
        offsets = search.matching_offsets(where, limit - len(hits))
        hits += with_times(bucket, snapshot, offsets, snapshot.take(offsets))
    return hits


def searches(
    source: TopicFolder, buckets: Iterable[int] | None = None
) -> Iterator[tuple[int, Snapshot, SnapshotSearch]]:
    """Yield the buckets that exist, each with its records now and a search in them."""
    for bucket in source.buckets if buckets is None else buckets:
        reader = source.reader(bucket)
        if reader is not None:
            reader.refresh()
            snapshot = reader.snapshot()
            specs = reader.maintenance.index_specs
            search = SnapshotSearch(snapshot, reader.known_schema(), specs, reader.buffer_view)
            yield bucket, snapshot, search


def with_times(
    bucket: int, snapshot: Snapshot, offsets: Iterable[int], records: Iterable[dict[str, Any]]
) -> list[RecordHit]:
    """Return records as hits with the times at which they were accepted."""
    offsets = list(offsets)
    stored = [offset for offset in offsets if offset < snapshot.persisted]
    times = dict(zip(stored, snapshot.view.arrivals_at(stored) if stored else [], strict=True))
    buffered = snapshot.buffered_arrivals()
    for offset in offsets:
        if offset >= snapshot.persisted:
            times[offset] = int(buffered[offset - snapshot.persisted])
    return [
        RecordHit(
            bucket,
            offset,
            record,
            dt.datetime.fromtimestamp(times[offset] / 1e6, dt.timezone.utc).isoformat(),
        )
        for offset, record in zip(offsets, records, strict=True)
    ]


def vector_fields(source: TopicFolder) -> list[str]:
    """Return the fields of a topic that hold vectors."""
    return [field.name for field in source.schema() if is_vector(field.type)]


def vector_of(
    source: TopicFolder, bucket: int, offset: int, column: str | None
) -> tuple[str, list[float]]:
    """Return the vector field of a record and its value: in ``column``, or in the only one."""
    fields = vector_fields(source)
    if column not in fields:
        if len(fields) != 1:
            raise InvalidArgument(
                f"choose the field to compare; the fields with vectors are: "
                f"{', '.join(fields) or 'none'}"
            )
        column = fields[0]
    if bucket not in source.buckets:
        raise InvalidArgument(f"the topic has no bucket {bucket}")
    snapshot = source.snapshot(bucket)
    if not snapshot.start <= offset < snapshot.end:
        raise InvalidArgument(f"there is no record at {bucket}:{offset}")
    record = snapshot.take([offset])[0]
    vector = record.get(column)
    if not vector:
        raise InvalidArgument(f"the record at {bucket}:{offset} has no vector in {column!r}")
    return column, vector
