"""Readers that follow a log in an object store: their requests, and what they wait for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

import pytest
from support.fault_proxy import FaultProxy
from support.object_stores import storage_options, url
from support.owner_process import OwnerProcess
from support.topic_places import ids, numbered
from support.waiting import until, until_true

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.backends.table_backend import TableBackend
from persisting.bucket import slot_log, store_follower
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.errors import BucketLocked
from persisting.queue import read_queue
from persisting.store.object_store import ObjectStore, StoredObject, StoreError, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.topic import store_files
from persisting.topic.spec import TopicConfig
from persisting.wal.slots import slot_key

CONFIG = TopicConfig(topic="t", num_buckets=1, bucket_column="id", backend="persisting")
OPTIONS: dict[str, Any] = {"enable_wal": True, "flush_interval": None}
PATIENCE = 60.0
CHECKS = ("owner.json", "lease.json", "_versions/", "schema.json")

Owned = tuple[StoreOwnerLog, PersistingBackend]
Own = Callable[..., Owned]


class Followed(NamedTuple):
    """A reader of a bucket, behind the proxy, and the owner, which is not."""

    log: StoreOwnerLog
    owner: PersistingBackend
    reader: TableBackend


@pytest.fixture
def own(store: ObjectStore) -> Iterator[Own]:
    """Own the bucket as another process would: without the proxy of the reader."""
    made: list[PersistingBackend] = []

    def open_owner(**given: Any) -> Owned:
        options = {**OPTIONS, "lease": 300.0, **given}
        log = new_store_owner_log(store, 1, **options)
        place: Any = store.address / "bucket_0"
        made.append(PersistingBackend(0, place, owner_log=log, **options))
        return log, made[-1]

    yield open_owner
    for backend in made:
        with suppress(Exception):  # some were taken over
            backend.close_now()


@pytest.fixture
def held(proxy: FaultProxy) -> Iterator[threading.Event]:
    """Passes requests on that a test holds, at its end at the latest."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
async def followed(proxy: FaultProxy, prefix: str, own: Own) -> AsyncIterator[Followed]:
    """The bucket has one record."""
    log, owner = await asyncio.to_thread(own)
    await owner.put({"n": 0})
    reader = await open_reader(proxy, prefix)
    yield Followed(log, owner, reader)
    await reader.close()


async def open_reader(proxy: FaultProxy, prefix: str) -> TableBackend:
    # A request that a test holds, or that a slow machine answers late, does not fail.
    options = StorageOptions(storage_options(proxy.port, timeout="120s"))
    store = open_store(parse(url(prefix)), options, retry_seconds=0.0)
    return TableBackend(await asyncio.to_thread(store_files.open_reader, store, CONFIG, 0))


def log_of_reader(owner: StoreOwnerLog) -> slot_log.SlotLog:
    """Return what the reader knows of the owner's log."""
    return next(logs[owner.name] for logs in slot_log._logs.values() if owner.name in logs)


async def follow(reader: TableBackend, first: int, count: int) -> list[int]:
    """Wait for records from an offset on."""
    found: list[int] = []

    async def read() -> None:
        async with aclosing(reader.get_pages(first, count, True)) as pages:
            async for page in pages:
                found.extend(record["n"] for record in page.rows)

    await asyncio.wait_for(read(), PATIENCE)
    return found


async def test_records_do_not_wait_for_checks_of_owner_lease_and_table(
    followed: Followed, proxy: FaultProxy, held: threading.Event
) -> None:
    _, owner, reader = followed
    assert await follow(reader, 0, 1) == [0]
    faults = [proxy.add("", also=part, until=held) for part in CHECKS]
    for number in range(1, 30):
        await owner.put({"n": number})
        assert await follow(reader, number, 1) == [number]
        await asyncio.sleep(0.05)  # until checks are due
    assert any(fault.met for fault in faults)
    held.set()
    assert await follow(reader, 0, 30) == list(range(30))


async def test_follower_asks_for_the_next_object_by_its_name(
    followed: Followed, proxy: FaultProxy
) -> None:
    log, owner, reader = followed
    await follow(reader, 0, 1)
    looking = log_of_reader(log)
    proxy.reset_counts()

    def has_looked_in_vain() -> bool:  # after several finds in a row it asks for more than the next
        return looking._in_a_row == 0 or not looking.is_followed

    for number in range(1, 11):
        await asyncio.to_thread(until_true, has_looked_in_vain)
        await owner.put({"n": number})
        await follow(reader, number, 1)
    looks = [kind for kind in proxy.seen if "/slots" in kind]
    assert all(kind.startswith("GET ") for kind in looks)
    asked = [int(kind.rpartition("/")[2]) for kind in looks]
    assert set(range(1, 11)) <= set(asked)
    assert max(asked) <= 11 + 1  # no request for what cannot be there


async def test_idle_reader_of_four_buckets_makes_the_requests_of_the_price_table(
    where: dict[str, Any], proxy: FaultProxy
) -> None:
    with OwnerProcess() as owner:
        options = {"lease": 300.0, "flush_interval": None}
        new = {"durable": True, "num_buckets": 4, "backend_options": options}
        await owner.ask("own", args={**where, **new})
        await owner.ask("put", args=[numbered(100)])
        proxied = {**where, "storage_options": storage_options(proxy.port, timeout="120s")}
        async with await read_queue(**proxied) as reader:
            assert len(await reader.get(None)) == 100
            waiting = asyncio.create_task(reader.get(1, wait=True))
            await asyncio.sleep(5.5)  # from then on the pause between two polls is the longest
            began = time.monotonic()
            proxy.reset_counts()
            await asyncio.sleep(6)
            seen = list(proxy.seen)
            seconds = time.monotonic() - began  # more than 6 on a busy machine
            await owner.ask("put", args=[{"id": 100}])
            assert ids(await waiting) == [100]

    def count(kind: str, part: str) -> int:
        return sum(one.startswith(kind) and part in one for one in seen)

    looks, checks = count("GET", "/slots/"), 4 * (seconds + 1)  # a check of each bucket per second
    assert 0 < looks <= 4 * seconds + 2
    assert 0 < count("GET", "owner.json") <= checks
    assert 0 < count("GET", "lease.json") <= seconds + 1
    versions = count("HEAD", "_versions/") + count("LIST", "_versions/")
    assert 0 < versions <= checks
    assert count("LIST", "_versions/") <= 4 * (seconds / store_follower._LIST_SECONDS + 1)
    assert len(seen) == looks + count("GET", "owner.json") + count("GET", "lease.json") + versions
    # What that makes in a day; the guide rounds the first number.
    assert 1_050_000 < 86_400 * (4 + 4 + 1 + 4) < 1_150_000
    assert 86_400 * 4 / store_follower._LIST_SECONDS == 11_520


async def test_idle_follower_of_one_bucket_makes_few_requests(
    followed: Followed, proxy: FaultProxy
) -> None:
    _, owner, reader = followed
    waiting = asyncio.create_task(follow(reader, 1, 1))
    await asyncio.sleep(5.5)  # from then on the pause between two polls is the longest
    began = time.monotonic()
    proxy.reset_counts()
    await asyncio.sleep(4)
    seen = list(proxy.seen)
    seconds = time.monotonic() - began  # more than 4 on a busy machine
    looks = [kind for kind in seen if "/slots/" in kind]
    counts = Counter(kind.partition(" ")[0] for kind in seen)
    assert 0 < len(looks) <= 4 * seconds + 2
    assert counts.pop("GET") - len(looks) <= 2 * (seconds + 1)  # the owner and the lease
    assert counts.pop("HEAD", 0) <= seconds + 1  # the next version of the table
    assert counts == {}
    await owner.put({"n": 1})
    assert await waiting == [1]


async def test_closed_reader_causes_no_more_requests(followed: Followed, proxy: FaultProxy) -> None:
    _, owner, reader = followed
    await owner.put({"n": 1})
    await follow(reader, 0, 2)
    await reader.close()
    proxy.reset_counts()
    await asyncio.sleep(0.8)
    assert len(proxy.seen) <= 10  # those that were under way


async def test_objects_are_shown_in_order_if_an_earlier_one_arrives_late(
    followed: Followed, proxy: FaultProxy, held: threading.Event
) -> None:
    _, owner, reader = followed
    for number in range(1, 4):  # several in a row: then the next ones are asked for together
        await owner.put({"n": number})
    late = proxy.add("GET", also=f"/slots/{5:020d}", until=held)
    for number in range(4, 20):
        await owner.put({"n": number})
    following = asyncio.create_task(follow(reader, 0, 20))
    assert await asyncio.to_thread(late.reached.wait, PATIENCE)

    def next_ones_were_asked_for() -> bool:
        names = [f"/slots/{slot:020d}" for slot in (6, 7)]
        return all(any(name in request for request in proxy.seen) for name in names)

    await asyncio.to_thread(until_true, next_ones_were_asked_for)
    await asyncio.sleep(0.2)
    shown = [record["n"] for record in reader.bucket.snapshot().records(0, None)]
    assert shown in [
        list(range(count)) for count in range(1, 6)
    ]  # nothing of the late one or after
    held.set()
    assert await following == list(range(20))


async def test_objects_that_were_deleted_before_they_were_read_come_from_the_table_once(
    store: ObjectStore, followed: Followed, proxy: FaultProxy, held: threading.Event
) -> None:
    log, owner, reader = followed
    await follow(reader, 0, 1)
    name = next(key.split("/")[1] for key in store.list("log"))
    late = proxy.add("GET", also="/slots/", until=held)
    following = asyncio.create_task(follow(reader, 0, 8))
    assert await asyncio.to_thread(late.reached.wait, PATIENCE)
    for number in range(1, 6):
        await owner.put({"n": number})
    await owner.flush()
    await asyncio.to_thread(log.log.beat)
    await asyncio.to_thread(log.log.delete_released)
    assert store.get(slot_key(name, 3)) is None
    held.set()
    for number in range(6, 8):
        await owner.put({"n": number})
    assert await following == list(range(8))


async def test_follower_continues_with_the_log_of_the_next_owner(
    own: Own, proxy: FaultProxy, prefix: str
) -> None:
    log, first = await asyncio.to_thread(lambda: own(lease=0.6))
    await first.put({"n": 0})
    reader = await open_reader(proxy, prefix)
    following = asyncio.create_task(follow(reader, 0, 9))
    for number in range(1, 4):
        await first.put({"n": number})
    log._lease.stop()  # as a killed process
    second = None
    while second is None:
        with suppress(BucketLocked):
            _, second = await asyncio.to_thread(own)
    for number in range(4, 9):
        await second.put({"n": number})
    assert await following == list(range(9))
    await reader.close()


async def test_reader_that_waits_gets_the_error_of_a_poll_and_can_continue(
    followed: Followed, proxy: FaultProxy
) -> None:
    log, owner, reader = followed
    await follow(reader, 0, 1)
    waiting = asyncio.create_task(follow(reader, 1, 1))
    await asyncio.sleep(0.1)
    proxy.add("GET", also="/slots/", answer=403)
    with pytest.raises(StoreError, match="refuses to read"):
        await waiting
    proxy.heal()
    await asyncio.to_thread(until_true, lambda: not log_of_reader(log)._under_way)
    await owner.put({"n": 1})
    assert await follow(reader, 1, 1) == [1]


async def test_reader_that_does_not_wait_sees_what_was_acknowledged_although_polls_are_rare(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_log, "_BUSY_SECONDS", 0.0)
    monkeypatch.setattr(slot_log, "_PAUSE_SHARE", 1e9)
    monkeypatch.setattr(slot_log, "LONGEST_PAUSE", 3600.0)
    _, owner, reader = followed
    for number in range(1, 6):
        await owner.put({"n": number})
        await asyncio.sleep(2 * slot_log.LOOK_SECONDS)
        assert [record["n"] for record in await reader.get()] == list(range(number + 1))


async def test_reader_that_joins_takes_nothing_from_another_one(
    store: ObjectStore, prefix: str, own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both follow one log. The second lists it while a poll of the first finds a new object."""
    _, owner = await asyncio.to_thread(own)
    for number in range(2):
        await owner.put({"n": number})
    shared = open_store(parse(url(prefix)), store.options)

    async def opened() -> TableBackend:
        return TableBackend(await asyncio.to_thread(store_files.open_reader, shared, CONFIG, 0))

    async def numbers(reader: TableBackend) -> list[int]:
        return [row["n"] for row in await reader.get()]

    first = await opened()
    assert await numbers(first) == [0, 1]
    loop, get, listed = asyncio.get_running_loop(), shared.get, shared.list
    polls, may_poll, joined = threading.Event(), threading.Event(), threading.Event()

    def get_late(key: str) -> StoredObject | None:
        if key.endswith(f"/slots/{2:020d}") and not polls.is_set():
            polls.set()
            assert may_poll.wait(PATIENCE)
        if key.endswith(f"/slots/{3:020d}"):
            assert joined.wait(PATIENCE)
        return get(key)

    def list_and_let_the_poll_find_more(place: str, after: str | None = None) -> list[str]:
        found = listed(place, after)
        if "/slots" in place and not may_poll.is_set():
            asyncio.run_coroutine_threadsafe(owner.put({"n": 2}), loop).result(PATIENCE)
            may_poll.set()
            (log,) = slot_log._logs[shared].values()
            until_true(lambda: log._next == 3)
        return found

    with monkeypatch.context() as slow:
        slow.setattr(shared, "get", get_late)
        slow.setattr(shared, "list", list_and_let_the_poll_find_more)
        await asyncio.sleep(slot_log.LOOK_SECONDS)  # the last poll is not recent any more
        reading = asyncio.create_task(numbers(first))
        assert await asyncio.to_thread(polls.wait, PATIENCE)
        second = await opened()
        joined.set()
        assert await reading in ([0, 1], [0, 1, 2])
    for reader in (first, second):
        await until(lambda reader=reader: _has(reader, 3))
    await owner.put({"n": 3})
    for reader in (first, second):
        await until(lambda reader=reader: _has(reader, 4))
        assert await numbers(reader) == [0, 1, 2, 3]
        await reader.close()


async def _has(reader: TableBackend, count: int) -> bool:
    return len(await reader.get()) == count
