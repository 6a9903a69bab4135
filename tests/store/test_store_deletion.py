"""Deleting a topic in an object store: nothing that arrives later does harm."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from support.fault_proxy import Fault, FaultProxy
from support.object_stores import storage_options, url
from support.store_places import topic_store
from support.waiting import until_true

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.errors import (
    BucketLocked,
    InvalidArgument,
    NoSuchTopic,
    OwnershipLost,
    StorageError,
)
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.table.store_table import StoreTable
from persisting.topic import store_config, store_deletion, store_inspect
from persisting.topic.store_files import StoreTopic
from persisting.ui.store_view import view_of
from persisting.wal.slots import slot_key

OPTIONS: dict[str, Any] = {"enable_wal": True, "lease": 0.6, "flush_interval": None}


@pytest.fixture
def topic(where: dict[str, Any]) -> ObjectStore:
    return topic_store(where)


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
    later, first = slot_key(log.name, 9), topic.get(slot_key(log.name, 0))
    assert first is not None
    topic.create(later, first.data)  # a put after one that was never stored does not count
    store_deletion.delete(topic)
    assert topic.get(later) is None
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


@pytest.mark.parametrize("late", ["DELETE", "PUT-if-match"])
async def test_last_requests_of_a_deletion_that_arrive_late_leave_a_new_topic_its_definition(
    where: dict[str, Any],
    topic: ObjectStore,
    proxy: FaultProxy,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    late: str,
) -> None:
    """Its client gives up requests that are held, and another process completes the deletion."""
    await fill(where, 0, 5)
    options = StorageOptions(storage_options(proxy.port, timeout="1s", connect_timeout="1s"))
    slow = open_store(parse(url(prefix)) / "t", options, retry_seconds=1.0)
    let_go = threading.Event()
    held: list[Fault] = []
    delete_old_logs = store_deletion._delete_old_logs

    def then_hold(*given: Any) -> None:
        delete_old_logs(*given)
        held.append(proxy.add(late, until=let_go))

    with monkeypatch.context() as patched:
        patched.setattr(store_deletion, "_delete_old_logs", then_hold)
        with pytest.raises(StorageError):
            await asyncio.to_thread(store_deletion.delete, slow)
    await asyncio.to_thread(store_deletion.delete, topic)
    await fill(where, 20, 3)
    new = store_config.load(topic)
    passed = proxy.statuses.total()
    let_go.set()
    await asyncio.to_thread(until_true, lambda: proxy.statuses.total() >= passed + held[0].met)
    assert held[0].met > 0
    assert store_config.load(topic) == new
    await fill(where, 23, 1)
    assert await numbers(where) == [20, 21, 22, 23]


async def test_definition_of_a_deleted_topic_is_not_a_topic(
    where: dict[str, Any], topic: ObjectStore, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in where["storage_options"].items():
        monkeypatch.setenv(
            name.upper() if name.startswith("aws_") else f"AWS_{name.upper()}", value
        )
    await fill(where, 0, 5)
    assert store_inspect.topic_names(url(prefix)) == ["t"]
    store_deletion.delete(topic)
    assert topic.get("topic.json") is not None
    assert store_inspect.topic_names(url(prefix)) == []
    assert store_config.load(topic) is None
    with pytest.raises(NoSuchTopic):
        await read_queue(**where)
    with pytest.raises(NoSuchTopic):
        StoreTopic.find("t", url(prefix))
    with pytest.raises(NoSuchTopic):
        view_of(url(prefix)).check("t")
    with pytest.raises(NoSuchTopic):
        store_deletion.delete(topic)
    with pytest.raises(InvalidArgument, match="durable=True"):
        await write_queue(**where)  # as for a name that was never used
    await fill(where, 20, 3)
    assert store_inspect.topic_names(url(prefix)) == ["t"]
    assert await numbers(where) == [20, 21, 22]


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
    left = [key for key in topic.list("") if key != "topic.json"]
    kinds = ("owner.json", ".manifest", ".txn", "lease.json")
    assert all(key.endswith(kinds) or "/slots/" in key for key in left), left
    assert len([key for key in left if key.startswith("bucket_0")]) == 3
