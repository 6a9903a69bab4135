"""Several concurrent group commits: their slots, their acknowledgements, their failures."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from support.fault_proxy import FaultProxy
from support.log_slots import slots_of
from support.object_stores import SeaweedFS, url
from support.waiting import until_true

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.bucket import lanes
from persisting.bucket.store_bucket import StoreBucket
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.concurrency import loop_bridge
from persisting.errors import OwnershipLost, WALError
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.wal import Payload, sealing
from persisting.wal.frame import RECORDS, START, SegmentStart, encode_start
from persisting.wal.lease import Lease, lease_register
from persisting.wal.object_log import BegunSlot, ObjectLog
from persisting.wal.slots import is_claim, new_log_name, slot_key

LEASE = 0.6
OPTIONS: dict[str, Any] = {"enable_wal": True, "lease": LEASE, "flush_interval": None}
ENOUGH = lanes._LANE_PUTS


def begun(log: ObjectLog, text: bytes) -> BegunSlot:
    def preamble() -> list[Payload]:
        start = encode_start(SegmentStart(log.last_written, {}))
        return [Payload(START, 0, len(start), start)]

    return log.begin([[Payload(RECORDS, 0, len(text), text)]], preamble, 1)


def new_log(store: ObjectStore) -> ObjectLog:
    return ObjectLog(store, Lease(store, new_log_name(), LEASE))


def stored(log: ObjectLog, *slots: BegunSlot) -> None:
    for slot in slots:
        log.store(slot)
        log.finish(slot)


# Slots


def test_slot_after_a_free_one_is_not_read(store: ObjectStore) -> None:
    log = new_log(store)
    first, second, third = (begun(log, b"%d" % number) for number in range(3))
    stored(log, first)
    log.store(third)  # the second is still under way
    sealed = sealing.seal(store, log.name, "other")
    assert sealed.slots == range(1)
    assert len(sealing.read_slots(store, sealed)) == 1
    with pytest.raises(OwnershipLost, match="claimed"):
        log.store(second)


def test_claim_is_found_although_slots_follow_it(store: ObjectStore) -> None:
    log = new_log(store)
    first, _, *others = (begun(log, b"%d" % number) for number in range(4))
    stored(log, first)
    for slot in others:
        log.store(slot)
    sealed = sealing.seal(store, log.name, "other")
    assert sealing.seal(store, log.name, "third") == sealed
    assert slots_of(store, log) == [0, 1, 2, 3]
    sealing.remove(store, sealed)
    assert slots_of(store, log) == [1]
    claim = store.get(slot_key(log.name, 1))
    assert claim is not None
    assert is_claim(claim.data)


def test_a_late_slot_does_not_ask_for_a_log_that_was_removed(store: ObjectStore) -> None:
    """An owner that does not know of its end may note its removed log for another bucket."""
    log = new_log(store)
    for number in range(2):
        stored(log, begun(log, b"%d" % number))
    begun(log, b"2")
    late = begun(log, b"3")
    sealed = sealing.seal(store, log.name, "other")
    sealing.remove(store, sealed)
    log.store(late)
    assert slots_of(store, log) == [2, 3]
    assert sealing.seal(store, log.name, "third").slots == range(2, 2)


@pytest.mark.parametrize("removed", [[0], [1], [0, 1, 2]])
def test_a_log_that_was_removed_in_part_holds_nothing(
    store: ObjectStore, removed: list[int]
) -> None:
    log = new_log(store)
    for number in range(3):
        stored(log, begun(log, b"%d" % number))
    sealed = sealing.seal(store, log.name, "other")
    kept = {n: store.get(slot_key(log.name, n)) for n in range(3) if n not in removed}
    sealing.remove(store, sealed)
    for number, found in kept.items():  # as if the process had died while it deleted them
        assert found is not None
        store.create(slot_key(log.name, number), found.data)
    again = sealing.seal(store, log.name, "third")
    assert sealing.read_slots(store, again) == []
    sealing.remove(store, sealed)
    assert slots_of(store, log) == [3]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_acknowledged_slot_that_is_missing_is_named(store: ObjectStore, missing: int) -> None:
    log = new_log(store)
    for number in range(4):
        stored(log, begun(log, b"%d" % number))
    store.delete([slot_key(log.name, missing)])
    with pytest.raises(WALError, match=rf"0{missing} is missing: it holds records"):
        sealing.seal(store, log.name, "other")
    assert slots_of(store, log) == [number for number in range(4) if number != missing]


def test_acknowledged_slot_that_is_missing_after_released_ones_is_named(store: ObjectStore) -> None:
    log = new_log(store)
    slots = [begun(log, b"%d" % number) for number in range(2)]
    stored(log, *slots)
    log.release(slots[1].lasts[-1])
    log.beat()
    for number in range(2):
        stored(log, begun(log, b"%d" % number))
    store.delete([slot_key(log.name, 2)])
    with pytest.raises(WALError, match="is missing"):
        sealing.seal(store, log.name, "other")


# Puts


def opened(store: ObjectStore) -> tuple[StoreOwnerLog, PersistingBackend]:
    options = {**OPTIONS, "lease": 60.0}
    log = new_store_owner_log(store, 1, **options)
    place: Any = store.address / "bucket_0"
    return log, PersistingBackend(0, place, owner_log=log, **options)


async def started(store: ObjectStore, proxy: FaultProxy) -> PersistingBackend:
    """Open a bucket and put the record -1, whose requests the proxy does not count."""
    _, bucket = opened(store)
    await bucket.put({"n": -1})
    proxy.reset_counts()
    return bucket


def expect_requests_of(bucket: PersistingBackend, seconds: float) -> None:
    """Have a bucket expect that a request takes so long."""
    group_commit = bucket.bucket.group_commit
    assert group_commit is not None
    group_commit._lanes._request_seconds = seconds


async def two_slots(proxy: FaultProxy) -> None:
    """Wait until two slots were sent."""
    await asyncio.to_thread(until_true, lambda: slot_puts(proxy) >= 2)


def slot_puts(proxy: FaultProxy) -> int:
    return sum("PUT-if-absent" in kind and "/slots/" in kind for kind in list(proxy.seen))


async def put_behind_a_held_slot(
    bucket: PersistingBackend, proxy: FaultProxy, count: int, **what: Any
) -> tuple[threading.Event, list[asyncio.Task[None]]]:
    """Put one record whose slot the proxy holds until the event is set, then others."""
    let_go = threading.Event()
    held = proxy.add("PUT-if-absent", also="/slots/", times=1, until=let_go, **what)
    tasks = [asyncio.create_task(bucket.put({"n": 0}))]
    assert await asyncio.to_thread(held.reached.wait, 60)
    tasks += [asyncio.create_task(bucket.put({"n": number})) for number in range(1, count + 1)]
    await asyncio.sleep(0)  # they are queued
    return let_go, tasks


async def numbers(bucket: PersistingBackend) -> list[int]:
    return [record["n"] for record in await bucket.get()]


async def test_many_puts_do_not_wait_for_the_object_that_is_under_way(
    patient: ObjectStore, proxy: FaultProxy
) -> None:
    bucket = await started(patient, proxy)
    let_go, tasks = await put_behind_a_held_slot(bucket, proxy, ENOUGH)
    await two_slots(proxy)
    assert not any(task.done() for task in tasks)
    assert await numbers(bucket) == [-1]
    let_go.set()
    await asyncio.gather(*tasks)
    assert await numbers(bucket) == list(range(-1, ENOUGH + 1))
    await bucket.close()


async def test_few_puts_share_the_next_object(patient: ObjectStore, proxy: FaultProxy) -> None:
    bucket = await started(patient, proxy)
    let_go, tasks = await put_behind_a_held_slot(bucket, proxy, 20)
    await asyncio.sleep(0.2)
    assert slot_puts(proxy) == 1
    let_go.set()
    await asyncio.gather(*tasks)
    assert slot_puts(proxy) == 2
    assert await numbers(bucket) == list(range(-1, 21))
    await bucket.close()


async def test_puts_of_one_turn_of_the_loop_share_an_object(
    patient: ObjectStore, proxy: FaultProxy
) -> None:
    bucket = await started(patient, proxy)
    # Puts are not kept waiting for a turn that is slow compared with a request.
    expect_requests_of(bucket, 3600.0)
    await asyncio.gather(*(bucket.put({"n": number}) for number in range(100)))
    assert slot_puts(proxy) == 1
    assert await numbers(bucket) == list(range(-1, 100))
    await bucket.close()


async def test_put_does_not_wait_for_a_long_turn_of_the_loop(
    patient: ObjectStore, proxy: FaultProxy
) -> None:
    bucket = await started(patient, proxy)
    expect_requests_of(bucket, 0.04)

    async def block_for_long() -> None:
        time.sleep(0.04)  # noqa: ASYNC251

    async def block_until_sent() -> None:
        until_true(lambda: slot_puts(proxy) >= 1)

    await asyncio.gather(
        bucket.put({"n": 0}), block_for_long(), bucket.put({"n": 1}), block_until_sent()
    )
    assert await numbers(bucket) == [-1, 0, 1]
    await bucket.close()


async def test_flushes_of_a_store_are_spaced(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreBucket, "flush_pause", 3600.0)
    log = new_store_owner_log(store, 1, **OPTIONS)
    place: Any = store.address / "bucket_0"
    bucket = PersistingBackend(0, place, owner_log=log, flush_threshold=5, **OPTIONS)

    async def flushes() -> int:
        return (await bucket.stats())["flush_count"]

    await bucket.put_batch([{"n": 1}] * 5)
    while not await flushes():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for _ in range(5):
        await bucket.put_batch([{"n": 1}] * 5)
    assert await flushes() == 1
    await bucket.flush()
    assert await flushes() == 2
    await bucket.close()


async def test_puts_after_a_refused_object_are_refused_too(
    patient: ObjectStore, proxy: FaultProxy, store: ObjectStore
) -> None:
    bucket = await started(patient, proxy)
    let_go, tasks = await put_behind_a_held_slot(bucket, proxy, ENOUGH, answer=403)
    await two_slots(proxy)
    let_go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, WALError) for result in results)
    await bucket.flush()  # the log starts over
    await bucket.put({"n": 7})
    assert await numbers(bucket) == [-1, 7]
    await bucket.close()
    _, again = await asyncio.to_thread(opened, store)
    assert await numbers(again) == [-1, 7]
    await again.close()


async def test_log_starts_over_after_the_puts_that_waited_for_an_object_failed_with_it(
    patient: ObjectStore, proxy: FaultProxy
) -> None:
    bucket = await started(patient, proxy)
    group_commit = bucket.bucket.group_commit
    assert group_commit is not None
    let_go, tasks = await put_behind_a_held_slot(bucket, proxy, 20, answer=403)
    await asyncio.to_thread(until_true, lambda: group_commit._lanes._is_wanted)
    let_go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, WALError) for result in results)
    await asyncio.wait_for(bucket.flush(), 60)
    await bucket.put({"n": 7})
    assert await numbers(bucket) == [-1, 7]
    await bucket.close()


async def test_owner_that_dies_with_an_object_under_way_leaves_what_it_acknowledged(
    patient: ObjectStore, proxy: FaultProxy, store: ObjectStore
) -> None:
    log = new_store_owner_log(patient, 1, **OPTIONS)
    place: Any = patient.address / "bucket_0"
    bucket = PersistingBackend(0, place, owner_log=log, **OPTIONS)
    await bucket.put({"n": -1})
    proxy.reset_counts()
    let_go, tasks = await put_behind_a_held_slot(bucket, proxy, ENOUGH)
    await two_slots(proxy)
    log._lease.stop()
    _, again = await asyncio.to_thread(opened, store)
    assert await numbers(again) == [-1]
    let_go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, OwnershipLost) for result in results)
    await again.put({"n": 7})
    assert await numbers(again) == [-1, 7]
    await again.close()
    await bucket.close()


# Several topics in one process


async def test_writers_of_many_topics_never_wait_for_requests_queued_after_theirs(
    server: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put arrives in each of as many topics as there are threads while its group is begun."""
    topics = 2
    for pool in ("_requests", "_groups"):
        monkeypatch.setattr(loop_bridge, pool, loop_bridge.WorkerPool(topics, pool), raising=False)
    options = StorageOptions(server.options())
    stores = [open_store(parse(url(f"{prefix}-{n}")), options) for n in range(topics)]
    logs = [new_store_owner_log(store, 1, **OPTIONS) for store in stores]
    backends = [
        PersistingBackend(0, store.address / "bucket_0", owner_log=log, **OPTIONS)  # type: ignore[arg-type]
        for store, log in zip(stores, logs, strict=True)
    ]
    loop, arrived = asyncio.get_running_loop(), threading.Barrier(topics)
    second: list[Future[None]] = []
    add, seen = lanes.Lanes.add, set[int]()

    def add_while_another_put_arrives(self: lanes.Lanes, lane: lanes.Lane, queued: int) -> None:
        add(self, lane, queued)
        if id(self) in seen:
            return
        seen.add(id(self))
        arrived.wait(60)
        (backend,) = [b for b in backends if b.bucket.group_commit._lanes is self]  # type: ignore[union-attr]
        second.append(asyncio.run_coroutine_threadsafe(backend.put({"n": 1}), loop))
        until_true(lambda: backend.bucket.group_commit._queue)  # type: ignore[union-attr]

    monkeypatch.setattr(lanes.Lanes, "add", add_while_another_put_arrives)
    first = asyncio.gather(*(backend.put({"n": 0}) for backend in backends))
    await asyncio.wait_for(first, 60)
    await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, second)), 60)
    for backend in backends:
        assert [row["n"] for row in await backend.get()] == [0, 1]
        await backend.close()


def test_heartbeats_continue_while_other_stores_do_not_answer(
    store: ObjectStore, patient: ObjectStore, proxy: FaultProxy
) -> None:
    answered = threading.Event()
    proxy.add("PUT-if-match", also="lease", until=answered)

    def beating(at: ObjectStore) -> Lease:
        lease = Lease(at, new_log_name(), 0.3)
        lease.start(ObjectLog(at, lease).beat)
        return lease

    def beats(lease: Lease) -> int:
        held = lease_register(store, lease.name).read()
        assert held is not None
        return held.content.beat

    silent = [beating(patient) for _ in range(40)]
    leases = silent
    try:
        until_true(lambda: loop_bridge._heartbeats._busy >= len(silent))
        alive = beating(store)
        leases = [*silent, alive]
        until_true(lambda: beats(alive) > 3)
    finally:
        for lease in leases:
            lease.stop()
        answered.set()
