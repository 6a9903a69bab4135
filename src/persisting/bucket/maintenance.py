"""Maintenance of a bucket: automatic after flushes and at intervals, and on request.

Everything here blocks and runs in the pool. Each step holds the table lock only while it runs, so
that a flush waits for one step at most, and puts never wait.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from persisting.bucket import group_offsets, handover_notes
from persisting.bucket.buffer_bypass import BufferBypass
from persisting.bucket.group_offsets import Hold
from persisting.bucket.lifecycle import Lifecycle
from persisting.bucket.schema_state import SchemaState
from persisting.bucket.table_writer import TableWriter
from persisting.concurrency import timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.errors import InvalidArgument, StorageError
from persisting.fs import FileSystem
from persisting.metrics import BucketMetrics
from persisting.options import BucketOptions
from persisting.table import compaction, indexes, leftovers, operations, retention, versions
from persisting.table.compaction import Limit
from persisting.table.indexes import IndexSpec
from persisting.table.retention import Limits
from persisting.table.versions import Version
from persisting.table.view import TableView

log = logging.getLogger("persisting")

_BEHIND_ROWS = 8192
_BEHIND_SHARE = 20
_MIN_FRAGMENT_ROWS = 1024
_FRAGMENTS_KEPT = 8
"""With retention, the kept rows span at least this many fragments: it drops whole fragments."""

_LONGEST_PAUSE = 60.0
_SWEEP_SECONDS = 3600.0
"""Seconds between two searches for files that failed writes have left."""


class MaintainedBucket(Protocol):
    """What maintenance needs of a bucket besides its table."""

    @property
    def lifecycle(self) -> Lifecycle: ...

    @property
    def bypass(self) -> BufferBypass: ...


class Maintenance:
    """Maintains the table of one bucket that is open for writing.

    It does not keep the bucket alive, so that a dropped bucket is freed immediately; but a change
    of the table does, because the bucket's lock goes with it.
    """

    def __init__(
        self,
        bucket: MaintainedBucket,
        writer: TableWriter,
        schema: SchemaState,
        options: BucketOptions,
        metrics: BucketMetrics,
        fs: FileSystem,
    ) -> None:
        self._bucket_ref = weakref.ref(bucket)
        self._writer, self._table, self._schema = writer, writer.table, schema
        self._options, self._metrics, self._fs = options, metrics, fs
        self.error: str | None = None
        self.held_by: str | None = None
        """What kept the last retention from dropping more."""
        self._limits = Limits(
            rows=options.retention_rows,
            nbytes=options.retention_bytes,
            seconds=options.retention_seconds,
        )
        self._limit = _fragment_limit(self._limits)
        self._job = CoalescedTask(weak_callback(self, Maintenance._run))
        self._index_specs: list[IndexSpec] | None = None
        self._specs_lock = threading.Lock()
        self._stale_indexes = False
        """Whether the table may have an index that was dropped."""
        self._pause = _pause(options.keep_versions, options.retention_seconds)
        self._clean_at = time.monotonic() + self._pause
        self._sweep_at = 0.0
        self._stopped = False

    # Automatic

    def start(self) -> None:
        """Run at intervals, even when nothing is flushed; soon if an index is outdated."""
        self._run_after_pause()
        dataset = self._table.view.dataset
        if dataset is not None and indexes.outdated(dataset):
            self._job.request()

    def _run_after_pause(self) -> None:
        timer.after(self._pause, weak_callback(self, Maintenance._run_at_interval))

    def stop(self) -> None:
        """Stop running at intervals: the bucket is closed."""
        self._stopped = True

    def _run_at_interval(self) -> None:
        if not self._stopped and self._bucket_ref() is not None:
            self._job.request()
            self._run_after_pause()

    def schedule_if_needed(self) -> None:
        """Schedule maintenance after a flush if there is work; never raise: the flush is done."""
        sizes = self._table.view.sizes
        if (
            (self._options.compaction and compaction.worthwhile(sizes, self._limit))
            or self._limits.rows is not None
            or self._limits.nbytes is not None
            or self._index_specs is None
            or self._index_specs
            or self._stale_indexes
            or self._cleaning_due
        ):
            self._job.request()

    @property
    def _cleaning_due(self) -> bool:
        return time.monotonic() >= self._clean_at

    def _run(self) -> None:
        """Run the steps that have work. Failures are logged and retried, and block nothing else."""
        bucket = self._bucket_ref()
        if bucket is None or bucket.lifecycle.closed:
            return
        failures = []
        steps = (
            self._index,
            self._compact_all,
            self._retain_automatically,
            self._clean,
            self._sweep,
        )
        for step in steps:
            try:
                step()
            except Exception as exc:
                failures.append(exc)
        if not failures:
            self.error = None
        elif not bucket.lifecycle.closed:
            before, self.error = self.error, str(failures[0]) or type(failures[0]).__name__
            self._metrics.maintenance_failed()
            if self.error != before:
                log.error("maintenance of %s failed: %s", self._options.storage_path, self.error)

    @property
    def _bucket(self) -> MaintainedBucket:
        bucket = self._bucket_ref()
        if bucket is None:
            raise ReferenceError("the bucket was dropped")
        return bucket

    @contextmanager
    def _exclusive_table(self) -> Iterator[TableView]:
        """Hold the table of the open bucket; publish it to readers on exit."""
        bucket = self._bucket
        with self._writer.exclusive() as table:
            yield table.view
        del bucket  # the bucket and its lock had to live while the table was changed

    def _index(self) -> None:
        if not (self.index_specs or self._stale_indexes) or not self._table.view.rows:
            self._metrics.indexed(0)
            return
        with self._exclusive_table() as view:
            self._forget_unusable_indexes(view)
            requested = {spec.column for spec in self.index_specs if spec.family == "text"}
            for column in requested.intersection(indexes.outdated(view.dataset)):
                log.warning(
                    "rebuilding the text index of field %r in %s: it was built by an older "
                    "version, which tokenized text differently",
                    column,
                    self._options.storage_path,
                )
            operations.build_indexes(self._table, self.index_specs)
            self._stale_indexes = False
            behind = indexes.behind(self._table.view.dataset)
            if behind >= max(_BEHIND_ROWS, view.rows // _BEHIND_SHARE):
                operations.optimize_indexes(self._table)
                behind = 0
        self._metrics.indexed(behind)

    def _forget_unusable_indexes(self, view: TableView) -> None:
        """Forget indexes of fields whose type no longer takes them. Call with the table's lock."""
        usable = indexes.usable(view.schema, self.index_specs)
        for spec in self.index_specs:
            if spec not in usable:
                log.warning(
                    "dropping the %s index of field %r in %s: the field is now %s",
                    spec.family,
                    spec.column,
                    self._options.storage_path,
                    view.schema.field(spec.column).type,
                )
                self._stale_indexes = True
        if len(usable) != len(self.index_specs):
            self._save_index_specs(usable)

    def _compact_all(self) -> None:
        while self._options.compaction and self._compact_some():
            pass

    def _retain_automatically(self) -> None:
        if self._limits.any:
            self.retain(self._limits)

    def _compact_some(self) -> bool:
        with self._exclusive_table() as view:
            return self._compact(view, compaction.worthwhile(view.sizes, self._limit), self._limit)

    def _compact(self, view: TableView, count: int, limit: Limit, *, whole: bool = False) -> bool:
        if not count:
            return False
        started = time.perf_counter()
        operations.compact(self._table, self._fs, count, limit, whole=whole)
        after = len(self._table.view.sizes)
        rows = sum(size.rows for size in view.sizes[-count:])
        self._metrics.compacted(time.perf_counter() - started, rows)
        return after < len(view.sizes)

    def _clean(self) -> int:
        """Remove expired versions if cleaning is due; return how many."""
        keep = self._options.keep_versions
        if keep is None or not self._cleaning_due or self._table.view.dataset is None:
            return 0
        started = time.monotonic()
        try:
            with self._exclusive_table():
                return operations.clean(self._table, keep)
        finally:
            # Back off while cleaning is slow: flushes wait for it.
            took = time.monotonic() - started
            self._clean_at = time.monotonic() + self._pause + 20 * took

    def _sweep(self) -> None:
        """Remove the old data files to which nothing refers, at intervals."""
        if time.monotonic() < self._sweep_at or self._table.view.dataset is None:
            return
        left = leftovers.old_and_unused(self._table, handover_notes.LEFT_SECONDS)
        if left:
            with self._exclusive_table():
                handed = handover_notes.handed_files(self._options.storage_path, self._fs)
                leftovers.remove(self._table, left - handed)
        self._sweep_at = time.monotonic() + _SWEEP_SECONDS

    def remove_files(self, names: Collection[str], *, never_named: bool = False) -> None:
        """Remove those of the data files that no version of the table names.

        ``never_named``: the caller knows that no commit, not even an attempted one, has named them.
        """
        if names:
            with self._exclusive_table():
                leftovers.remove_unused(self._table, names)

    @property
    def limit(self) -> Limit:
        """The maximum size of a compacted fragment."""
        return self._limit

    # On request

    def compact(self) -> dict[str, int]:
        """Rewrite all small fragments, and remove expired versions."""
        before = len(self._table.view.sizes)
        with self._exclusive_table() as view:
            count = compaction.everything(view.sizes, self._limit)
            self._compact(view, count, self._limit, whole=True)
        self._clean_at = self._sweep_at = 0.0
        cleaned = self._clean()
        self._sweep()
        after = len(self._table.view.sizes)
        return {"fragments_before": before, "fragments_after": after, "versions_removed": cleaned}

    def retain(self, limits: Limits) -> dict[str, Any]:
        """Drop the oldest fragments beyond the limits, except those that a group or tag needs.

        Returns how many rows were dropped, the new start, and what holds more of them back.
        """
        limits.check()
        dropped = 0
        with self._exclusive_table() as view:
            hold = self._hold()
            count = retention.droppable(view, limits, None if hold is None else hold.offset)
            held = hold is not None and count < retention.droppable(view, limits)
            self._note_holder(hold.holder if hold is not None and held else None)
            if count:
                dropped = operations.drop_first(self._table, count)
            start = self._table.view.start
        if dropped:
            self._metrics.dropped(dropped)
        held_by = {} if self.held_by is None else {"held_by": self.held_by}
        return {"dropped": dropped, "start_offset": start, **held_by}

    def _note_holder(self, holder: str | None) -> None:
        if holder is not None and holder != self.held_by:
            log.info("retention of %s waits for %s", self._options.storage_path, holder)
        self.held_by = holder

    def _hold(self) -> Hold | None:
        """Return what needs the lowest offset, None if retention is free."""
        holds = self._group_holds([restore.end for restore in self._table.restores])
        dataset = self._table.view.dataset
        if "tags" in self._options.retention_waits_for and dataset is not None:
            holds += [
                Hold(self._table.at(version).start, f"tag {name!r}")
                for name, version in versions.tags(dataset).items()
            ]
        return min(holds, default=None)

    def _group_holds(self, restored: list[int]) -> list[Hold]:
        """Return what groups hold; ``restored`` are the ends of the bucket after each restore."""
        options = self._options
        if options.groups_path is None:
            return []
        return group_offsets.holds(
            options.groups_path,
            options.bucket_id,
            restored,
            self._fs,
            consumers="groups" in options.retention_waits_for,
            workers=not options.retention_drops_unacknowledged,
        )

    def tag(self, name: str, empty: bool = False) -> dict[str, Any]:
        """Tag the table's newest version; an older tag of that name is replaced.

        With ``empty`` a table that does not exist yet is tagged as version 0; else it raises.
        """
        versions.check_tag(name)
        with self._exclusive_table() as view:
            if view.dataset is None and not empty:
                raise StorageError(
                    f"{self._options.storage_path} is empty: there is no version to tag yet"
                )
            version = 0 if view.dataset is None else operations.tag(self._table, name)
            view = self._table.view
            return {
                "name": name,
                "version": version,
                "rows": view.rows,
                "start_offset": view.start,
                "end_offset": view.end,
            }

    def delete_tag(self, name: str) -> bool:
        versions.check_tag(name)
        with self._exclusive_table():
            return operations.delete_tag(self._table, name)

    def restore(self, version: Version, token: str | None = None) -> dict[str, Any]:
        """Go back to a version by committing a new version with its content.

        The end of the bucket goes back too, and its epoch rises so that readers notice.
        """
        bucket, table = self._bucket, self._table
        token = token or uuid.uuid4().hex
        with bucket.bypass.quiesced(), self._exclusive_table() as view:
            before, encoder = view.end, self._schema.encoder_for(view)
            if all(restored.token != token for restored in table.restores):
                if view.dataset is not None:
                    number = versions.resolve(view.dataset, version)
                    if number != versions.NOTHING:  # an empty table keeps today's fields
                        encoder = self._schema.encoder_for(table.at(number))
                    operations.restore(table, number, token)
                elif version != versions.NOTHING and not isinstance(version, dt.datetime):
                    raise InvalidArgument(f"{self._options.storage_path} has no versions yet")
            after = table.view
            bucket.bypass.restored(encoder)
        return {
            "version": after.version,
            "start_offset": after.start,
            "end_offset": after.end,
            "removed": max(0, before - after.end),
            "epoch": len(table.restores),
        }

    # Indexes

    @property
    def index_specs(self) -> list[IndexSpec]:
        """The indexes that users created; a reader without the lock loads them each time."""
        with self._specs_lock:  # a load must not replace what is saved at the same time
            if self._index_specs is None or self._options.read_only:
                self._index_specs = self._load_index_specs()
            return self._index_specs

    def _load_index_specs(self) -> list[IndexSpec]:
        return indexes.load(self._options.storage_path, self._fs)

    def _save_index_specs(self, specs: list[IndexSpec]) -> None:
        with self._specs_lock:
            self._store_index_specs(specs)
            self._index_specs = specs

    def _store_index_specs(self, specs: list[IndexSpec]) -> None:
        indexes.save(self._options.storage_path, specs, self._fs)

    def create_index(self, spec: IndexSpec) -> dict[str, Any]:
        """Create an index; it replaces one of the same family on the same field."""
        key = spec.column, spec.family
        with self._exclusive_table() as view:
            others = [other for other in self.index_specs if (other.column, other.family) != key]
            rebuild = spec in self.index_specs and view.dataset is not None
            if rebuild and spec.name in indexes.built(view.dataset):
                operations.drop_index(self._table, spec.name)
            self._save_index_specs([*others, spec])
            if self._table.view.rows:
                operations.build_indexes(self._table, self.index_specs)
        return self.describe_index(spec)

    def drop_index(self, column: str, kind: str | None) -> int:
        """Drop the indexes of a field, or those of a kind; return how many."""
        dropped = [
            spec
            for spec in self.index_specs
            if spec.column == column and kind in (None, spec.kind, spec.family)
        ]
        if dropped or self._stale_indexes:
            with self._exclusive_table() as view:
                remaining = [spec for spec in self.index_specs if spec not in dropped]
                self._save_index_specs(remaining)
                self._stale_indexes = True
                if view.dataset is not None:
                    operations.build_indexes(self._table, remaining)
                self._stale_indexes = False
            if not self._index_specs:
                self._metrics.indexed(0)
        return len(dropped)

    def describe_index(self, spec: IndexSpec) -> dict[str, Any]:
        """Describe an index, and how many rows it covers."""
        view = self._table.view
        built = indexes.built(view.dataset) if view.dataset is not None else {}
        rows = built[spec.name].rows if spec.name in built else 0
        return {
            "column": spec.column,
            "kind": spec.kind,
            "family": spec.family,
            "metric": spec.metric if spec.family == "vector" else None,
            "language": spec.language,
            "rows": rows,
            "behind": view.rows - rows,
        }


def _fragment_limit(limits: Limits) -> Limit:
    rows, nbytes = Limit()
    if limits.rows is not None:
        rows = min(rows, max(_MIN_FRAGMENT_ROWS, limits.rows // _FRAGMENTS_KEPT))
    if limits.nbytes is not None:
        nbytes = min(nbytes, max(1, limits.nbytes // _FRAGMENTS_KEPT))
    return Limit(rows, nbytes)


def _pause(*seconds: float | None) -> float:
    """Return the interval of maintenance, given the options that limit the age of data."""
    shortest = min((limit for limit in seconds if limit is not None), default=_LONGEST_PAUSE)
    return max(0.2, min(_LONGEST_PAUSE, shortest / 10))
