"""Reads a topic that grows: every acknowledged record, by its bucket and offset. Blocking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from persisting.backends.table_backend import TableBackend
from persisting.bucket.bucket import Bucket
from persisting.bucket.snapshot import Snapshot
from persisting.bucket.snapshot_search import laid_out
from persisting.data.place import TopicLocation
from persisting.errors import InvalidArgument
from persisting.records import Rules
from persisting.records.arrow import align, merge
from persisting.table.search import check_where, matching
from persisting.topic import scan
from persisting.topic.live_topics import live_in_store, live_topic
from persisting.topic.local import LocalTopic
from persisting.topic.scan import Filter, Slice
from persisting.topic.store_files import StoreTopic


class LiveRead(NamedTuple):
    """What a read of a bucket has found."""

    epoch: int
    """How many times the end of the bucket may have gone back: see
    :meth:`LiveRows.unchanged_until`."""
    start: int
    """The first offset that retention has left."""
    end: int
    """The offset after the last record."""
    reached: int
    """The offset after the last record that was read; not all of them may have matched."""
    rows: pa.RecordBatch


def _owned(bucket: int, live: LocalTopic | None) -> Bucket | None:
    """Return the bucket itself if this process owns it."""
    if live is None or live.is_lost(bucket):
        return None
    backend = live.open_backend(bucket)
    if isinstance(backend, TableBackend) and not backend.bucket.lifecycle.closed:
        return backend.bucket
    return None


class LiveRows:
    """The buckets of a topic, with some columns and a condition."""

    def __init__(
        self, place: TopicLocation, columns: Sequence[str] | None = None, where: str | None = None
    ) -> None:
        self._topic = place.open()
        self._topic.recover_own_logs()
        self._columns, self._where = columns, where
        check_where(where)
        self.config = self._topic.config
        self.topic_id = self._topic.config.id
        self.buckets = self._topic.config.num_buckets

    def snapshots(self) -> list[Snapshot]:
        """Return the records of all buckets."""
        live = self._live()
        return [self._snapshot(bucket, live) for bucket in range(self.buckets)]

    def snapshot(self, bucket: int) -> Snapshot:
        """Return the records of a bucket."""
        return self._snapshot(bucket, self._live())

    def _live(self) -> LocalTopic | None:
        """Return the topic if this process owns it."""
        if isinstance(self._topic, StoreTopic):
            return live_in_store(self._topic.store.address)
        return live_topic(self._topic.folder)

    def _snapshot(self, bucket: int, live: LocalTopic | None) -> Snapshot:
        """Ask the owner of a bucket if that is this process, else read the files."""
        owned = _owned(bucket, live)
        return self._topic.snapshot(bucket) if owned is None else owned.snapshot()

    def unchanged_until(self, bucket: int, before: int, epoch: int) -> int:
        """Return the offset up to which the records of ``epoch`` are those of the epoch ``before``.

        The bucket was restored to older versions meanwhile, or lost records that were not flushed.
        """
        owned = _owned(bucket, self._live())
        table = self._topic.table(bucket) if owned is None else owned.table
        ends = [restored.end for restored in table.restores[before:epoch]]
        return min(ends) if 0 <= before < epoch and ends else 0

    def read(self, bucket: int, offset: int, limit: int) -> LiveRead:
        """Return the records from ``offset`` on, at most ``limit`` of them."""
        snapshot = self.snapshot(bucket)
        first = max(offset, snapshot.start)
        fields = self._fields(snapshot)
        names = (
            None
            if self._where is not None
            else [n for n in fields.names if n in snapshot.schema.names]
        )
        batches = list(snapshot.batches(first, limit, names))
        reached = first + sum(batch.num_rows for batch in batches)
        if batches:
            rows = pa.concat_batches(batches)
        else:
            rows = pa.RecordBatch.from_pylist([], schema=fields)
        if self._where is not None and rows.num_rows:
            rows = self._matching(rows, snapshot, first)
        rows = align(rows, fields, snapshot.defaults)
        return LiveRead(snapshot.epoch, snapshot.start, snapshot.end, reached, rows)

    def _fields(self, snapshot: Snapshot) -> pa.Schema:
        """Return the fields of the records that are read."""
        if self._columns is None:
            return snapshot.schema
        missing = [name for name in self._columns if name not in snapshot.schema.names]
        known = snapshot.schema
        if missing and snapshot.end > snapshot.start:
            known = merge(known, self._topic.schema(), Rules(evolving=True))
        for name in self._columns:
            if name not in known.names and snapshot.end > snapshot.start:
                names = ", ".join(map(repr, known.names)) or "none"
                raise InvalidArgument(f"columns names {name!r}; the fields are: {names}")
        return pa.schema([known.field(name) for name in self._columns if name in known.names])

    def _matching(self, rows: pa.RecordBatch, snapshot: Snapshot, first: int) -> pa.RecordBatch:
        assert self._where is not None
        offsets = self._offsets_in(rows, snapshot, first, self._where)
        return rows.take(pa.array(offsets - first))

    def _known(self, snapshot: Snapshot) -> pa.Schema:
        return merge(snapshot.schema, self._topic.schema(), Rules(evolving=True))

    def _offsets_in(
        self, rows: pa.RecordBatch, snapshot: Snapshot, first: int, where: str
    ) -> np.ndarray:
        """Return the offsets of the rows of a batch that match a condition."""
        known = self._known(snapshot)
        Filter.checked(where, known)
        view = laid_out(pa.Table.from_batches([rows]), known, first, None, snapshot.defaults)
        return np.array(matching(view, where, None), np.int64)

    def matching(
        self, bucket: int, snapshot: Snapshot, start: int, end: int, where: str
    ) -> np.ndarray:
        """Return the offsets of a range that match a condition."""
        found = [np.zeros(0, np.int64)]
        stored = min(end, snapshot.persisted)
        if start < stored:
            part = Slice(self._topic.place, bucket, start, stored)
            condition = Filter.checked(where, self._known(snapshot))
            for batch in scan.read_matching(snapshot.view, part, condition):
                found.append(scan.divided(batch)[2].to_numpy())
        start = max(start, stored)
        if start < end:
            batches = list(snapshot.batches(start, end - start))
            found.append(self._offsets_in(pa.concat_batches(batches), snapshot, start, where))
        return np.concatenate(found)
