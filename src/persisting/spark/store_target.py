"""Writes to a topic in an object store: the driver owns the buckets while it commits.

There are no notes for owners here. A process that has the topic open is named in the error.
Credentials are in the environment: Spark shows options in its plans and logs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from persisting.bucket import bulk_import
from persisting.bucket.schema_state import EVOLVING
from persisting.bucket.store_schema import StoreSchema
from persisting.errors import BucketLocked, StorageError
from persisting.options import DURABLE
from persisting.records.arrow import merge
from persisting.spark.write_target import BucketFiles, Fragments, Sequence, counted
from persisting.store.object_store import open_store
from persisting.store.probe import probe
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress
from persisting.table import files as table_files
from persisting.table.bulk_files import names_of
from persisting.table.store_table import StoreTable
from persisting.topic import store_config, store_owner
from persisting.topic.spec import TopicConfig, TopicSpec, bucket_name
from persisting.topic.store_owner import StoreOwner

log = logging.getLogger("persisting")


class StoreTarget:
    """A topic in an object store."""

    new_options: Mapping[str, Any] = DURABLE

    def __init__(self, address: StoreAddress, owner_seconds: float) -> None:
        self._address, self._seconds = address, owner_seconds
        self._store = open_store(address, StorageOptions())

    def load(self) -> TopicConfig | None:
        return store_config.load(self._store)

    def shared_schema(self) -> StoreSchema:
        return StoreSchema(self._store)

    def check_owners(self, config: TopicConfig) -> None:
        """Found before any task runs. The log of a dead owner is replayed, so that the tables have
        the columns of its records."""
        store_owner.recover(self._store, config, self._seconds)

    def agree(self, spec: TopicSpec) -> TopicConfig:
        probe(self._store)
        return store_config.agreed(spec, self._store)

    def prepare(self, config: TopicConfig, schema: pa.Schema) -> dict[int, dict[str, Any]]:
        """Own only the buckets whose tables are to be changed."""
        tables = {}
        with StoreOwner(self._store, config, self._seconds) as owner:
            for bucket in range(config.num_buckets):
                table = self._table(bucket)
                view = table.view
                if view.dataset is not None and _has(view.schema, schema):
                    tables[bucket] = bulk_import.state_of(view.dataset)
                else:
                    tables[bucket] = bulk_import.prepare(owner.own(bucket).bucket, schema)
        return tables

    def _table(self, bucket: int) -> StoreTable:
        table = StoreTable(self._address / bucket_name(bucket), self._store.options)
        table.refresh()
        return table

    def commit(
        self,
        config: TopicConfig,
        files: Mapping[int, BucketFiles],
        sequence: Sequence,
        *,
        overwrite: bool,
    ) -> int:
        """Own all buckets, then commit one after the other: a living owner is found before anything
        is stored."""
        added: dict[int, int] = {}
        with StoreOwner(self._store, config, self._seconds) as owner, counted(added, len(files)):
            buckets = {number: owner.own(number).bucket for number in files}
            for number, found in files.items():
                added[number] = bulk_import.adopt(
                    buckets[number], found.fragments, found.columns, *sequence, replace=overwrite
                )
                if not added[number]:  # an earlier attempt stored these rows from other files
                    _remove_unused(buckets[number].table, found.fragments)
        return sum(added.values())

    def discard(
        self, config: TopicConfig, files: Mapping[int, Fragments], sequence: Sequence | None
    ) -> None:
        """Remove the objects behind a fence: a commit that names them may be under way until then.

        What cannot be removed now, cleaning removes after 7 days.
        """
        try:
            with StoreOwner(self._store, config, self._seconds) as owner:
                for number, fragments in files.items():
                    bucket = owner.own(number).bucket
                    # Else a version has the files, and perhaps only an older one.
                    if sequence is None or not bulk_import.has(bucket, *sequence):
                        _remove_unused(bucket.table, fragments)
        except StorageError as exc:
            why = exc.summary if isinstance(exc, BucketLocked) else exc
            log.warning("the files of a failed write stay in %s for now: %s", self._address, why)


def _has(stored: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether a table takes records of a schema as it is."""
    return bool(merge(stored, wanted, EVOLVING).equals(stored))


def _remove_unused(table: Any, fragments: Fragments) -> None:
    """Remove data files, unless the table holds them.

    The caller owns the table. Only one write knows these names, and it has ended: the newest
    version has them or, behind the fence of this owner, no version ever will.
    """
    names = set(names_of(fragments))
    if names.isdisjoint(table_files.data_paths(table.view.fragments)):
        table.bulk_files.remove(names)
