"""A topic in an object store, read without owning it. Blocking."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from persisting import store_address
from persisting.bucket.store_maintenance import StoreMaintenance
from persisting.bucket.store_notes import decided_buckets
from persisting.bucket.store_ownership import FREE, owner_register
from persisting.bucket.store_reader import StoreReader
from persisting.bucket.store_schema import StoreSchema
from persisting.errors import NoSuchTopic, StorageError
from persisting.options import PersistingOptions
from persisting.records import Rules
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.table import files
from persisting.table.indexes import IndexSpec
from persisting.table.store_table import StoreTable
from persisting.topic import spec as topics
from persisting.topic import store_config
from persisting.topic.spec import TopicConfig
from persisting.topic.store_tags import StoreTags
from persisting.topic.topic_files import TopicFolder
from persisting.topic.topic_names import check_name
from persisting.wal.lease import lease_register
from persisting.wal.slots import LOGS


class StoreTopic(TopicFolder):
    """The tables and the logs of a topic in an object store; nothing is changed."""

    def __init__(self, store: ObjectStore, config: TopicConfig) -> None:
        self.store, self.config = store, config
        self._readers = {}

    @classmethod
    def find(cls, topic: str, root: str, options: Mapping[str, Any] | None = None) -> StoreTopic:
        """Open a topic by its name below the address ``root``."""
        address = store_address.parse(root) / check_name("topic", topic)
        store = open_store(address, StorageOptions(options))
        config = store_config.load(store)
        if config is None:
            raise NoSuchTopic(f"there is no topic {topic!r} at {root}")
        return cls(store, config)

    @property
    def folder(self) -> Path:  # type: ignore[override]
        self._refuse("what needs a folder")

    @property
    def place(self) -> str:
        return str(self.store.address)

    @property
    def handover_place(self) -> ObjectStore:
        return self.store

    @property
    def tag_files(self) -> StoreTags:
        return StoreTags(self.store)

    def recover(self) -> None:
        """Replay the logs of buckets that nobody owns, such as those of a restored backup, and
        adopt what is decided to be adopted by them. The log of a killed owner is left to the next
        one, which waits until its lease expires."""
        left = []
        decided = decided_buckets(self.store)
        for bucket in self.buckets:
            held = owner_register(self.store, bucket).read()
            if held is not None and held.content.owner == FREE:
                if held.content.log != FREE or bucket in decided:
                    left.append(bucket)
        if not left:
            return
        from persisting.backends.persisting import PersistingBackend, new_store_owner_log

        log = new_store_owner_log(self.store, self.config.num_buckets, **self.config.options)
        try:
            for bucket in left:
                place: Any = self.store.address / topics.bucket_name(bucket)
                options = self.config.options
                PersistingBackend(bucket, place, owner_log=log, **options).close_now()
        finally:
            log.retire()

    def recover_own_logs(self) -> None:
        """Buckets in an object store have no logs of their own."""

    def table(self, bucket: int) -> StoreTable:
        table = self.reader(bucket).table
        table.refresh()
        return table

    def _is_open(self, bucket: int) -> bool:
        return False  # to find out takes as many requests as to follow it

    def reader(self, bucket: int) -> StoreReader:
        if bucket not in self._readers:
            self._readers[bucket] = open_reader(self.store, self.config, bucket)
        reader = self._readers[bucket]
        assert isinstance(reader, StoreReader)
        return reader

    def _shared_schema(self) -> StoreSchema:
        return StoreSchema(self.store)

    def index_specs(self, bucket: int) -> list[IndexSpec]:
        maintenance = self.reader(bucket).maintenance
        assert isinstance(maintenance, StoreMaintenance)
        return maintenance.index_specs

    def count_versions(self, bucket: int) -> int:
        return len(self.table(bucket).committer.object_sizes(files.VERSIONS))

    def bucket_bytes(self, bucket: int) -> int:
        """Return the bytes of all objects of a bucket."""
        entries = self.store.entries(topics.bucket_name(bucket))
        return sum(entry.size for entry in entries.values())

    def table_sequence(self, bucket: int) -> int:
        """Return the last log sequence that the table of a bucket holds, whatever its log is."""
        table = StoreTable(self.store.address / topics.bucket_name(bucket), self.store.options)
        table.refresh()
        return table.sequence

    def log_shares(self) -> dict[int, int]:
        """Return, by bucket, its share of the bytes of all logs: a log is shared equally by the
        buckets that note it, and all else by all buckets."""
        noted: dict[str, list[int]] = {}
        for bucket in self.buckets:
            held = owner_register(self.store, bucket).read()
            if held is not None and held.content.log != FREE:
                noted.setdefault(held.content.log, []).append(bucket)
        sizes: dict[str, int] = {}
        for key, entry in self.store.entries(LOGS).items():
            name = key.split("/")[1]
            sizes[name] = sizes.get(name, 0) + entry.size
        shares = dict.fromkeys(self.buckets, 0)
        for name, size in sizes.items():
            buckets = noted.get(name) or list(self.buckets)
            each, rest = divmod(size, len(buckets))
            for number, bucket in enumerate(buckets):
                shares[bucket] += each + (number < rest)
        return shares

    def owner(self, bucket: int) -> dict[str, Any] | None:
        """Return the process that has the bucket open, or had it when it was killed."""
        held = owner_register(self.store, bucket).read()
        if held is None or held.content.owner == FREE:
            return None
        lease = lease_register(self.store, held.content.owner).read()
        if lease is None or lease.content.taken_by:
            return None
        return {"pid": lease.content.owner.pid, "host": lease.content.owner.host}

    def _refuse(self, what: str) -> NoReturn:
        raise StorageError(f"{self.place} is in an object store, where {what} is not supported yet")


def open_reader(store: ObjectStore, config: TopicConfig, bucket: int) -> StoreReader:
    """Open a bucket for reading. Blocking."""
    options = PersistingOptions(
        bucket_id=bucket,
        storage_path=store.address / topics.bucket_name(bucket),  # type: ignore[arg-type]
        batch_size=config.batch_size,
        read_only=True,
    )
    defaults = config.options.get("schema_defaults") or {}
    return StoreReader(options, Rules(evolving=True, defaults=defaults), store)
