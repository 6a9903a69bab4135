"""A bucket in an object store, read without owning it: its table, and its owner's log."""

from __future__ import annotations

from pathlib import Path

from persisting.bucket.maintenance import Maintenance
from persisting.bucket.readonly_bucket import ReadonlyBucket
from persisting.bucket.schema_state import SchemaState
from persisting.bucket.store_follower import StoreLogView
from persisting.bucket.store_maintenance import StoreMaintenance
from persisting.bucket.store_schema import StoreSchema
from persisting.options import BucketOptions
from persisting.records import Rules
from persisting.store.object_store import ObjectStore
from persisting.store_address import StoreAddress
from persisting.table.store_table import StoreTable


class StoreReader(ReadonlyBucket):
    """The acknowledged records of a bucket."""

    table: StoreTable
    _log_view: StoreLogView

    def __init__(self, options: BucketOptions, rules: Rules, store: ObjectStore) -> None:
        self._store = store
        super().__init__(options, rules, schema=SchemaState(rules, StoreSchema(store)))

    def _new_table(self) -> StoreTable:
        address = self.options.storage_path
        assert isinstance(address, StoreAddress)
        return StoreTable(address, self._store.options, defaults=self.rules.defaults)

    def _new_maintenance(self) -> Maintenance:
        parts = self.table_writer, self.schema_state, self.options, self.metrics, self.fs
        return StoreMaintenance(self._store, None, self, *parts)

    def _open_table(self) -> None:
        self.table.refresh()

    def _new_log_view(self) -> StoreLogView:
        return StoreLogView(
            self._store,
            self.number,
            Path(str(self.options.storage_path)),
            self.table,
            self.buffer,
            self.schema_state,
            self.fs,
            self.waiters,
            self.table_writer.lock,
        )

    def finish_close(self) -> None:
        super().finish_close()
        self._log_view.close()
