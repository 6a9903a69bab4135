"""What a work group promises, wherever its keeper is."""

from __future__ import annotations

import asyncio
import datetime as dt
import time

import pytest

from persisting.errors import InvalidArgument, LeaseLost
from persisting.queue import read_queue
from support.waiting import until
from support.work_places import WorkPlace


def numbers(deliveries: list) -> list[int]:
    return sorted(delivery.record["id"] for delivery in deliveries)


class WorkContract:
    """Tests of one place; subclasses provide the fixture ``place``."""

    async def test_every_record_is_delivered_to_one_member(self, place: WorkPlace) -> None:
        await place.writer(40)
        first, second = await place.member(), await place.member()
        got = await first.fetch(25) + await second.fetch(25)
        assert numbers(got) == list(range(40))
        assert await first.fetch(1) == []

    async def test_acknowledged_records_are_not_delivered_again(self, place: WorkPlace) -> None:
        await place.writer(10)
        member = await place.member(lease=0.1)
        deliveries = await member.fetch(10)
        await deliveries[0].ack()
        await member.ack(deliveries[1:4])
        await asyncio.sleep(0.2)
        again = await member.fetch(10)
        assert numbers(again) == numbers(deliveries[4:])
        assert {delivery.attempt for delivery in again} == {2}

    async def test_a_delivery_says_when_and_how_many_times_it_was_delivered(
        self, place: WorkPlace
    ) -> None:
        await place.writer(1)
        member = await place.member(lease=5.0)
        (delivery,) = await member.fetch(1)
        now = dt.datetime.now(dt.timezone.utc)
        assert delivery.attempt == 1
        assert abs(now - delivery.first_delivery) < dt.timedelta(seconds=60)
        assert delivery.first_delivery == delivery.last_delivery
        assert delivery.lease_end - delivery.last_delivery == dt.timedelta(seconds=5)
        await delivery.release()
        (again,) = await member.fetch(1, wait=True, timeout=60)
        assert (again.bucket, again.offset, again.attempt) == (delivery.bucket, delivery.offset, 2)
        assert again.first_delivery == delivery.first_delivery
        assert again.last_delivery > delivery.last_delivery

    async def test_a_released_record_comes_back_after_its_delay(self, place: WorkPlace) -> None:
        await place.writer(1)
        member = await place.member()
        (delivery,) = await member.fetch(1)
        began = time.monotonic()
        await delivery.release(delay=0.4)
        # Without waiting it comes immediately only if the machine has stopped for that long.
        again = await member.fetch(1) or await member.fetch(1, wait=True, timeout=60)
        assert len(again) == 1
        assert time.monotonic() - began >= 0.39

    async def test_a_member_whose_record_was_delivered_again_cannot_acknowledge_it(
        self, place: WorkPlace
    ) -> None:
        await place.writer(1)
        slow, quick = await place.member(lease=0.1), await place.member(lease=30.0)
        (paused,) = await slow.fetch(1)
        (current,) = await quick.fetch(1, wait=True, timeout=60)
        with pytest.raises(LeaseLost, match="delivered again or is finished"):
            await paused.ack()
        with pytest.raises(LeaseLost):
            await paused.extend()
        with pytest.raises(LeaseLost):
            await paused.reject("late")
        await current.ack()
        with pytest.raises(LeaseLost):
            await paused.ack()

    async def test_an_expired_lease_that_was_not_taken_can_be_acknowledged(
        self, place: WorkPlace
    ) -> None:
        await place.writer(1)
        member = await place.member(lease=0.1)
        (delivery,) = await member.fetch(1)
        await asyncio.sleep(0.2)
        await delivery.ack()
        await delivery.ack()  # repeated, as after a lost answer
        assert await member.fetch(1) == []

    async def test_an_extended_lease_keeps_the_record(self, place: WorkPlace) -> None:
        await place.writer(1)
        member = await place.member(lease=0.3)
        (delivery,) = await member.fetch(1)
        await delivery.extend(30.0)
        await asyncio.sleep(0.5)
        assert await member.fetch(1) == []
        assert delivery.seconds_left > 20
        await delivery.ack()

    async def test_a_rejected_record_is_readable_in_the_dead_letters(
        self, place: WorkPlace
    ) -> None:
        await place.writer(2)
        member = await place.member()
        first, second = await member.fetch(2)
        await first.reject("it is broken")
        dead = await read_queue(place.system, topic=f"{place.topic}.dead", **place.where)
        (letter,) = await dead.get()
        await dead.close()
        assert letter["id"] == first.record["id"]
        origin = letter["dead_letter"]
        assert (origin["topic"], origin["group"]) == (place.topic, "solvers")
        assert (origin["bucket"], origin["offset"]) == (first.bucket, first.offset)
        assert (origin["reason"], origin["attempts"]) == ("it is broken", 1)
        await second.ack()
        stats = await member.stats()
        assert (stats["dead"], stats["unacknowledged"]) == (1, 0)

    async def test_a_record_that_fails_too_often_goes_to_the_dead_letters(
        self, place: WorkPlace
    ) -> None:
        await place.writer(1)
        member = await place.member(lease=0.05, max_deliveries=2)
        for attempt in (1, 2):
            (delivery,) = await member.fetch(1, wait=True, timeout=60)
            assert delivery.attempt == attempt
        assert await member.fetch(1, wait=True, timeout=0.5) == []
        await until(lambda: _has_letters(member, 1))
        (letter,) = await member.dead_letters()
        assert letter["dead_letter"]["attempts"] == 2
        assert "delivered 2 times" in letter["dead_letter"]["reason"]

    async def test_dead_letters_are_redriven_once_and_carry_their_history(
        self, place: WorkPlace
    ) -> None:
        await place.writer(6)
        member = await place.member()
        for delivery in await member.fetch(6):
            await delivery.reject(f"reason {delivery.record['id']}")
        assert await member.redrive(dry_run=True) == 6
        assert await member.redrive("id < 2") == 2
        letters = await member.dead_letters()
        chosen = next(letter for letter in letters if letter["id"] == 5)
        assert await member.redrive(numbers=[chosen["dead_letter"]["number"]]) == 1
        again = await member.fetch(6)
        assert numbers(again) == [0, 1, 5]
        assert {delivery.attempt for delivery in again} == {1}
        assert all(f"reason {d.record['id']}" in d.history for d in again)
        await again[0].reject("a second time")
        await member.ack(again[1:])
        (twice,) = [d for d in await member.dead_letters() if d["id"] == again[0].record["id"]]
        assert twice["dead_letter"]["history"].count("\n") == 1
        assert await member.redrive() == 4
        assert await member.redrive() == 0
        assert len(await member.fetch(10)) == 4

    async def test_groups_do_not_see_each_other(self, place: WorkPlace) -> None:
        await place.writer(3)
        first, second = await place.member("one"), await place.member("two")
        for delivery in await first.fetch(3):
            await delivery.ack()
        assert len(await second.fetch(3)) == 3

    async def test_waiting_members_get_new_records(self, place: WorkPlace) -> None:
        writer = await place.writer()
        member = await place.member()
        waiting = asyncio.create_task(member.fetch(5, wait=True, timeout=60))
        await asyncio.sleep(0.1)
        await writer.put({"id": 7})
        assert numbers(await waiting) == [7]

    async def test_a_fetch_without_waiting_gets_what_was_put_before(self, place: WorkPlace) -> None:
        writer = await place.writer()
        member = await place.member()
        for number in range(10):
            await writer.put({"id": number})
            assert numbers(await member.fetch(5)) == [number]
        await writer.put({"id": 10})
        seen: list[dict] = []
        assert await member.run(seen.append, wait=False) == 1
        assert seen == [{"id": 10}]

    async def test_a_cancelled_fetch_keeps_no_record(self, place: WorkPlace) -> None:
        writer = await place.writer()
        member = await place.member(lease=60.0)
        got = []
        for number in range(30):
            waiting = asyncio.create_task(member.fetch(1, wait=True))
            await asyncio.sleep(0.0003 * number)
            put = asyncio.create_task(writer.put({"id": number}))
            await asyncio.sleep(0.0002 * (number % 7))
            waiting.cancel()
            (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
            got += outcome if isinstance(outcome, list) else []
            await put
        while len(got) < 30:
            more = await member.fetch(30, wait=True, timeout=60)
            assert more, f"{30 - len(got)} records stay leased although no member has them"
            got += more
        assert numbers(got) == list(range(30))
        assert {delivery.attempt for delivery in got} == {1}

    async def test_closing_a_stream_returns_what_was_prefetched(self, place: WorkPlace) -> None:
        await place.writer(6)
        member = await place.member(lease=60.0)
        stream = member.deliveries(prefetch=4)
        first = await anext(stream)
        await stream.aclose()
        rest = await member.fetch(6)
        assert len(rest) == 5
        assert {delivery.attempt for delivery in rest} == {1}
        assert first.offset not in [d.offset for d in rest if d.bucket == first.bucket]

    async def test_run_retries_with_a_pause_and_gives_up_in_the_end(self, place: WorkPlace) -> None:
        await place.writer(12)
        member = await place.member(max_deliveries=3)
        attempts: dict[int, int] = {}

        async def handle(record: dict) -> None:
            attempts[record["id"]] = attempts.get(record["id"], 0) + 1
            if record["id"] == 3:
                raise ValueError("always")
            if record["id"] == 4 and attempts[4] < 3:
                raise KeyError("twice")

        running = asyncio.create_task(member.run(handle, concurrency=4, backoff=0.05))
        await until(lambda: _is_done(member))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert attempts == {n: 3 if n in (3, 4) else 1 for n in range(12)}
        (letter,) = await member.dead_letters()
        assert (letter["id"], letter["dead_letter"]["reason"]) == (3, "ValueError: always")

    async def test_run_renews_the_leases_of_long_handlers(self, place: WorkPlace) -> None:
        await place.writer(2)
        for number, lease in enumerate((0.3, 1.0, 3.0, 10.0)):
            member = await place.member(f"group-{number}", lease=lease)
            calls: list[int] = []

            async def handle(record: dict, calls=calls, lease=lease) -> None:
                calls.append(record["id"])
                await asyncio.sleep(3 * lease)

            finished = await member.run(handle, concurrency=4, wait=False)
            if (finished, sorted(calls)) == (2, [0, 1]):
                return
        # A machine that stops may come too late to renew a short lease, but not all of them.
        pytest.fail(f"{finished} records were finished, by the calls {calls}")

    async def test_handlers_without_a_coroutine_run_in_threads(self, place: WorkPlace) -> None:
        await place.writer(4)
        member = await place.member()
        seen: list[int] = []
        assert await member.run(lambda r: seen.append(r["id"]), concurrency=2, wait=False) == 4
        assert sorted(seen) == [0, 1, 2, 3]

    async def test_the_settings_of_a_group_are_shared(self, place: WorkPlace) -> None:
        await place.writer(1, num_buckets=1)
        first = await place.member(max_deliveries=7, priority="urgency")
        second = await place.member()
        assert (first.max_deliveries, second.max_deliveries) == (7, 7)
        with pytest.raises(InvalidArgument, match="fixed when the group is created"):
            await place.member(priority="other")

    async def test_records_of_one_key_are_delivered_one_after_the_other(
        self, place: WorkPlace
    ) -> None:
        writer = await place.writer(bucket_column="key")
        await writer.put([{"key": key, "id": n} for n in range(3) for key in "ab"])
        member = await place.member(ordered_by="key")
        first = await member.fetch(10, wait=True, timeout=60)
        while len(first) < 2:
            first += await member.fetch(10, wait=True, timeout=60)
        assert sorted((d.record["key"], d.record["id"]) for d in first) == [("a", 0), ("b", 0)]
        assert await member.fetch(10) == []
        (a,) = [d for d in first if d.record["key"] == "a"]
        await a.ack()
        (following,) = await member.fetch(10, wait=True, timeout=60)
        assert (following.record["key"], following.record["id"]) == ("a", 1)

    async def test_higher_priorities_are_delivered_first(self, place: WorkPlace) -> None:
        writer = await place.writer()
        await writer.put([{"id": n, "urgency": n % 5} for n in range(20)])
        member = await place.member(priority="urgency")
        await until(lambda: _has_open(member, 20))
        got = await member.fetch(8)
        assert [d.record["urgency"] for d in got] == [4, 4, 4, 4, 3, 3, 3, 3]

    async def test_records_are_not_delivered_before_their_time(self, place: WorkPlace) -> None:
        writer = await place.writer()
        member = await place.member(visible_at="at")
        soon = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=1.5)
        await writer.put([{"id": 0, "at": None}, {"id": 1, "at": soon}])
        got = await member.fetch(2, wait=True, timeout=60)
        if len(got) == 1:  # a slow machine may get here too late
            assert numbers(got) == [0]
            got += await member.fetch(2, wait=True, timeout=60)
        assert numbers(got) == [0, 1]
        assert dt.datetime.now(dt.timezone.utc) >= soon - dt.timedelta(seconds=0.1)

    async def test_a_delayed_put_is_delivered_later_and_the_record_does_not_show_it(
        self, place: WorkPlace
    ) -> None:
        writer = await place.writer(num_buckets=1)
        member = await place.member()
        began = time.time()
        await writer.put({"id": 0}, delay=1.5)
        await writer.put([{"id": 1}, {"id": 2}], delay=600.0)
        await writer.put({"id": 3})
        got: list = []
        while 0 not in numbers(got):  # the others may come before it, or on a slow machine with it
            got += await member.fetch(4, wait=True, timeout=20)
        assert time.time() - began >= 1.5
        while len(got) < 2:
            got += await member.fetch(4, wait=True, timeout=20)
        assert numbers(got) == [0, 3]
        (late,) = (delivery for delivery in got if delivery.offset == 0)
        assert (late.record, late.attempt) == ({"id": 0}, 1)
        assert await member.fetch(4) == []
        assert (await member.stats())["unacknowledged"] == 4
        plain = await read_queue(place.system, topic=place.topic, **place.where)
        assert [record["id"] for record in await plain.get(None)] == [0, 1, 2, 3]
        await plain.close()

    async def test_delays_count_in_groups_that_read_ahead(self, place: WorkPlace) -> None:
        writer = await place.writer(num_buckets=1)
        await writer.put({"id": 0, "urgency": 9}, delay=600.0)
        await writer.put({"id": 1, "urgency": 1})
        member = await place.member(priority="urgency")
        (first,) = await member.fetch(2, wait=True, timeout=60)
        assert first.record["id"] == 1
        assert await member.fetch(2) == []

    async def test_a_group_of_offsets_cannot_be_read_as_a_work_group(
        self, place: WorkPlace
    ) -> None:
        await place.writer(1)
        await place.member("work")
        where = {"topic": place.topic, **place.where}
        with pytest.raises(InvalidArgument, match="is a work group"):
            await read_queue(place.system, **where, group="work")
        reader = await read_queue(place.system, **where, group="plain")
        await reader.get()
        await reader.commit()
        await reader.close()
        with pytest.raises(InvalidArgument, match="reads by offset"):
            await read_queue(place.system, **where, group="plain", mode="work")

    async def test_a_group_whose_deliveries_fail_slows_down_and_recovers(
        self, place: WorkPlace
    ) -> None:
        await place.writer(60)
        member = await place.member(max_deliveries=100)
        await member.give_back(await member.fetch(25), 600.0, failed=True)
        assert (await member.stats())["breaker"] == "open"
        (probe,) = await member.fetch(10, wait=True, timeout=60)
        assert len(await member.fetch(10)) <= 1  # another one after a pause
        await probe.ack()
        assert (await member.stats())["breaker"] == "closed"
        assert len(await member.fetch(10)) == 10
        assert (await member.stats())["dead"] == 0

    async def test_stats_count_what_is_in_flight(self, place: WorkPlace) -> None:
        await place.writer(10)
        member = await place.member()
        deliveries = await member.fetch(4)
        await deliveries[0].release(delay=30)
        stats = await member.stats()
        assert (stats["in_flight"], stats["retrying"], stats["unacknowledged"]) == (3, 1, 10)
        assert stats["oldest_unacknowledged_seconds"] >= 0
        assert await member.release_all() == 3
        assert len(await member.fetch(10)) == 9


async def _has_letters(member, count: int) -> bool:
    return len(await member.dead_letters()) == count


async def _has_open(member, count: int) -> bool:
    stats = await member.stats()
    return sum(bucket["open"] for bucket in stats["buckets"].values()) == count


async def _is_done(member) -> bool:
    return (await member.stats())["unacknowledged"] == 0
