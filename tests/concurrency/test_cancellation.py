"""Cancelling a task at any await keeps acknowledged records, once and in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator
from typing import Any

import pyarrow as pa
import pytest
from support.buckets import Bucket
from support.waiting import until

from persisting.queue import BucketClosed

SUSPENSIONS = range(5)


class CancelAt:
    """Awaits a coroutine and cancels its task when it suspends for the n-th time."""

    def __init__(self, coroutine: Any, suspension: int) -> None:
        self._coroutine, self._suspension = coroutine, suspension

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        count, sent, thrown = 0, None, None
        while True:
            try:
                waiting = steps.throw(thrown) if thrown else steps.send(sent)
            except StopIteration as done:
                return done.value
            if count == self._suspension:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            count, sent, thrown = count + 1, None, None
            try:
                sent = yield waiting
            except BaseException as exc:
                thrown = exc


async def cancelled_at(coroutine: Any, suspension: int) -> bool:
    """Cancel the coroutine at that suspension; False if it ended before."""

    async def run() -> None:
        await CancelAt(coroutine, suspension)

    task = asyncio.create_task(run())
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


def check(records: list[dict[str, Any]], acknowledged: list[int], unknown: set[int]) -> None:
    """Assert that acknowledged records are stored once, in order, cancelled ones at most once."""
    ids = [r["i"] for r in records]
    assert len(ids) == len(set(ids))
    assert [i for i in ids if i in set(acknowledged)] == acknowledged
    assert set(ids) <= set(acknowledged) | unknown


@pytest.mark.parametrize("suspension", SUSPENSIONS)
async def test_a_cancelled_put_leaves_a_consistent_state(bucket: Bucket, suspension: int) -> None:
    backend = bucket.open(flush_threshold=5)
    acknowledged: list[int] = []
    unknown: set[int] = set()
    for i in range(12):
        record = {"i": i, "l": [i]} if i % 2 else {"i": i, "l": None}
        if await cancelled_at(backend.put(record), suspension):
            unknown.add(i)
        else:
            acknowledged.append(i)
    await backend.flush()
    check(await backend.get(), acknowledged, unknown)
    backend = await bucket.reopen(backend)
    check(await backend.get(), acknowledged, unknown)


@pytest.mark.parametrize("suspension", SUSPENSIONS)
@pytest.mark.parametrize("size", [3, 1500])
async def test_a_cancelled_batch_is_stored_whole_or_not(
    bucket: Bucket, suspension: int, size: int
) -> None:
    backend = bucket.open(flush_threshold=4 * size)
    acknowledged: list[int] = []
    unknown: set[int] = set()
    for number in range(4):
        ids = range(number * size, (number + 1) * size)
        batch = [{"i": i} for i in ids]
        put = backend.put_arrow(pa.Table.from_pylist(batch)) if number % 2 else None
        if await cancelled_at(put or backend.put_batch(batch), suspension):
            unknown.update(ids)
        else:
            acknowledged += ids
    await backend.put({"i": -1})
    records = await backend.get()
    check(records, [*acknowledged, -1], unknown)
    for start in range(0, len(records) - 1, size):
        batch_ids = [r["i"] for r in records[start : start + size]]
        assert batch_ids == list(range(batch_ids[0], batch_ids[0] + size))
    backend = await bucket.reopen(backend)
    assert await backend.get() == records


@pytest.mark.parametrize("suspension", SUSPENSIONS)
async def test_a_cancelled_flush_loses_and_duplicates_nothing(
    bucket: Bucket, suspension: int
) -> None:
    backend = bucket.open()
    for i in range(6):
        await backend.put({"i": i})
        await cancelled_at(backend.flush(), suspension)
    await backend.flush()
    assert (await backend.stats())["persisted_count"] == 6
    backend = await bucket.reopen(backend)
    assert [r["i"] for r in await backend.get()] == list(range(6))


@pytest.mark.parametrize("suspension", SUSPENSIONS)
async def test_a_cancelled_read_disturbs_nothing(bucket: Bucket, suspension: int) -> None:
    backend = bucket.open()
    rows = [{"i": i} for i in range(300)]
    await backend.put_batch(rows[:200])
    await backend.flush()
    await backend.put_batch(rows[200:])

    async def drain(*, block: bool) -> None:
        async for _ in backend.get_stream(block=block):
            pass

    await cancelled_at(backend.get(), suspension)
    await cancelled_at(backend.get_arrow(), suspension)
    await cancelled_at(drain(block=False), suspension)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(drain(block=True), 0.05)
    assert await backend.get() == rows


@pytest.mark.parametrize("suspension", SUSPENSIONS)
async def test_a_cancelled_close_can_be_closed_again(bucket: Bucket, suspension: int) -> None:
    backend = bucket.open()
    await backend.put({"i": 0})
    await cancelled_at(backend.close(), suspension)
    try:
        await backend.put({"i": 1})
        count = 2
    except BucketClosed:
        count = 1
    await backend.close()
    assert [r["i"] for r in await bucket.open().get()] == list(range(count))


async def test_random_cancellations_keep_each_producers_order(bucket: Bucket) -> None:
    backend = bucket.open(flush_threshold=30)
    luck = random.Random(7)
    acknowledged: dict[int, list[int]] = {}
    unknown: set[tuple[int, int]] = set()

    async def produce(who: int) -> None:
        mine = acknowledged.setdefault(who, [])
        n = 0
        while n < 60:
            count = luck.choice([1, 1, 3])
            rows = [{"who": who, "n": n + i} for i in range(count)]
            put = backend.put(rows[0]) if count == 1 else backend.put_batch(rows)
            task = asyncio.create_task(put)
            for _ in range(luck.randrange(4)):
                await asyncio.sleep(0)
            if luck.random() < 0.5:
                task.cancel()
            try:
                await task
                mine += [n + i for i in range(count)]
            except asyncio.CancelledError:
                unknown.update((who, n + i) for i in range(count))
            n += count

    async def disturb() -> None:
        for _ in range(20):
            task = asyncio.create_task(luck.choice([backend.flush, backend.get])())
            await asyncio.sleep(luck.random() * 0.005)
            task.cancel()

    await asyncio.gather(disturb(), *(produce(who) for who in range(5)))
    await backend.flush()
    records = await backend.get()
    for who, numbers in acknowledged.items():
        ours = [r["n"] for r in records if r["who"] == who]
        assert ours == sorted(set(ours))
        assert [n for n in ours if n in set(numbers)] == numbers
        assert all(n in set(numbers) or (who, n) in unknown for n in ours)
    backend = await bucket.reopen(backend)
    assert await backend.get() == records


async def test_a_put_cancelled_while_it_waits_for_room_stores_nothing(
    bucket: Bucket, faults: Any
) -> None:
    backend = bucket.open(flush_threshold=10**6, max_buffer_bytes=20_000)
    faults.calls.clear()
    faults.gate.clear()
    text = "x" * 5000
    puts = [asyncio.create_task(backend.put({"i": i, "t": text})) for i in range(30)]

    async def reached_the_disk() -> bool:
        return bool(faults.calls)

    await until(reached_the_disk)
    for task in puts[10:]:
        task.cancel()
    faults.gate.set()
    results = await asyncio.gather(*puts, return_exceptions=True)
    acknowledged = [i for i, r in enumerate(results) if r is None]
    await backend.flush()
    check(await backend.get(), acknowledged, set(range(30)) - set(acknowledged))
    assert set(range(10)) <= set(acknowledged)
