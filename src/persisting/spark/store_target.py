"""Writes to a topic in an object store: the driver owns the buckets while it commits, or hands the
files over to the processes that own them.

Credentials are in the environment: Spark shows options in its plans and logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa

from persisting.bucket import bulk_import
from persisting.bucket.schema_state import EVOLVING
from persisting.bucket.store_schema import StoreSchema
from persisting.errors import BucketLocked, StorageError
from persisting.options import DURABLE
from persisting.records.arrow import merge
from persisting.spark.write_target import BucketFiles, Fragments, Sequence, counted, note_of
from persisting.store.object_store import open_store
from persisting.store.probe import probe
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress
from persisting.table.bulk_files import names_of
from persisting.table.store_bulk_files import StoreBulkFiles
from persisting.table.store_table import StoreTable
from persisting.table.table import FOLDER
from persisting.topic import handover, store_config
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
        handover.ping(self._store, config, self._seconds)

    def ensure_topic(self, spec: TopicSpec) -> TopicConfig:
        probe(self._store)
        return store_config.agreed(spec, self._store)[0]

    def prepare(self, config: TopicConfig, schema: pa.Schema) -> dict[int, dict[str, Any]]:
        """Change only the tables that need it: this process owns them meanwhile, or their owner is
        asked."""
        tables, others = {}, []
        for bucket in range(config.num_buckets):
            view = self._table(bucket).view
            if view.dataset is not None and _has(view.schema, schema):
                tables[bucket] = bulk_import.state_of(view.dataset)
            else:
                others.append(bucket)
        if others and not handover.is_owned(self._store, others):
            with (
                suppress(BucketLocked),  # a queue has just opened a bucket
                StoreOwner(self._store, config, self._seconds) as owner,
            ):
                for bucket in others:
                    tables[bucket] = bulk_import.prepare(owner.own(bucket).bucket, schema)
        if left := [bucket for bucket in others if bucket not in tables]:
            tables |= handover.prepare(self._store, config, schema, self._seconds, left)
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
        """This process owns all buckets, then commits one after the other. If another one has any
        of them open, the files are handed over, and become part of the topic in one step."""
        if not handover.is_owned(self._store, files):
            with suppress(_OwnedByOthers):
                return self._commit_as_owner(config, files, sequence, overwrite)
        notes = {b: note_of(found, sequence, overwrite) for b, found in files.items()}
        return sum(handover.adopt(self._store, config, notes, self._seconds).values())

    def _commit_as_owner(
        self,
        config: TopicConfig,
        files: Mapping[int, BucketFiles],
        sequence: Sequence,
        overwrite: bool,
    ) -> int:
        added: dict[int, int] = {}
        with StoreOwner(self._store, config, self._seconds) as owner, counted(added, len(files)):
            try:
                buckets = {number: owner.own(number).bucket for number in files}
            except BucketLocked as exc:
                raise _OwnedByOthers from exc
            for number, found in files.items():
                added[number] = bulk_import.adopt(
                    buckets[number], found.fragments, found.columns, *sequence, replace=overwrite
                )
                if not added[number]:  # an earlier attempt stored these rows from other files
                    _remove_unused(buckets[number], names_of(found.fragments))
        return sum(added.values())

    def discard(
        self, config: TopicConfig, files: Mapping[int, Fragments], sequence: Sequence | None
    ) -> None:
        """Remove the objects after a fence: a commit that names them may be under way until then.

        What cannot be removed now, cleaning removes after 7 days.
        """
        try:
            left = {number: self._existing(number, found) for number, found in files.items()}
            with StoreOwner(self._store, config, self._seconds) as owner:
                for number, names in left.items():
                    if not names:
                        continue  # the process that gave up the write has removed them
                    bucket = owner.own(number).bucket
                    # Otherwise a version has the files, perhaps only an older one.
                    if sequence is None or not bulk_import.has(bucket, *sequence):
                        _remove_unused(bucket, names)
        except StorageError as exc:
            why = exc.summary if isinstance(exc, BucketLocked) else exc
            log.warning("the files of a failed write stay in %s for now: %s", self._address, why)

    def _existing(self, bucket: int, fragments: Fragments) -> set[str]:
        """Return the names of the data files that are still there."""
        root = self._address / bucket_name(bucket) / FOLDER
        return StoreBulkFiles(root, self._store.options).existing(names_of(fragments))


class _OwnedByOthers(Exception):
    """A live process has a bucket open; nothing was changed."""


def _has(stored: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether a table takes records of a schema as it is."""
    return bool(merge(stored, wanted, EVOLVING).equals(stored))


def _remove_unused(bucket: Any, names: Iterable[str]) -> None:
    """Remove data files, unless the table holds them, or a note names them.

    The caller owns the bucket. Only one write knows these names, and it has ended: the newest
    version has them or, after the fence of this owner, no version ever will.
    """
    bucket.maintenance.remove_files(
        set(names) - bucket.new_notes().handed_files(), never_named=True
    )
