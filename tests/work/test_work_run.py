"""``run``: how handlers end when the reader closes or the call is cancelled, and who decides about
the last attempt."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.waiting import until
from support.work_places import WorkPlace

from persisting.queue import WorkReader

pytestmark = pytest.mark.asyncio


class Handler:
    """A handler that does not return until it is told to."""

    def __init__(self) -> None:
        self.started, self.finish = asyncio.Event(), asyncio.Event()

    async def __call__(self, record: dict) -> None:
        self.started.set()
        await self.finish.wait()


async def _stats(member: WorkReader, *names: str) -> tuple:
    stats = await member.stats()
    return tuple(stats[name] for name in names)


async def test_closing_the_reader_ends_run_and_returns_its_records(place: WorkPlace) -> None:
    await place.writer(3, num_buckets=1)
    member, other = await place.member(lease=600.0), await place.member(lease=600.0)
    handler = Handler()
    running = asyncio.create_task(member.run(handler, concurrency=1))
    await handler.started.wait()
    await member.close()
    assert await running == 0
    assert sorted(d.record["id"] for d in await other.fetch(5)) == [0, 1, 2]


async def test_a_stream_that_ends_while_its_reader_closes_returns_its_records(
    place: WorkPlace,
) -> None:
    await place.writer(4, num_buckets=1)
    member = await place.member(lease=600.0)
    stream = member.deliveries(prefetch=3)
    first = await anext(stream)
    handling, may_end = asyncio.Event(), asyncio.Event()

    async def handler(record: dict) -> None:
        handling.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await may_end.wait()

    run = asyncio.create_task(member.run(handler))
    await handling.wait()
    closing = asyncio.create_task(member.close())
    await asyncio.sleep(0)
    assert member.closing  # and waits for the handler
    await first.ack()
    await stream.aclose()
    may_end.set()
    await asyncio.gather(closing, run)
    again = sorted(await (await place.member()).fetch(9), key=lambda delivery: delivery.offset)
    assert [(delivery.offset, delivery.attempt) for delivery in again] == [(1, 1), (2, 1), (3, 2)]


async def test_a_handler_that_closes_its_reader_is_acknowledged(place: WorkPlace) -> None:
    await place.writer(3, num_buckets=1)
    member, other = await place.member(lease=600.0), await place.member(lease=600.0)

    async def handle(record: dict) -> None:
        await member.close()

    assert await member.run(handle) == 1
    await member.close()
    assert await _stats(other, "acknowledged", "in_flight") == (1, 0)


async def test_records_of_cancelled_handlers_come_again_whatever_the_handlers_raise(
    place: WorkPlace,
) -> None:
    await place.writer(1, num_buckets=1)
    member = await place.member(lease=600.0, max_deliveries=1_000)
    started = asyncio.Event()

    async def handle(record: dict) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("the connection was cut")

    running = asyncio.create_task(member.run(handle))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (again,) = await member.fetch(1)  # immediately: it has not failed
    assert again.attempt == 2


async def test_a_run_that_is_cancelled_twice_leaves_no_task_behind(place: WorkPlace) -> None:
    await place.writer(1, num_buckets=1)
    member = await place.member(lease=600.0)
    started, stubborn = asyncio.Event(), asyncio.Event()

    async def handle(record: dict) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await stubborn.wait()

    before = asyncio.all_tasks()
    running = asyncio.create_task(member.run(handle))
    await started.wait()
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    stubborn.set()

    async def ended() -> bool:
        return asyncio.all_tasks() <= before

    await until(ended)
    assert len(await member.fetch(1)) == 1


async def test_the_record_of_a_thread_that_continues_is_not_delivered_to_another_member(
    place: WorkPlace,
) -> None:
    await place.writer(1, num_buckets=1)
    member, other = await place.member(lease=600.0), await place.member()
    started, finish = threading.Event(), threading.Event()

    def handle(record: dict) -> None:
        started.set()
        finish.wait()

    running = asyncio.create_task(member.run(handle))
    try:
        await asyncio.to_thread(started.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await other.fetch(1) == []
        assert await _stats(other, "in_flight") == (1,)
    finally:
        finish.set()


async def test_the_group_and_not_the_member_decides_which_attempt_is_the_last(
    place: WorkPlace,
) -> None:
    await place.writer(1, num_buckets=1)
    member = await place.member(max_deliveries=1)
    await place.member(max_deliveries=2)

    async def handle(record: dict) -> None:
        raise ValueError("always")

    running = asyncio.create_task(member.run(handle, backoff=0.0))

    async def given_up() -> bool:
        return await _stats(member, "unacknowledged") == (0,)

    await until(given_up)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (letter,) = await member.dead_letters()
    assert letter["dead_letter"]["attempts"] == 2
    assert letter["dead_letter"]["reason"] == "ValueError: always"


async def test_a_failure_may_be_repeated_after_a_lost_answer(place: WorkPlace) -> None:
    await place.writer(1, num_buckets=1)
    member = await place.member(max_deliveries=2)
    (first,) = await member.fetch(1)
    await member.fail_delivery(first, "once", 0.0)
    await member.fail_delivery(first, "once", 0.0)
    (second,) = await member.fetch(1)
    await member.fail_delivery(second, "twice", 0.0)
    await member.fail_delivery(second, "twice", 0.0)
    (letter,) = await member.dead_letters()
    assert letter["dead_letter"]["reason"] == "twice"
    assert await _stats(member, "dead", "unacknowledged") == (1, 0)
