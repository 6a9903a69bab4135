"""Members of a work group: the synchronous form, streams, the breaker, topics without a log."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from support.filesystems import QuickFileSystem
from support.handover import hand_over
from support.waiting import until
from support.work_places import WorkPlace

from persisting.errors import BucketClosed, InvalidArgument, LeaseLost
from persisting.queue import read_queue, write_queue
from persisting.work import feed
from persisting.work.breaker import Breaker
from persisting.work.group_storage import FolderGroup
from persisting.work.group_values import Letter
from persisting.work.keeper import Keeper
from persisting.work.state import GroupState

pytestmark = pytest.mark.asyncio

SECOND = 1_000_000


async def test_synchronous_work_reader_fetches_and_acknowledges(place: WorkPlace) -> None:
    await place.writer(6, num_buckets=1)
    member = await place.member()

    def work() -> list[int]:
        jobs = member.sync()
        first, second, third = jobs.fetch(3)
        assert (first.record, first.attempt) == ({"id": 0}, 1)
        first.ack()
        second.extend(60.0)
        second.reject("broken")
        third.release()
        handled = []
        for delivery in jobs.deliveries(prefetch=2, wait=False):
            handled.append(delivery.record["id"])
            jobs.ack([delivery])
        assert [letter["id"] for letter in jobs.dead_letters()] == [1]
        assert jobs.redrive() == 1
        assert jobs.run(lambda record: handled.append(record["id"]), wait=False) == 1
        with pytest.raises(LeaseLost):
            third.ack()
        return handled

    assert sorted(await asyncio.to_thread(work)) == [1, 2, 3, 4, 5]
    assert (await member.stats())["unacknowledged"] == 0


async def test_a_record_that_comes_after_a_long_wait_has_its_whole_lease(place: WorkPlace) -> None:
    writer = await place.writer(num_buckets=1)
    member = await place.member(lease=2.0)
    stream = member.deliveries()
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(2.5)  # longer than the lease
    await writer.put({"id": 0})
    delivery = await asyncio.wait_for(waiting, 30)
    assert delivery.attempt == 1
    await delivery.ack()
    await stream.aclose()


async def test_acknowledging_many_says_how_many_leases_are_lost(place: WorkPlace) -> None:
    await place.writer(4, num_buckets=1)
    member = await place.member()
    deliveries = await member.fetch(4)
    await deliveries[1].release()
    assert len(await member.fetch(1)) == 1
    with pytest.raises(LeaseLost, match=r"1 of 4 leases are lost, of bucket and offset 0/1"):
        await member.ack(deliveries)
    stats = await member.stats()
    assert (stats["acknowledged"], stats["in_flight"]) == (3, 1)


async def test_the_age_of_the_oldest_record_counts_from_when_it_could_be_delivered(
    place: WorkPlace,
) -> None:
    writer = await place.writer(1, num_buckets=1)
    put = time.time()
    await writer.put({"id": 1}, delay=600.0)
    member = await place.member()

    async def oldest_is_known() -> bool:
        return (await member.stats())["oldest_unacknowledged_seconds"] is not None

    await until(oldest_is_known)  # nothing was delivered
    now = time.time()
    assert (await member.stats())["oldest_unacknowledged_seconds"] >= now - put
    (delivery,) = await member.fetch(2)
    await delivery.ack()
    assert not await oldest_is_known()  # the delay has not ended


async def test_delays_and_redrives_decide_when_a_record_becomes_available() -> None:
    state, span = GroupState(), (0, 3)
    state.bucket(0).delays = [(1, 2, 50)]
    assert state.oldest(0, 10, span) == (0, None)
    first, third = state.claim(10, 3, 1000, "m", {0: span})
    assert state.ack([first[:3]]) == []
    assert state.oldest(0, 10, span) == (2, None)
    state.reject(11, *third[:3], "broken")
    state.next_batch(1)
    state.finish_batch()
    assert state.oldest(0, 49, span) == (None, None)
    assert state.oldest(0, 60, span) == (None, 50)
    state.claim(60, 1, 1000, "m", {0: span})
    assert state.redrive(70, [Letter(1, 0, 0, 2, 0)]) == 1
    replayed = GroupState.load(state.dump())
    assert state.oldest(0, 80, span) == replayed.oldest(0, 80, span) == (None, 50)


async def test_metrics_of_a_group_are_exported_while_a_reader_has_them_enabled(
    place: WorkPlace,
) -> None:
    await place.writer(3, num_buckets=1)
    member = await place.member(enable_metrics=True)
    other = await place.member(enable_metrics=True)
    first, _ = await member.fetch(2)
    await first.ack()
    local = place.kept_here()
    local.keeper.write_status()  # it does so every two seconds
    labels = {"topic": place.topic, "group": "solvers"}

    def values() -> list[float | None]:
        names = ("acknowledged_records_total", "in_flight_records", "unacknowledged_records")
        return [REGISTRY.get_sample_value(f"persisting_work_{name}", labels) for name in names]

    assert values() == [1, 1, 2]
    await member.close()
    assert values() == [1, 1, 2]
    await other.close()
    assert values() == [None, None, None]


async def test_a_blocked_key_does_not_hold_back_keys_that_come_long_after_it(
    place: WorkPlace,
) -> None:
    writer = await place.writer(num_buckets=1)
    await writer.put([{"id": n, "key": "busy"} for n in range(6000)])
    await writer.put({"id": 6000, "key": "other"})
    member = await place.member(ordered_by="key")
    got = await member.fetch(2, wait=True, timeout=60)
    while len(got) < 2:
        more = await member.fetch(2, wait=True, timeout=60)
        assert more, "the other key is blocked as well"
        got += more
    assert [delivery.record["id"] for delivery in got] == [0, 6000]


async def test_equal_numbers_are_one_key_as_int_and_as_float(place: WorkPlace) -> None:
    """An int reads back as a float once its field holds floats."""
    writer = await place.writer(num_buckets=1)
    await writer.put({"id": 0, "key": 1})
    member = await place.member(ordered_by="key")
    (first,) = await member.fetch(9)
    await writer.put([{"id": 1, "key": 2.5}, {"id": 2, "key": 1.0}, {"id": 3, "key": 1}])
    assert [delivery.record["id"] for delivery in await member.fetch(9)] == [1]
    for number in (2, 3):
        await first.ack()
        (first,) = await member.fetch(9)
        assert first.record["id"] == number


async def test_releases_do_not_slow_the_group_down(place: WorkPlace) -> None:
    await place.writer(40, num_buckets=1)
    member = await place.member(max_deliveries=100)
    for _ in range(3):
        for delivery in await member.fetch(40):
            await delivery.release()
    assert (await member.stats())["breaker"] == "closed"
    assert len(await member.fetch(40)) == 40


async def test_expired_leases_slow_the_group_down_unless_it_is_turned_off(place: WorkPlace) -> None:
    await place.writer(60, num_buckets=1)
    member = await place.member(max_deliveries=100, lease=0.05)
    await member.fetch(30)
    await asyncio.sleep(0.1)
    await member.fetch(30)
    assert (await member.stats())["breaker"] == "open"
    calm = await place.member("calm", max_deliveries=100, lease=0.05, breaker=False)
    for _ in range(3):
        await calm.fetch(30)
        await asyncio.sleep(0.1)
    assert (await calm.stats())["breaker"] == "closed"
    assert len(await calm.fetch(60)) == 60


async def test_only_failed_probes_lengthen_the_pause() -> None:
    breaker, now = Breaker(), 0
    for _ in range(40):
        breaker.outcome(now, failed=True)
    assert breaker.is_open
    assert breaker.retry_at() == SECOND
    assert breaker.allowed(now, 10) == 0
    now = SECOND
    assert breaker.allowed(now, 10) == 1
    assert breaker.allowed(now, 10) == 0
    breaker.outcome(now, failed=True)
    assert breaker.retry_at() == now + 2 * SECOND
    now += 2 * SECOND
    assert breaker.allowed(now, 10) == 1
    breaker.outcome(now, failed=False)
    assert not breaker.is_open
    assert breaker.allowed(now, 10) == 10


async def test_breaker_keeps_no_more_than_an_entry_for_each_second_of_its_window() -> None:
    breaker = Breaker()
    breaker.outcome(0, failed=True)
    for now in range(0, 200 * SECOND, SECOND // 50):
        breaker.outcome(now, failed=now % (10 * SECOND) == 0, count=3)
        assert len(breaker._outcomes) <= 62
    assert not breaker.is_open


async def test_breaker_forgets_outcomes_after_its_window() -> None:
    breaker = Breaker()
    breaker.outcome(0, failed=True, count=19)
    assert not breaker.is_open
    breaker.outcome(62 * SECOND, failed=True, count=19)
    assert not breaker.is_open
    breaker.outcome(62 * SECOND, failed=True)
    assert breaker.is_open


@pytest.mark.parametrize("backend", ["lance", "persisting"])
async def test_a_topic_without_a_log_delivers_what_is_flushed(
    place: WorkPlace, backend: str
) -> None:
    writer = await write_queue(
        place.topic, storage_path=str(place.folder), backend=backend, num_buckets=1
    )
    await writer.put([{"id": n} for n in range(3)])
    await writer.flush()
    await writer.put({"id": 3})
    member = await place.member()
    got = await member.fetch(10, wait=True, timeout=30)
    assert [delivery.record["id"] for delivery in got] == [0, 1, 2]  # 3 may be lost with a crash
    await member.ack(got)
    await writer.flush()
    (late,) = await member.fetch(10, wait=True, timeout=30)
    assert late.record["id"] == 3
    await late.reject("broken")
    assert await member.redrive() == 1
    await writer.close()


@pytest.mark.filterwarnings("ignore:topic .* had the options")
async def test_a_group_notices_that_its_topic_no_longer_has_a_log(place: WorkPlace) -> None:
    writer = await place.writer(1, num_buckets=1)
    member = await place.member()
    await member.ack(await member.fetch(1))
    await writer.close()
    writer = await place.writer(num_buckets=1, backend_options={"enable_wal": False})
    await writer.put({"id": 1})
    assert await member.fetch(1) == []  # a crash would take it, and its offset is used again
    await writer.flush()
    (delivery,) = await member.fetch(1)
    assert delivery.record["id"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lease": 0}, "lease must be a number of seconds"),
        ({"lease": True}, "lease must be a number of seconds"),
        ({"max_deliveries": 0}, "max_deliveries must be a whole number"),
        ({"priority": ""}, "priority must be the name of a field"),
        ({"breaker": "yes"}, "breaker must be True or False"),
        ({"ordered_by": "key"}, "ordered_by='key' cannot be kept"),
        ({"auto_commit": True}, "mode='work' has no"),
        ({"bucket_id": 0}, "mode='work' has no"),
        ({"group": None}, "needs a group"),
        ({"group": "../up"}, "group"),
    ],
)
async def test_wrong_options_are_refused(place: WorkPlace, given: dict, message: str) -> None:
    await place.writer(1)
    where = {"topic": place.topic, "storage_path": str(place.folder)}
    with pytest.raises(InvalidArgument, match=message):
        await read_queue(**{**where, "group": "g", "mode": "work", **given})
    assert not (place.folder / place.topic / "groups" / "g").exists()


async def test_work_options_without_the_mode_are_refused(place: WorkPlace) -> None:
    await place.writer(1)
    where = {"topic": place.topic, "storage_path": str(place.folder)}
    with pytest.raises(InvalidArgument, match="lease needs mode='work'"):
        await read_queue(**where, group="g", lease=1.0)
    with pytest.raises(InvalidArgument, match="mode must be 'offset' or 'work'"):
        await read_queue(**where, group="g", mode="other")
    memory = await write_queue("memory")
    with pytest.raises(InvalidArgument, match="in memory"):
        await read_queue("memory", group="g", mode="work")
    await memory.close()


async def test_wrong_arguments_of_calls_are_refused(place: WorkPlace) -> None:
    await place.writer(1, num_buckets=1)
    member = await place.member()
    (delivery,) = await member.fetch(1)
    for call in (
        lambda: member.fetch(0),
        lambda: delivery.release(delay=-1),
        lambda: delivery.extend(0),
        lambda: delivery.reject(7),
        lambda: member.run(print, concurrency=0),
        lambda: member.redrive(offsets=[-1]),
        lambda: anext(member.deliveries(prefetch=0)),
    ):
        with pytest.raises(InvalidArgument):
            await call()
    await member.close()
    await member.close()
    with pytest.raises(BucketClosed, match="is closed"):
        await delivery.ack()


async def test_the_death_of_a_member_with_many_leases_does_not_slow_the_group_down(
    tmp_path: Path,
) -> None:
    keeper = Keeper(FolderGroup(tmp_path, "g", QuickFileSystem()))
    keeper.set_span(0, 0, 120)
    for number in range(3):
        await keeper.claim(f"dies-{number}", 40, 0.01, 60.0)
    found: list = []
    while len(found) < 120:  # in small claims, as of workers that fetch one record
        leases, _ = await keeper.claim("lives", 2, 600.0, 60.0)
        assert not keeper.breaker.is_open
        found += leases
    assert sorted(lease.offset for lease in found) == list(range(120))
    keeper.close()


async def test_many_deaths_of_members_slow_the_group_down(tmp_path: Path) -> None:
    keeper = Keeper(FolderGroup(tmp_path, "g", QuickFileSystem()))
    keeper.set_span(0, 0, 40)
    await keeper.configure({"max_deliveries": 1_000})
    for number in range(20):
        leases, _ = await keeper.claim(f"dies-{number}", 40, 0.01, 60.0)
        if keeper.breaker.is_open:
            break
        assert len(leases) == 40
    assert keeper.breaker.is_open
    assert number == 4
    keeper.close()


async def test_a_waiting_member_wakes_for_files_that_are_handed_over_to_its_topic(
    place: WorkPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appended ones, and ones that replace the records."""
    monkeypatch.setattr(feed, "_CHECK_SECONDS", 600.0)  # only a wake helps
    writer = await place.writer(3, num_buckets=1)
    member = await place.member()
    await member.ack(await member.fetch(3))

    async def next_three() -> list[int]:
        got: list[int] = []
        while len(got) < 3:
            deliveries = await member.fetch(3, wait=True)
            got += [delivery.record["id"] for delivery in deliveries]
            await member.ack(deliveries)
        return sorted(got)

    topic = place.folder / place.topic
    for first, overwrite in ((10, False), (20, True)):
        waiting = asyncio.create_task(next_three())
        rows = [{"id": first + number} for number in range(3)]
        handed = asyncio.to_thread(hand_over, topic, rows, f"w{first}", overwrite=overwrite)
        assert await handed == 3
        assert await asyncio.wait_for(waiting, 60) == [first, first + 1, first + 2]
    await writer.put({"id": 30})
    (last,) = await member.fetch(3, wait=True)
    assert last.record == {"id": 30}
