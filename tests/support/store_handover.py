"""Hands files over to a topic in an object store as Spark's driver does, without Spark; and stores
whose user dies at a request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.bucket.handover_notes import Note
from persisting.bucket.store_schema import StoreSchema
from persisting.queue import write_queue
from persisting.records import Rules
from persisting.store.object_store import ObjectStore, StoreError, open_store
from persisting.table.store_bulk_files import StoreBulkFiles
from persisting.topic import handover, store_config
from persisting.topic.spec import TopicConfig
from persisting.topic.store_files import StoreTopic
from support.handover import PUTS, adopted, files_for, texts

BUCKETS = 2
LEASE = 1.0


def create_topic(root: str, options: dict[str, str], **given: Any) -> None:
    """Create the topic ``t`` below an address."""

    async def create() -> None:
        arguments: dict[str, Any] = {
            "num_buckets": BUCKETS,
            "durable": True,
            "backend_options": {"lease": LEASE, "flush_interval": None},
            **given,
        }
        queue = await write_queue(
            topic="t", storage_path=root, storage_options=options, bucket_column="id", **arguments
        )
        await queue.put(texts(PUTS - 10, 10))
        await queue.close()

    asyncio.run(create())


class MortalStore(ObjectStore):
    """A store whose user is killed at a request: before it, or when it is carried out and its
    answer is on the way. After that no request reaches the store."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store.address, store.options, store._client)
        self._at: tuple[str, str, bool] | None = None
        self._guard = threading.Lock()
        self.dead = threading.Event()

    def kill_at(self, call: str, part: str, *, after: bool = False) -> None:
        """Kill at the first ``call`` whose name contains ``part``."""
        self._at = call, part, after

    def kill(self) -> None:
        self.dead.set()

    def _mortal(self, call: str, names: Iterable[str], do: Callable[[], Any]) -> Any:
        with self._guard:
            hit = self._at is not None and call == self._at[0]
            hit = hit and any(self._at[1] in name for name in names)  # type: ignore[index]
            after = self._at is not None and self._at[2]
            if hit:
                self._at = None
        if hit and not after:
            self.kill()
        if self.dead.is_set():
            raise StoreError("killed by the test")
        result = do()
        if hit:
            self.kill()
            raise StoreError("killed by the test")
        return result

    def get(self, key: str) -> Any:
        return self._mortal("get", [key], lambda: super(MortalStore, self).get(key))

    def create(self, key: str, data: bytes) -> Any:
        return self._mortal("create", [key], lambda: super(MortalStore, self).create(key, data))

    def swap(self, key: str, data: bytes, version: Any) -> Any:
        name = f"{key} {data.decode(errors='replace')}"
        return self._mortal(
            "swap", [name], lambda: super(MortalStore, self).swap(key, data, version)
        )

    def list(self, prefix: str, after: str | None = None) -> Any:
        return self._mortal("list", [prefix], lambda: super(MortalStore, self).list(prefix, after))

    def delete(self, keys: Iterable[str]) -> None:
        names = [*keys]
        self._mortal("delete", names, lambda: super(MortalStore, self).delete(names))


class Owner:
    """Owns buckets of a topic with a log of its own, as another process does."""

    def __init__(self, store: ObjectStore, buckets: Iterable[int] = range(BUCKETS)) -> None:
        config = config_of(store)
        options: dict[str, Any] = {**config.options, "batch_size": config.batch_size}
        self.log = new_store_owner_log(store, config.num_buckets, **options)
        self.backends: dict[int, PersistingBackend] = {}
        self._next = PUTS
        try:
            for bucket in buckets:
                place: Any = store.address / f"bucket_{bucket}"
                backend = PersistingBackend(bucket, place, owner_log=self.log, **options)
                self.backends[bucket] = backend
        except BaseException:
            self.close()
            raise

    def put(self, count: int = 5) -> int:
        """Put records to each bucket; return the next id."""

        async def put() -> None:
            for backend in self.backends.values():
                await backend.put_batch(texts(self._next, count))
                self._next += count

        asyncio.run(put())
        return self._next

    def continue_at(self, number: int) -> None:
        self._next = number

    def close(self) -> None:
        for backend in self.backends.values():
            backend.close_now()
        self.log.retire()

    def die(self) -> None:
        """Stop as a killed process does."""
        self.log._lease.stop()
        for backend in self.backends.values():
            if backend._inbox is not None:
                backend._inbox.stop()


def config_of(store: ObjectStore) -> TopicConfig:
    config = store_config.load(store)
    assert config is not None
    return config


def written_notes(
    store: ObjectStore,
    records: list[dict[str, Any]],
    sequence: tuple[str, int] = ("w", 0),
    *,
    overwrite: bool = False,
) -> dict[int, Note]:
    """Write records as files; return the notes that hand them over, by bucket."""
    config = config_of(store)
    rows = pa.Table.from_pylist(records)
    schema = StoreSchema(store).propose(rows.schema, frozenset(), Rules(evolving=True))
    tables = handover.prepare(store, config, schema)
    files = {
        bucket: StoreBulkFiles(store.address / f"bucket_{bucket}" / "data.lance", store.options)
        for bucket in range(config.num_buckets)
    }
    return files_for(files, config, rows, schema, tables, sequence, overwrite)


def hand_over(
    store: ObjectStore,
    records: list[dict[str, Any]],
    write_id: str = "w",
    number: int = 0,
    *,
    seconds: float = 60.0,
    overwrite: bool = False,
    meanwhile: Callable[[], Any] | None = None,
) -> int:
    """Write records as files and have the owners of a topic adopt them; return the new rows."""
    notes = written_notes(store, records, (write_id, number), overwrite=overwrite)
    return adopted(store, config_of(store), notes, seconds, meanwhile)


def content(store: ObjectStore) -> dict[int, list[int]]:
    """Return the ids of the acknowledged records, by bucket and in order."""
    # A store of its own: readers of one store share what they have read lately.
    own = open_store(store.address, store.options)
    topic = StoreTopic(own, config_of(own))
    found = {}
    for bucket in topic.buckets:
        snapshot = topic.snapshot(bucket)
        rows = snapshot.batches(snapshot.start, None, ["id"])
        found[bucket] = [number for batch in rows for number in batch.column("id").to_pylist()]
    return found


def ids(store: ObjectStore) -> list[int]:
    """Return all ids, sorted; one that is stored twice is in it twice."""
    return sorted(number for numbers in content(store).values() for number in numbers)


def handovers(store: ObjectStore) -> list[str]:
    """Return the objects that hand-overs have left."""
    return store.list("handover")


def unreferenced(store: ObjectStore) -> set[str]:
    """Return the data objects that the newest versions do not name."""
    topic = StoreTopic(store, config_of(store))
    left = set()
    for bucket in topic.buckets:
        named = {f.path for x in topic.view(bucket).fragments for f in x.files}
        data = store.list(f"bucket_{bucket}/data.lance/data")
        left |= {key for key in data if key.rpartition("/")[2] not in named}
    return left
