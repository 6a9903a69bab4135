"""The upkeep of a bucket: by itself after flushes and now and then, and by hand.

Everything here blocks and runs in the pool. Each step holds the table for its own length only, so
that a flush waits for one step at most, and puts wait for none.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from persisting.bucket import group_offsets
from persisting.concurrency import timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.errors import InvalidArgument, StorageError
from persisting.table import compaction, indexes, operations, retention, versions
from persisting.table.compaction import Limit
from persisting.table.indexes import IndexSpec
from persisting.table.retention import Limits
from persisting.table.versions import Version

if TYPE_CHECKING:
    from persisting.bucket.bucket import Bucket
    from persisting.table.view import TableView

log = logging.getLogger("persisting")

_BEHIND_ROWS = 8192
_BEHIND_SHARE = 20
_LEAST_FULL_ROWS = 1024
_SHARE_OF_KEPT = 8
"""With retention, a fragment holds at most this part of what is kept: it goes as a whole."""

_RARELY = 60.0


class Maintenance:
    """Looks after one bucket that is open for writing."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket_ref = weakref.ref(bucket)
        self.error: str | None = None
        options = bucket.options
        self._limits = Limits(
            rows=options.retention_rows,
            nbytes=options.retention_bytes,
            seconds=options.retention_seconds,
        )
        self._limit = _fragment_limit(self._limits)
        self._job = CoalescedTask(weak_callback(self, Maintenance._run))
        self._wanted: list[IndexSpec] | None = None
        self._unwanted = False
        """Whether the table may have an index that is to go."""
        self._pause = _pause(options.keep_versions, options.retention_seconds)
        self._clean_at = time.monotonic() + self._pause
        self._ended = False

    @property
    def _bucket(self) -> Bucket:
        bucket = self._bucket_ref()
        if bucket is None:
            raise ReferenceError("the bucket was dropped")
        return bucket

    # By itself

    def begin(self) -> None:
        """Look now and then, also when nothing is flushed."""
        timer.after(self._pause, weak_callback(self, Maintenance._again))

    def end(self) -> None:
        """Look no more: the bucket was closed for good."""
        self._ended = True

    def _again(self) -> None:
        if not self._ended and self._bucket_ref() is not None:
            self._job.request()
            self.begin()

    def look(self) -> None:
        """After a flush: begin what is worthwhile by now. Never raises: the flush succeeded."""
        bucket = self._bucket
        sizes = bucket.table.view.sizes
        if (
            (bucket.options.compaction and compaction.worthwhile(sizes, self._limit))
            or self._limits.rows is not None
            or self._limits.nbytes is not None
            or self._wanted is None
            or self._wanted
            or self._unwanted
            or self._cleaning_due
        ):
            self._job.request()

    @property
    def _cleaning_due(self) -> bool:
        return time.monotonic() >= self._clean_at

    def _run(self) -> None:
        """What is worthwhile now. What fails is told, tried again at the next occasion, and stands
        in nothing else's way."""
        bucket = self._bucket_ref()
        if bucket is None or bucket.closed:
            return
        failures = []
        for step in (self._index, self._compact_all, self._retain_by_itself, self._clean):
            try:
                step()
            except Exception as exc:
                failures.append(exc)
        if not failures:
            self.error = None
        elif not bucket.closed:
            before, self.error = self.error, str(failures[0]) or type(failures[0]).__name__
            bucket.metrics.upkeep_failed()
            if self.error != before:
                log.error("upkeep of %s failed: %s", bucket.options.storage_path, self.error)

    @contextmanager
    def _turn(self) -> Iterator[TableView]:
        """Hold the table of the open bucket; what was done to it is seen by readers at once."""
        bucket = self._bucket
        with bucket.table_turn:
            if bucket.closed:
                bucket.check_open()
            try:
                yield bucket.table.view
            finally:
                bucket.adopt_table()

    def _index(self) -> None:
        bucket = self._bucket
        if not (self.wanted or self._unwanted) or not bucket.table.view.rows:
            bucket.metrics.indexed(0)
            return
        with self._turn() as view:
            operations.build_indexes(bucket.table, self.wanted)
            self._unwanted = False
            behind = indexes.behind(bucket.table.view.dataset)
            if behind >= max(_BEHIND_ROWS, view.rows // _BEHIND_SHARE):
                operations.optimize_indexes(bucket.table)
                behind = 0
        bucket.metrics.indexed(behind)

    def _compact_all(self) -> None:
        while self._bucket.options.compaction and self._compact_some():
            pass

    def _retain_by_itself(self) -> None:
        if self._limits.any:
            self.retain(self._limits)

    def _compact_some(self) -> bool:
        with self._turn() as view:
            return self._compact(view, compaction.worthwhile(view.sizes, self._limit), self._limit)

    def _compact(self, view: TableView, count: int, limit: Limit, *, whole: bool = False) -> bool:
        bucket = self._bucket
        if not count:
            return False
        started = time.perf_counter()
        operations.compact(bucket.table, bucket.fs, count, limit, whole=whole)
        after = len(bucket.table.view.sizes)
        rows = sum(size.rows for size in view.sizes[-count:])
        bucket.metrics.compacted(time.perf_counter() - started, rows)
        return after < len(view.sizes)

    def _clean(self) -> int:
        """Remove versions that are too old, if it is time for that; how many."""
        bucket = self._bucket
        keep = bucket.options.keep_versions
        if keep is None or not self._cleaning_due or bucket.table.view.dataset is None:
            return 0
        started = time.monotonic()
        try:
            with self._turn():
                return operations.clean(bucket.table, keep)
        finally:
            # Where it takes long it comes seldom: a flush has to wait for it.
            took = time.monotonic() - started
            self._clean_at = time.monotonic() + self._pause + 20 * took

    @property
    def limit(self) -> Limit:
        """How large a fragment may become."""
        return self._limit

    # By hand

    def compact(self) -> dict[str, int]:
        """Rewrite all small fragments, and remove versions that are too old."""
        bucket = self._bucket
        before = len(bucket.table.view.sizes)
        with self._turn() as view:
            count = compaction.everything(view.sizes, self._limit)
            self._compact(view, count, self._limit, whole=True)
        self._clean_at = 0.0
        cleaned = self._clean()
        after = len(bucket.table.view.sizes)
        return {"fragments_before": before, "fragments_after": after, "versions_removed": cleaned}

    def retain(self, limits: Limits) -> dict[str, int]:
        """Drop the oldest fragments that lie beyond the limits and are not held back."""
        limits.check()
        bucket = self._bucket
        dropped = 0
        with self._turn() as view:
            count = retention.droppable(view, limits, self._floor())
            if count:
                dropped = operations.drop_first(bucket.table, count)
            start = bucket.table.view.start
        if dropped:
            bucket.metrics.dropped(dropped)
        return {"dropped": dropped, "start_offset": start}

    def _floor(self) -> int | None:
        """The offset from which on rows are held back from retention."""
        bucket = self._bucket
        options, floors = bucket.options, []
        if "groups" in options.retention_waits_for and options.groups_path is not None:
            restored = [one.end for one in bucket.table.restores]
            floors.append(
                group_offsets.least_committed(
                    options.groups_path, options.bucket_id, restored, bucket.fs
                )
            )
        dataset = bucket.table.view.dataset
        if "tags" in options.retention_waits_for and dataset is not None:
            floors += [bucket.table.at(v).start for v in versions.tags(dataset).values()]
        return min((floor for floor in floors if floor is not None), default=None)

    def tag(self, name: str, empty: bool = False) -> dict[str, Any]:
        """Pin everything in the table now under a name, in place of an older tag of that name.

        With ``empty`` a table that does not exist yet is no error, and has version 0.
        """
        bucket = self._bucket
        versions.check_tag(name)
        with self._turn() as view:
            if view.dataset is None and not empty:
                raise StorageError(
                    f"{bucket.options.storage_path} holds nothing yet that could be tagged"
                )
            version = 0 if view.dataset is None else operations.tag(bucket.table, bucket.fs, name)
            view = bucket.table.view
            return {
                "name": name,
                "version": version,
                "rows": view.rows,
                "start_offset": view.start,
                "end_offset": view.end,
            }

    def delete_tag(self, name: str) -> bool:
        bucket = self._bucket
        versions.check_tag(name)
        with self._turn():
            return operations.delete_tag(bucket.table, bucket.fs, name)

    def restore(self, version: Version, token: str | None = None) -> dict[str, Any]:
        """Go back to a version: a new version with its content. The end of the bucket goes back
        too, and its epoch rises, by which readers know."""
        bucket = self._bucket
        table = bucket.table
        token = token or uuid.uuid4().hex
        with bucket.emptied(), self._turn() as view:
            before, shaper = view.end, bucket.shaper_of(view)
            if not table.restores or table.restores[-1].token != token:
                if view.dataset is not None:
                    number = versions.resolve(view.dataset, version)
                    if number != versions.NOTHING:  # whose fields stay those of now
                        shaper = bucket.shaper_of(table.at(number))
                    operations.restore(table, number, token)
                elif version != versions.NOTHING and not isinstance(version, dt.datetime):
                    raise InvalidArgument(f"{bucket.options.storage_path} has no versions yet")
            after = table.view
            bucket.restored(shaper)
        return {
            "version": after.version,
            "start_offset": after.start,
            "end_offset": after.end,
            "removed": max(0, before - after.end),
            "epoch": len(table.restores),
        }

    # Indexes

    @property
    def wanted(self) -> list[IndexSpec]:
        """The indexes that were asked for; a reader without the lock looks each time."""
        bucket = self._bucket
        if self._wanted is None or bucket.options.read_only:
            self._wanted = indexes.load(bucket.options.storage_path, bucket.fs)
        return self._wanted

    def create_index(self, wanted: IndexSpec) -> dict[str, Any]:
        """Have an index from now on, in place of one of its family on the same field."""
        bucket = self._bucket
        others = [
            one for one in self.wanted if (one.column, one.family) != (wanted.column, wanted.family)
        ]
        with self._turn() as view:
            again = wanted in self.wanted and view.dataset is not None
            if again and wanted.name in indexes.built(view.dataset):
                operations.drop_index(bucket.table, wanted.name)
            indexes.save(bucket.options.storage_path, [*others, wanted], bucket.fs)
            self._wanted = [*others, wanted]
            if bucket.table.view.rows:
                operations.build_indexes(bucket.table, self.wanted)
        return self.describe(wanted)

    def drop_index(self, column: str, kind: str | None) -> int:
        """Do without an index; how many there were."""
        bucket = self._bucket
        going = [
            one
            for one in self.wanted
            if one.column == column and kind in (None, one.kind, one.family)
        ]
        if going or self._unwanted:
            with self._turn() as view:
                staying = [one for one in self.wanted if one not in going]
                indexes.save(bucket.options.storage_path, staying, bucket.fs)
                self._wanted, self._unwanted = staying, True
                if view.dataset is not None:
                    operations.build_indexes(bucket.table, self._wanted)
                self._unwanted = False
            if not self._wanted:
                bucket.metrics.indexed(0)
        return len(going)

    def describe(self, wanted: IndexSpec) -> dict[str, Any]:
        """An index and how far it has come."""
        view = self._bucket.table.view
        there = indexes.built(view.dataset) if view.dataset is not None else {}
        rows = there[wanted.name].rows if wanted.name in there else 0
        return {
            "column": wanted.column,
            "kind": wanted.kind,
            "family": wanted.family,
            "metric": wanted.metric if wanted.family == "vector" else None,
            "rows": rows,
            "behind": view.rows - rows,
        }


def _fragment_limit(limits: Limits) -> Limit:
    rows, nbytes = Limit()
    if limits.rows is not None:
        rows = min(rows, max(_LEAST_FULL_ROWS, limits.rows // _SHARE_OF_KEPT))
    if limits.nbytes is not None:
        nbytes = min(nbytes, max(1, limits.nbytes // _SHARE_OF_KEPT))
    return Limit(rows, nbytes)


def _pause(*seconds: float | None) -> float:
    """How often to look, for what has to happen within these times."""
    shortest = min((one for one in seconds if one is not None), default=_RARELY)
    return max(0.2, min(_RARELY, shortest / 10))
