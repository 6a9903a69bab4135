"""A topic on disk, read without its owner: configuration, schema, offsets, versions. Blocking."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persisting import fs as filesystem
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.shared_schema import SharedSchema
from persisting.bucket.snapshot import Snapshot
from persisting.errors import InvalidArgument, NoSuchTopic, TableError
from persisting.options import BucketOptions
from persisting.records import EMPTY, Rules
from persisting.records.arrow import merge
from persisting.store.object_store import ObjectStore
from persisting.store_address import StoreAddress
from persisting.table import files, indexes, versions
from persisting.table.indexes import IndexSpec
from persisting.table.table import FOLDER, Table
from persisting.table.view import TableView
from persisting.topic import spec as topics
from persisting.topic.ownership import recover, recover_own_log
from persisting.topic.spec import TopicConfig, bucket_folder
from persisting.topic.tags import TagFiles

if TYPE_CHECKING:  # only snapshots need it
    from persisting.bucket.readonly_bucket import ReadonlyBucket

_EVOLVING = Rules(evolving=True)

_OPENED_AT_ONCE = 4
"""Tables that are opened at the same time; each is in files of its own."""


class TopicFolder:
    """The tables and the logs of a topic, read without a lock; nothing is changed."""

    def __init__(
        self, folder: Path, config: TopicConfig, *, cache_bytes: int | None = None
    ) -> None:
        """``cache_bytes`` bounds what each table keeps in memory, see :class:`Table`."""
        self.folder, self.config, self._cache_bytes = folder, config, cache_bytes
        self._tables: dict[int, Table] = {}
        self._readers: dict[int, ReadonlyBucket] = {}

    @classmethod
    def open(cls, folder: Path, *, cache_bytes: int | None = None) -> TopicFolder:
        config = topics.load(folder, filesystem.current())
        if config is None:
            raise NoSuchTopic(topics.no_such_topic(folder))
        if config.backend not in ("lance", "persisting"):
            raise InvalidArgument(
                f"topic {config.topic!r} has the backend {config.backend!r}, whose files only its "
                "owner can read; topics of the backends 'lance' and 'persisting' have tables"
            )
        return cls(folder, config, cache_bytes=cache_bytes)

    def recover(self) -> None:
        """Replay the logs that a crashed owner left into the tables."""
        for bucket in self.buckets:
            if bucket_folder(self.folder, bucket).is_dir():
                recover(self.folder, self.config, bucket)

    def recover_own_logs(self) -> None:
        """Replay the logs in the buckets' own folders, which :meth:`snapshot` does not read."""
        for bucket in self.buckets:  # a bucket without a folder has no log either
            recover_own_log(self.folder, self.config, bucket)

    @property
    def place(self) -> str:
        """The path of the folder, or the address of a topic in an object store."""
        return str(self.folder)

    @property
    def handover_place(self) -> Path | ObjectStore:
        """Where requests to the owners of the buckets are left."""
        return self.folder

    @property
    def tag_files(self) -> TagFiles:
        return TagFiles(self.folder, filesystem.current())

    @property
    def buckets(self) -> range:
        return range(self.config.num_buckets)

    def table(self, bucket: int) -> Table:
        """Return the bucket's table at its newest version."""
        if bucket not in self._tables:
            folder = bucket_folder(self.folder, bucket)
            self._tables[bucket] = Table(
                folder, filesystem.current(), cache_bytes=self._cache_bytes
            )
        self._tables[bucket].refresh()
        return self._tables[bucket]

    def has_its_tables(self) -> bool:
        """Whether all tables that are open still exist: an open one does not notice that it was
        removed."""
        return all(
            table.view.dataset is None or files.newest_version(table.root)
            for table in self._tables.values()
        )

    def view(self, bucket: int) -> TableView:
        return self.table(bucket).view

    def snapshot(self, bucket: int) -> Snapshot:
        """Return all acknowledged records: the table's, then those of its owner's log."""
        reader = self.reader(bucket)
        if reader is None:
            return Snapshot(self.view(bucket), [], EMPTY, {})
        reader.refresh()
        return reader.snapshot()

    def at(self, bucket: int, versions: Mapping[int, int]) -> Snapshot:
        """Return the records of a bucket in one of :meth:`versions`."""
        view = self.table(bucket).at(versions[bucket])
        return Snapshot(view, [], view.schema, {})

    def reader(self, bucket: int) -> ReadonlyBucket | None:
        """Return the bucket, open for reading; None while it does not exist."""
        folder = bucket_folder(self.folder, bucket)
        if bucket not in self._readers and folder.is_dir():
            from persisting.bucket.readonly_bucket import ReadonlyBucket

            options = BucketOptions(
                bucket_id=bucket,
                storage_path=folder,
                read_only=True,
                schema_path=self.folder / SCHEMA_FILE,
            )
            rules = Rules(defaults=self.config.options.get("schema_defaults"))
            try:
                self._readers[bucket] = ReadonlyBucket(options, rules)
            except TableError:
                # If power loss has torn the table, its next owner repairs it.
                recover(self.folder, self.config, bucket)
                self._readers[bucket] = ReadonlyBucket(options, rules)
        return self._readers.get(bucket)

    def schema(self, buckets: Iterable[int] | None = None) -> pa.Schema:
        """Return the fields of the topic: those of its schema file and of these buckets."""
        schema = self._shared_schema().read() or EMPTY
        for view in self._views(self.buckets if buckets is None else buckets):
            schema = merge(schema, view.schema, _EVOLVING)
        return schema

    def _views(self, buckets: Iterable[int]) -> list[TableView]:
        """Return the tables of buckets at their newest versions; several are opened at a time."""
        chosen = list(buckets)
        if sum(not self._is_open(bucket) for bucket in chosen) <= 1:
            return [self.view(bucket) for bucket in chosen]
        with ThreadPoolExecutor(min(len(chosen), _OPENED_AT_ONCE)) as threads:
            return list(threads.map(self.view, chosen))

    def _is_open(self, bucket: int) -> bool:
        """Whether the newest version of a bucket's table is open."""
        table = self._tables.get(bucket)
        return table is not None and not table.is_behind

    def index_specs(self, bucket: int) -> list[IndexSpec]:
        """Return the requested indexes of a bucket."""
        return indexes.load(bucket_folder(self.folder, bucket), filesystem.current())

    def count_versions(self, bucket: int) -> int:
        """Count the versions of a bucket's table by their manifests."""
        return len(files.versions_on_disk(bucket_folder(self.folder, bucket) / FOLDER))

    def _shared_schema(self) -> SharedSchema:
        return SharedSchema(self.folder / SCHEMA_FILE, filesystem.current())

    def schema_at(self, wanted: int | str | dt.datetime) -> pa.Schema:
        """Return the fields that the records of a version have."""
        schema = EMPTY
        for bucket, version in self.versions(wanted).items():
            schema = merge(schema, self.table(bucket).at(version).schema, _EVOLVING)
        return schema

    def offset_at(self, bucket: int, timestamp: dt.datetime, view: TableView | None = None) -> int:
        """Return the first offset that arrived at ``timestamp`` or later, now or in a view."""
        view = self.view(bucket) if view is None else view
        return Snapshot(view, [], view.schema, {}).offset_at(round(timestamp.timestamp() * 1e6))

    def versions(self, wanted: int | str | dt.datetime) -> dict[int, int]:
        """Return, by bucket, the number of the version that ``wanted`` means."""
        if isinstance(wanted, str):
            tag = self.tag_files.load(wanted)
            return {b: tag.versions.get(b, versions.NOTHING) for b in self.buckets}
        if isinstance(wanted, int) and len(self.buckets) > 1:
            raise InvalidArgument(
                f"option version={wanted}: the topic has {len(self.buckets)} buckets, each with "
                "its own versions; use the option tag or timestamp"
            )
        numbers: dict[int, int] = {}
        for bucket in self.buckets:
            dataset: Any = self.view(bucket).dataset
            numbers[bucket] = (
                versions.NOTHING if dataset is None else versions.resolve(dataset, wanted)
            )
        return numbers


def stored_config(place: Path | StoreAddress) -> TopicConfig | None:
    """Return the configuration of a topic as it is now, None if there is no topic."""
    if isinstance(place, StoreAddress):
        from persisting.store.object_store import open_store
        from persisting.store.storage_options import StorageOptions
        from persisting.topic import store_config

        return store_config.load(open_store(place, StorageOptions()))
    return topics.load(place, filesystem.current())


def open_stored(place: Path | StoreAddress) -> TopicFolder:
    """Open a topic by its folder, or by its address in an object store."""
    if isinstance(place, StoreAddress):
        from persisting.topic.store_files import (
            StoreTopic,  # it loads much that folders do not need
        )

        return StoreTopic.find(place.name, str(place.parent))
    return TopicFolder.open(place)
