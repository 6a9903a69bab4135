"""The same topics on other servers than SeaweedFS, in the nightly tests: a second S3, and Azurite.

The real services of Azure and Google are not tested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.azurite import Azurite
from support.object_stores import MiniStack, Server, fresh_prefix

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.errors import OwnershipLost
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import ObjectChanged, ObjectExists, ObjectStore, open_store
from persisting.store.probe import probe
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

SERVERS: dict[str, type[Server]] = {"ministack": MiniStack, "azurite": Azurite}
LEASE = 1.0


@pytest.fixture(scope="module", params=SERVERS)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a fresh prefix, and the options that reach it."""
    running = SERVERS[request.param](Path(tmp_path_factory.mktemp(request.param)))
    running.start()
    yield running.url(fresh_prefix()), running.options()
    running.kill()


@pytest.fixture
def other(place: tuple[str, dict[str, str]]) -> ObjectStore:
    address, options = place
    return open_store(parse(address) / fresh_prefix(), StorageOptions(options))


def opened(store: ObjectStore) -> PersistingBackend:
    options: dict[str, Any] = {"enable_wal": True, "lease": LEASE, "flush_interval": None}
    log = new_store_owner_log(store, 1, **options)
    address: Any = store.address / "bucket_0"
    return PersistingBackend(0, address, owner_log=log, **options)


def test_server_obeys_conditions(other: ObjectStore) -> None:
    probe(other)
    first = other.create("a", b"1")
    with pytest.raises(ObjectExists):
        other.create("a", b"2")
    second = other.swap("a", b"2", first)
    with pytest.raises(ObjectChanged):
        other.swap("a", b"3", first)
    other.swap("a", b"3", second)
    other.create("b/c", b"4")
    assert other.list("") == ["a", "b/c"]
    assert other.list("", after="a") == ["b/c"]
    other.delete(["a", "b/c", "missing"])
    assert other.get("a") is None


def test_deletion_ignores_objects_that_are_missing(other: ObjectStore) -> None:
    names = [f"d/{number:04}" for number in range(600)]
    for name in names[::60]:
        other.create(name, b"1")
    other.delete(names)
    other.delete(names)
    assert other.list("d") == []


async def test_topic_is_written_read_and_followed(place: tuple[str, dict[str, str]]) -> None:
    address, options = place
    where: dict[str, Any] = {"topic": "t", "storage_path": address, "storage_options": options}
    writer = await write_queue(**where, durable=True, num_buckets=2, bucket_column="n")
    for number in range(5):
        await writer.put({"n": number})
    await writer.flush()
    await writer.put([{"n": number} for number in range(5, 20)])
    async with await read_queue(**where, group="g") as reader:
        assert sorted(record["n"] for record in await reader.get()) == list(range(20))
        await reader.commit()
    await writer.close()
    again = await write_queue(**where, durable=True)
    await again.put({"n": 20})
    await again.close()
    async with await read_queue(**where, group="g") as reader:
        assert [record["n"] for record in await reader.get()] == [20]


async def test_owner_that_is_replaced_can_neither_put_nor_flush(other: ObjectStore) -> None:
    first = opened(other)
    for number in range(5):
        await first.put({"n": number})
    await first.flush()
    await first.put({"n": 5})
    log: Any = first.bucket.options.owner_log
    log._lease.stop()
    second = await asyncio.to_thread(opened, other)
    with pytest.raises(OwnershipLost):
        await first.put({"n": 6})
    with pytest.raises(OwnershipLost):
        await first.flush()
    await second.put({"n": 7})
    assert [record["n"] for record in await second.get()] == [0, 1, 2, 3, 4, 5, 7]
    await first.close()
    await second.close()
