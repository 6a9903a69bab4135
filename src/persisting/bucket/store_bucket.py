"""A bucket in an object store.

What differs from a bucket in a folder: who may write (an ownership with a term, not a lock), how
the table is committed (under a fence), and that everything acknowledged is durable in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

from persisting.bucket.bucket import Bucket
from persisting.bucket.maintenance import Maintenance
from persisting.bucket.schema_state import SchemaState
from persisting.bucket.store_flush import StoreBufferBypass, StoreFlushJob, StoreTableWriter
from persisting.bucket.store_lifecycle import StoreLifecycle
from persisting.bucket.store_maintenance import StoreMaintenance
from persisting.bucket.store_notes import StoreHandovers, StoreNotes
from persisting.bucket.store_ownership import Ownership
from persisting.concurrency.pool import begin_request
from persisting.metrics import NO_METRICS, BucketMetrics
from persisting.options import BucketOptions
from persisting.records import Rules
from persisting.store.object_store import ObjectStore
from persisting.store_address import StoreAddress
from persisting.table.fenced_commit import NewerView
from persisting.table.store_table import StoreTable


class StoreBucket(Bucket):
    """The records of one bucket, opened for writing by its owner."""

    table: StoreTable
    lifecycle: StoreLifecycle

    flush_pause = 1.0
    """A flush takes five requests, and its records are durable in the log anyway."""
    lifecycle_type = StoreLifecycle
    table_writer_type = StoreTableWriter
    flush_job_type = StoreFlushJob
    bypass_type = StoreBufferBypass

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
        return StoreMaintenance(self._store, self._notes, self, *parts)

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

    def _open_table(self) -> None:
        self._start_timer()
        self.table.take(self.ownership.term, self._load_table)
        self.table.set_compression()

    def _topic_schema(self) -> pa.Schema | None:
        return self._read_topic_schema()

    def _start(self) -> None:
        self.maintenance.start()  # at exit, everything acknowledged is in the log
