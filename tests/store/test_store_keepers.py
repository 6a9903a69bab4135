"""Keepers of work groups in an object store: paused, replaced, too late, or without their store."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import Any

import pytest
from support.fault_proxy import FaultProxy
from support.object_stores import SeaweedFS, url
from support.store_places import topic_store
from support.waiting import until_true
from support.work_places import KeeperProcess, OtherProcess, WorkPlace

from persisting.bucket import store_groups
from persisting.bucket.store_groups import keeper_register, read_committed
from persisting.errors import BucketLocked, InvalidArgument, StorageError, WALError
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import ObjectStore
from persisting.topic import store_group_admin
from persisting.topic.spec import TopicConfig
from persisting.wal import lease, sealing
from persisting.wal.slots import slots_prefix
from persisting.work import clock, store_group
from persisting.work.group_storage import KeptElsewhere
from persisting.work.keeper import Keeper, KeeperEnded
from persisting.work.store_group import StoreGroup

LEASE = 0.8
CONFIG = TopicConfig(topic="t", num_buckets=2, bucket_column="id", backend="persisting")


def kept(store: ObjectStore, lease: float = LEASE) -> Keeper:
    """Keep a group of two buckets, as another process would."""
    keeper = Keeper(StoreGroup(store, "g", 2, lease))
    keeper.set_span(0, 0, 1000)
    return keeper


def pause(keeper: Keeper) -> None:
    """Stop sending heartbeats, as a stopped process does."""
    group_of(keeper)._log._lease.stop()


def group_of(keeper: Keeper) -> StoreGroup:
    assert isinstance(keeper._storage, StoreGroup)
    return keeper._storage


def taken_over(store: ObjectStore, lease: float = LEASE) -> Keeper:
    """Keep the group as soon as the lease of its keeper has ended."""
    keepers: list[Keeper] = []

    def is_free() -> bool:
        with suppress(KeptElsewhere):
            keepers.append(kept(store, lease))
        return bool(keepers)

    until_true(is_free)
    return keepers[0]


async def claimed(keeper: Keeper, count: int, lease: float = 600.0) -> list[tuple[int, int, int]]:
    leases, _ = await keeper.claim("m", count, lease, 0.0)
    return [(lease.bucket, lease.offset, lease.token) for lease in leases]


async def test_living_keeper_is_not_replaced(store: ObjectStore, long_lease: float) -> None:
    keeper = kept(store, long_lease)
    for _ in range(3):
        with pytest.raises(
            KeptElsewhere, match=r"work group 'g' of s3://.* is kept by process \d+ on"
        ):
            kept(store, long_lease)
    assert len(await claimed(keeper, 2)) == 2
    keeper.close()


async def test_keeper_continues_immediately_after_one_that_was_closed(store: ObjectStore) -> None:
    keeper = kept(store, 3600.0)
    first, second = await claimed(keeper, 2)
    assert await keeper.ack([first]) == []
    keeper.close()
    following = kept(store, 3600.0)
    assert (await following.stats())["acknowledged"] == 1
    assert await claimed(following, 5) == [(0, n, token) for n, token in _offsets(following, 2, 5)]
    assert await following.ack([second]) == []  # leases outlive their keeper
    following.close()


def _offsets(keeper: Keeper, first: int, count: int) -> list[tuple[int, int]]:
    records = keeper.state.bucket(0).records
    return [(n, records.token[records.find(n)]) for n in range(first, first + count)]  # type: ignore[index]


async def test_paused_keeper_that_was_replaced_stores_nothing(store: ObjectStore) -> None:
    paused = kept(store)
    first, second, third = await claimed(paused, 3)
    assert await paused.ack([first]) == []
    pause(paused)
    following = taken_over(store)
    with pytest.raises(KeeperEnded, match="another process keeps work group 'g' now"):
        await paused.ack([second])
    with pytest.raises(KeeperEnded):
        await paused.claim("m", 1, 600.0, 0.0)
    with pytest.raises(StorageError, match="has just taken over work group 'g'"):
        group_of(paused).write_floor(0, 500, 0)
    paused.close()
    assert (await following.stats())["acknowledged"] == 1
    assert await following.ack([second, third]) == []
    following.write_floors()
    assert read_committed(store, "g", 0).offset == 3
    following.close()


async def test_floor_that_arrives_late_is_refused(store: ObjectStore) -> None:
    """It would let retention remove records that the next keeper delivers again."""
    paused = kept(store)
    leases = await claimed(paused, 3)
    await paused.ack(leases)
    pause(paused)
    following = taken_over(store)
    with pytest.raises(StorageError):
        group_of(paused).write_floor(0, 3, 0)
    assert read_committed(store, "g", 0).offset == 0
    following.close()
    paused.close()


async def test_one_of_many_concurrent_take_overs_keeps_the_group(store: ObjectStore) -> None:
    keeper = kept(store)
    leases = await claimed(keeper, 4)
    await keeper.ack(leases[:2])
    keeper.close()

    def attempt() -> Keeper | None:
        try:
            return kept(store, 3600.0)
        except KeptElsewhere:
            return None

    tried = await asyncio.gather(*(asyncio.to_thread(attempt) for _ in range(6)))
    (winner,) = [one for one in tried if one is not None]
    assert (await winner.stats())["acknowledged"] == 2
    assert await winner.ack(leases[2:]) == []
    named = keeper_register(store, "g").read()
    assert named is not None
    assert named.content.owner == group_of(winner)._log.name
    winner.close()


async def test_journal_is_written_whole_periodically_and_old_slots_are_deleted(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_group, "_SNAPSHOT_WRITES", 8)
    keeper = kept(store, 3600.0)
    for _ in range(20):
        await keeper.ack(await claimed(keeper, 1))
    journal = group_of(keeper)._log
    journal.beat()
    journal.delete_released()
    assert len(store.list(slots_prefix(journal.name))) <= 9
    seen = store_group.read_state(store, "g")
    assert (seen.operations, seen.counts) == (keeper.state.operations, keeper.state.counts)
    keeper.close()
    following = kept(store, 3600.0)
    assert (await following.stats())["acknowledged"] == 20
    assert [offset for _, offset, _ in await claimed(following, 3)] == [20, 21, 22]
    following.close()


async def test_lost_answers_of_the_store_change_nothing(
    store: ObjectStore, patient: ObjectStore, proxy: FaultProxy
) -> None:
    keeper = kept(patient, 3600.0)
    proxy.add("PUT", lose=True, share=0.4)
    leases = []
    for _ in range(10):
        leases += await claimed(keeper, 3)
        await keeper.ack(leases[-3:-1])
    proxy.heal()
    assert len({offset for _, offset, _ in leases}) == 30
    keeper.close()
    following = kept(store, 3600.0)
    assert (await following.stats())["acknowledged"] == 20
    assert (await following.stats())["in_flight"] == 10
    following.close()


async def test_keeper_that_cannot_reach_the_store_ends_and_the_next_one_continues(
    faulty: ObjectStore, proxy: FaultProxy
) -> None:
    keeper = kept(faulty)
    first, second = await claimed(keeper, 2)
    await keeper.ack([first])
    proxy.add("PUT", also="/slots/", answer=503)
    with pytest.raises(WALError, match="503"):
        await keeper.ack([second])
    with pytest.raises(WALError):
        await keeper.claim("m", 1, 600.0, 0.0)
    proxy.heal()
    keeper.close()
    following = taken_over(faulty)
    assert (await following.stats())["acknowledged"] == 1
    assert await following.ack([second]) == []
    following.close()


async def test_leases_continue_by_the_clock_of_the_next_keeper(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock may be hours ahead of that of the machine before."""
    keeper = kept(store, 3600.0)
    (leased,) = await claimed(keeper, 1, lease=30.0)
    keeper.close()
    ahead = time.time_ns() + 7200 * 10**9
    monkeypatch.setattr(clock.time, "time_ns", lambda: ahead)
    following = kept(store, 3600.0)
    assert (await following.stats())["in_flight"] == 1
    assert [offset for _, offset, _ in await claimed(following, 1)] == [1]
    assert await following.ack([leased]) == []
    following.close()


async def test_requests_of_a_keeper_are_those_of_the_price_table(
    patient: ObjectStore, proxy: FaultProxy
) -> None:
    def requests() -> dict[str, int]:
        counted = dict(proxy.counts)
        proxy.reset_counts()
        return counted

    def keep() -> Keeper:
        keeper = Keeper(StoreGroup(patient, "g", 4, 3600.0))
        pause(keeper)
        for bucket in range(4):
            keeper.set_span(bucket, 0, 1000)
        return keeper

    keeper = keep()
    assert requests() == {"GET": 6, "PUT-if-absent": 7, "PUT-if-match": 1}
    leases = await claimed(keeper, 3)
    assert requests() == {"PUT-if-absent": 1}
    await keeper.ack(leases)
    assert requests() == {"PUT-if-absent": 1}
    keeper.write_status()
    keeper.write_floors()
    requests()
    for _ in range(5):  # nothing has changed
        keeper.write_status()
        keeper.write_floors()
    assert requests() == {}
    keeper.close()
    assert requests() == {"PUT-if-match": 1}
    following = keep()
    assert requests() == {
        "GET": 11,
        "PUT-if-absent": 2,
        "PUT-if-match": 6,
        "LIST": 2,
        "DELETE": 1,
    }
    following.close()


async def test_a_group_that_is_deleted_while_a_keeper_starts_has_one_keeper(
    store: ObjectStore, long_lease: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kept(store, long_lease)
    await first.ack(await claimed(first, 3))
    first.close()
    started: list[Keeper] = []
    seal = sealing.seal

    def seal_slowly(*given: Any) -> Any:
        sealed = seal(*given)
        if not started:
            started.append(kept(store, long_lease))
        return sealed

    monkeypatch.setattr(sealing, "seal", seal_slowly)
    monkeypatch.setattr(lease, "_ended", set())
    with pytest.raises(BucketLocked, match="work group 'g' is being read"):
        await asyncio.to_thread(store_group_admin.delete, store, CONFIG, "g")
    assert (await started[0].stats())["acknowledged"] == 3
    started[0].close()
    monkeypatch.undo()
    store_group_admin.delete(store, CONFIG, "g")
    assert store_groups.groups_in(store) == {}
    again = kept(store, long_lease)
    assert [offset for _, offset, _ in await claimed(again, 1)] == [0]
    again.close()


async def test_leases_do_not_grow_with_take_overs(store: ObjectStore) -> None:
    keeper = kept(store, 3600.0)
    (leased,) = await claimed(keeper, 1, lease=2.0)
    for _ in range(4):
        await asyncio.sleep(0.3)
        await keeper.extend([leased], 2.0)
        keeper.close()
        keeper = kept(store, 3600.0)
        records = keeper.state.bucket(0).records
        assert records.due[0] - keeper.clock.now() <= 2.0 * 1e6
    keeper.close()


async def test_journal_is_read_whole_while_another_process_takes_it_over(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = kept(store, 3600.0)
    await keeper.ack(await claimed(keeper, 3))
    keeper.close()
    present, started = sealing.present_slots, []

    def take_over_first(*given: Any) -> Any:
        if not started:
            started.append(None)
            started[0] = kept(store, 3600.0)
        return present(*given)

    monkeypatch.setattr(sealing, "present_slots", take_over_first)
    assert store_group.read_state(store, "g").counts.acknowledged == 3
    started[0].close()


async def test_floors_of_a_keeper_that_was_paused_while_it_started_do_not_count(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, following = StoreGroup._fence_floors, []

    def fence_late(self: StoreGroup, num_buckets: int) -> Any:
        if not following:
            following.append(None)
            self._lease.stop()
            following[0] = taken_over(store)
        return fence(self, num_buckets)

    monkeypatch.setattr(StoreGroup, "_fence_floors", fence_late)
    with pytest.raises(KeptElsewhere):
        kept(store)
    (keeper,) = following
    await keeper.ack(await claimed(keeper, 2))
    keeper.write_floors()
    assert read_committed(store, "g", 0).offset == 2
    keeper.close()


async def test_objects_do_not_grow_with_the_times_a_group_is_opened(store: ObjectStore) -> None:
    def objects() -> int:
        return len(store.list(""))

    kept(store, 3600.0).close()
    kept(store, 3600.0).close()
    before = objects()
    for _ in range(5):
        keeper = kept(store, 3600.0)
        await keeper.ack(await claimed(keeper, 1))
        keeper.close()
    assert objects() <= before + 2


async def test_groups_that_two_processes_keep_write_their_dead_letters_in_turns(
    server: SeaweedFS, prefix: str, keepers: KeeperProcess
) -> None:
    place = OtherProcess(url(prefix), keepers, storage_options=server.options())
    await place.writer(4, num_buckets=1)
    there = await place.member("there")
    here = await WorkPlace.member(place, "here")
    for member in (there, here, there, here):
        (delivery,) = await member.fetch(1)
        await delivery.reject("no way")
    assert len(await here.dead_letters()) == len(await there.dead_letters()) == 2
    await place.close()


async def test_group_of_offsets_and_work_group_are_told_apart(where: dict[str, Any]) -> None:
    async with await write_queue(**where, durable=True) as writer:
        await writer.put([{"id": n} for n in range(4)])
        async with await read_queue(**where, group="work", mode="work") as member:
            assert len(await member.fetch(4)) == 4
            with pytest.raises(InvalidArgument, match="'work' is a work group: read it with mode"):
                await read_queue(**where, group="work")


async def test_retention_keeps_what_a_work_group_has_not_acknowledged(
    where: dict[str, Any],
) -> None:
    async with await write_queue(**where, durable=True, num_buckets=1) as writer:
        for first in (0, 10, 20):
            await writer.put([{"id": n} for n in range(first, first + 10)])
            await writer.flush()
        async with await read_queue(**where, group="solvers", mode="work") as member:
            deliveries = await member.fetch(30)
            await member.ack(deliveries[:15])
        kept_rows = await writer.retain(rows=0)
        assert kept_rows["dropped"] == 10
        async with await read_queue(**where, group="solvers", mode="work") as member:
            assert (await member.stats())["unacknowledged"] == 15


async def test_retention_that_may_drop_what_is_not_acknowledged_drops_it_in_a_store(
    where: dict[str, Any],
) -> None:
    options = {"retention_drops_unacknowledged": True, "compaction": False}
    async with await write_queue(
        **where, durable=True, num_buckets=1, backend_options=options
    ) as writer:
        for first in (0, 10, 20):
            await writer.put([{"id": n} for n in range(first, first + 10)])
            await writer.flush()
        async with await read_queue(**where, group="solvers", mode="work") as member:
            await member.ack(await member.fetch(15))
        assert (await writer.retain(rows=10))["dropped"] == 20
        async with await read_queue(**where, group="solvers", mode="work") as member:
            rest = await member.fetch(30, wait=True, timeout=60)
            assert [delivery.record["id"] for delivery in rest] == list(range(20, 30))
            await member.ack(rest)
            assert (await member.stats())["unacknowledged"] == 0


async def test_keeper_on_another_machine_is_named(
    where: dict[str, Any], long_lease: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"enable_wal": True, "lease": long_lease}
    async with await write_queue(
        **where, backend="persisting", backend_options=options, num_buckets=2
    ) as writer:
        await writer.put({"id": 1})
        store = topic_store(where)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(socket, "gethostname", lambda: "far-away")
            keeper = kept(store, long_lease)
        monkeypatch.setattr(lease, "_held_here", {})
        with pytest.raises(InvalidArgument, match=r"far-away.*read through its cluster"):
            await read_queue(**where, group="g", mode="work")
        keeper.close()
        async with await read_queue(**where, group="g", mode="work") as member:
            assert len(await member.fetch(5)) == 1
