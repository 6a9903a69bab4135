"""Deleting a topic in an object store: nothing that arrives later does harm."""

from __future__ import annotations

from typing import Any

import pytest
from support.object_stores import SeaweedFS, url

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.errors import BucketLocked, NoSuchTopic, OwnershipLost, StorageError
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.table.store_table import StoreTable
from persisting.topic import store_deletion
from persisting.wal.slots import slot_key

OPTIONS: dict[str, Any] = {"enable_wal": True, "lease": 0.6, "flush_interval": None}


@pytest.fixture
def where(server: SeaweedFS, prefix: str) -> dict[str, Any]:
    return {"topic": "t", "storage_path": url(prefix), "storage_options": server.options()}


@pytest.fixture
def topic(server: SeaweedFS, prefix: str) -> ObjectStore:
    return open_store(parse(url(prefix)) / "t", StorageOptions(server.options()))


async def fill(where: dict[str, Any], first: int, count: int) -> None:
    given: dict[str, Any] = {"num_buckets": 1, "durable": True, "backend_options": OPTIONS}
    async with await write_queue(**where, **given) as writer:
        await writer.put([{"id": str(n), "n": n} for n in range(first, first + count)])


async def numbers(where: dict[str, Any]) -> list[int]:
    async with await read_queue(**where) as reader:
        return [record["n"] for record in await reader.get(None)]


async def test_paused_owner_of_a_deleted_topic_neither_acknowledges_nor_damages_a_new_one(
    where: dict[str, Any], topic: ObjectStore
) -> None:
    await fill(where, 0, 5)
    log = new_store_owner_log(topic, 1, **OPTIONS)
    place: Any = topic.address / "bucket_0"
    paused = PersistingBackend(0, place, owner_log=log, **OPTIONS)
    await paused.put({"id": "x", "n": 10})
    log._lease.stop()
    behind, first = slot_key(log.name, 9), topic.get(slot_key(log.name, 0))
    assert first is not None
    topic.create(behind, first.data)  # a put behind one that was never stored does not count
    store_deletion.delete(topic)
    assert topic.get(behind) is None
    with pytest.raises(NoSuchTopic):
        await read_queue(**where)
    with pytest.raises(OwnershipLost):
        await paused.put({"id": "y", "n": 11})
    await fill(where, 20, 3)
    with pytest.raises(StorageError):
        await paused.flush()
    assert await numbers(where) == [20, 21, 22]
    await fill(where, 23, 1)
    assert await numbers(where) == [20, 21, 22, 23]
    await paused.close()


async def test_writer_that_opened_the_topic_before_its_deletion_cannot_own_a_bucket(
    where: dict[str, Any], topic: ObjectStore
) -> None:
    await fill(where, 0, 2)
    log = new_store_owner_log(topic, 1, **OPTIONS)
    store_deletion.delete(topic)
    place: Any = topic.address / "bucket_0"
    with pytest.raises(NoSuchTopic, match="was deleted"):
        PersistingBackend(0, place, owner_log=log, **OPTIONS)
    log.retire()


async def test_topic_of_a_living_owner_is_not_deleted(
    where: dict[str, Any], topic: ObjectStore, long_lease: float
) -> None:
    options = {**OPTIONS, "lease": long_lease}
    given: dict[str, Any] = {"num_buckets": 2, "durable": True, "backend_options": options}
    async with await write_queue(**where, **given) as writer:
        await writer.put([{"id": str(n), "n": n} for n in range(5)])
        with pytest.raises(BucketLocked):
            store_deletion.delete(topic)
        await writer.put({"id": "5", "n": 5})
    assert sorted(await numbers(where)) == list(range(6))


async def test_interrupted_deletion_leaves_no_topic_and_is_completed_by_the_next(
    where: dict[str, Any], topic: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(where, 0, 5)

    def fail(_: StoreTable) -> None:
        raise StorageError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(StoreTable, "erase", fail)
        with pytest.raises(StorageError, match="cut off"):
            store_deletion.delete(topic)
    for opened in (read_queue(**where), write_queue(**where, durable=True)):
        with pytest.raises(StorageError, match="was interrupted"):
            await opened
    store_deletion.delete(topic)
    with pytest.raises(NoSuchTopic):
        await read_queue(**where)
    left = topic.list("")
    kinds = ("owner.json", ".manifest", ".txn", "lease.json")
    assert all(key.endswith(kinds) or "/slots/" in key for key in left), left
    assert len([key for key in left if key.startswith("bucket_0")]) == 3
