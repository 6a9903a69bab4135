"""A bucket in an object store.

What differs from a bucket in a folder: who may write (an ownership with a term, not a lock), how
the table is committed (under a fence), and that everything acknowledged is durable in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import pyarrow as pa

from persisting.bucket.bucket import Bucket
from persisting.bucket.maintenance import Maintenance
from persisting.bucket.schema_state import SchemaState
from persisting.bucket.store_maintenance import StoreMaintenance
from persisting.bucket.store_notes import StoreHandovers, StoreNotes
from persisting.bucket.store_ownership import Ownership
from persisting.concurrency import timer
from persisting.concurrency.pool import begin_request
from persisting.errors import OwnershipLost, StorageError
from persisting.metrics import NO_METRICS, BucketMetrics
from persisting.options import BucketOptions
from persisting.records import Rules
from persisting.store.object_store import ObjectStore
from persisting.store_address import StoreAddress
from persisting.table import files
from persisting.table.fenced_commit import NewerView
from persisting.table.store_table import StoreTable

log = logging.getLogger("persisting")


class LogOwnership(Protocol):
    """What a bucket asks of the log that it writes to."""

    @property
    def lost(self) -> str:
        """Why this process no longer owns the log; empty while it does."""

    @property
    def overdue(self) -> str:
        """Why another process may have taken over unnoticed; empty while that cannot be."""


class StoreBucket(Bucket):
    """The records of one bucket, opened for writing by its owner."""

    table: StoreTable

    flush_pause = 1.0
    """A flush takes five requests, and its records are durable in the log anyway."""

    def __init__(
        self,
        options: BucketOptions,
        rules: Rules,
        store: ObjectStore,
        ownership: Ownership,
        schema: SchemaState,
        metrics: BucketMetrics = NO_METRICS,
        handovers: StoreHandovers | None = None,
        load_table: Callable[[], NewerView | None] | None = None,
    ) -> None:
        """``store`` is that of the topic; without ``handovers`` nothing is handed over.
        ``load_table`` returns what was found of the table while the bucket was taken over."""
        self._store, self.ownership, self._load_table = store, ownership, load_table
        # While the table is fenced. The schema of the topic only grows, and drivers rely on this
        # process to find their notes once they have seen its ownership.
        self._read_topic_schema = begin_request(schema.topic_schema)
        self._notes: StoreNotes | None = None
        if handovers is not None:
            self._notes = StoreNotes(handovers, options.bucket_id, ownership.term)
            self._find_notes = begin_request(self._notes.find)
        self._lost: OwnershipLost | None = None
        self.log_ownership: LogOwnership | None = None
        """The log, once the bucket is attached to it."""
        super().__init__(options, rules, metrics, schema)

    def _new_table(self) -> StoreTable:
        address = self.options.storage_path
        assert isinstance(address, StoreAddress)
        return StoreTable(
            address,
            self._store.options,
            compression=self.options.compression,
            defaults=self.rules.defaults,
        )

    def _new_maintenance(self) -> Maintenance:
        parts = self.table_writer, self.schema_state, self.options, self.metrics, self.fs
        return StoreMaintenance(self._store, self, *parts)

    def _writers_of_notes(self) -> Iterable[str]:
        if self._notes is None:
            return ()
        self._find_notes()
        return self._notes.writers()

    @property
    def takes_notes(self) -> bool:
        return self._notes is not None

    def new_notes(self) -> StoreNotes:
        assert self._notes is not None
        return self._notes

    def remove_files(self, names: Collection[str], *, never_named: bool = False) -> None:
        """Remove objects that no version names. Reading all versions takes many requests, so
        objects that a commit may have named are left: cleaning removes them after 7 days."""
        if names and never_named:
            with self.exclusive_table() as table:
                if set(names).isdisjoint(files.data_paths(table.view.fragments)):
                    table.bulk_files.remove(names)

    def look_for_notes(self) -> None:
        """Look for notes, in the background."""
        if self._notes is not None:
            self._notes.look()

    @property
    def needs_files_of_notes(self) -> bool:
        """Whether a note may be decided and not adopted: cleaning must not remove its files."""
        return self._notes is not None and self._notes.has_decided

    def _open_for_writing(self) -> None:
        try:
            timer.start_timer()
        except RuntimeError as exc:
            raise StorageError(
                f"cannot open {self.options.storage_path}: no thread for the timer ({exc})"
            ) from exc
        self.table.take(self.ownership.term, self._load_table)
        self.table.set_compression()
        self.maintenance.start()

    def _topic_schema(self) -> pa.Schema | None:
        return self._read_topic_schema()

    def flush_at_exit(self) -> None:
        """Everything acknowledged is in the log."""

    # Ownership

    @property
    def lost(self) -> str:
        """Why this process no longer owns the bucket; empty while it does, as far as it knows."""
        if self._lost is not None:
            return self._lost.summary
        return "" if self.log_ownership is None else self.log_ownership.lost

    @property
    def overdue(self) -> str:
        """Why another process may have taken the bucket over unnoticed; empty while that cannot
        be."""
        return "" if self.log_ownership is None else self.log_ownership.overdue

    def check_writable(self) -> None:
        super().check_writable()
        if self._lost is not None:
            raise self._lost.with_traceback(None)

    @contextmanager
    def _quiesced(self) -> Iterator[None]:
        with super()._quiesced():
            try:
                yield
            except BaseException as exc:
                if self.table.committer.is_uncertain:
                    # Puts that continue would get offsets of a version that may be outdated.
                    self._lost = OwnershipLost(
                        f"it is unknown whether a change of {self.options.storage_path} was stored "
                        f"({exc})",
                        hint="open the topic again",
                    )
                raise

    def _commit_buffer(self, at_least: int = 0) -> bool:
        landed = self._drop_landed()
        return super()._commit_buffer(at_least) or landed

    def _drop_landed(self) -> bool:
        """Drop from the buffer what the table already holds; return whether there was anything.

        The flush that wrote it failed: its outcome was unknown, so it could not drop the records
        itself.
        """
        with self.table_writer.lock:
            self.table.committer.complete_undo()
            landed = self._count_landed()
            if landed:
                self.publish_table()
            return landed > 0

    def _count_landed(self) -> int:
        """Return how many of the first chunks of the buffer the table holds."""
        with self.state_lock:
            sequences = [chunk.sequence for chunk in self._buffer.chunks]
        return sum(sequence <= self.table.sequence for sequence in sequences)

    def publish_table(self, flushed: int = 0) -> None:
        """As in a folder, but the table decides which chunks it holds: a new version may also show
        that an earlier flush, whose outcome was unknown, has landed."""
        super().publish_table(max(flushed, self._count_landed()))

    def _flush(self) -> bool:
        try:
            if self._lost is not None:
                raise self._lost.with_traceback(None)
            return super()._flush()
        except OwnershipLost as exc:
            self._lost = exc
            self.flusher.stop()
            if not self.closed:
                raise
            log.warning(
                "closing %s without a flush: %s. Its acknowledged records are in the log, which "
                "the new owner reads",
                self.options.storage_path,
                exc.summary,
            )
            return False
        except StorageError as exc:
            if not self.closed or not self.lost:
                raise
            log.warning(
                "closing %s without a flush: %s. Its acknowledged records are in the log, which "
                "the next owner reads",
                self.options.storage_path,
                exc,
            )
            return False
