"""Streams: pages, waiting for new records, and when a stream ends."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from support.buckets import Bucket

from persisting.queue import BucketClosed, InvalidArgument

SOON = 20.0
"""Seconds after which a test counts as hung."""


class Consumer:
    """Reads a blocking stream in a task."""

    def __init__(self, spawned: Callable[[Any], Any], backend: Any, *window: Any) -> None:
        self.got: list[dict[str, Any]] = []
        self._more = asyncio.Event()
        self.task = spawned(self._read(backend.get_stream(*window, block=True)))

    async def _read(self, stream: Any) -> None:
        async for record in stream:
            self.got.append(record)
            self._more.set()

    async def has(self, count: int) -> list[dict[str, Any]]:
        async def grow() -> None:
            while len(self.got) < count:
                self._more.clear()
                await self._more.wait()

        await asyncio.wait_for(grow(), SOON)
        return self.got

    async def ends(self) -> None:
        await asyncio.wait_for(self.task, SOON)


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0.005)


async def test_a_stream_that_does_not_block_ends_when_caught_up(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put_batch([{"i": 0}, {"i": 1}])
    stream = backend.get_stream()
    assert [r async for r in stream] == [{"i": 0}, {"i": 1}]
    await backend.put({"i": 2})
    assert [r async for r in stream] == []


async def test_stream_sees_records_put_while_it_is_read(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put({"i": 0})
    seen = []
    async for record in backend.get_stream():
        seen.append(record["i"])
        if record["i"] < 4:
            await backend.put({"i": record["i"] + 1})
    assert seen == [0, 1, 2, 3, 4]


async def test_a_blocking_stream_wakes_on_put(bucket: Bucket, spawned: Any) -> None:
    backend = bucket.open()
    consumer = Consumer(spawned, backend)
    for i in range(3):
        await let_others_run()
        assert len(consumer.got) == i
        await backend.put({"i": i})
        assert await consumer.has(i + 1) == [{"i": n} for n in range(i + 1)]
    await backend.put_batch([{"i": 3}, {"i": 4}])
    assert len(await consumer.has(5)) == 5


async def test_a_blocking_stream_wakes_on_put_arrow(bucket: Bucket, spawned: Any) -> None:
    import pyarrow as pa

    backend = bucket.open()
    consumer = Consumer(spawned, backend)
    await let_others_run()
    await backend.put_arrow(pa.table({"i": [0, 1]}))
    assert await consumer.has(2) == [{"i": 0}, {"i": 1}]


async def test_a_blocking_stream_survives_flush(bucket: Bucket, spawned: Any) -> None:
    backend = bucket.open()
    consumer = Consumer(spawned, backend)
    for i in range(4):
        await backend.put({"i": 2 * i})
        await backend.flush()
        await backend.put({"i": 2 * i + 1})
        await consumer.has(2 * i + 2)
        await backend.flush()
    assert [r["i"] for r in consumer.got] == list(range(8))


async def test_a_blocking_stream_ends_at_its_limit(bucket: Bucket, spawned: Any) -> None:
    backend = bucket.open()
    await backend.put({"i": 0})
    consumer = Consumer(spawned, backend, 0, 3)
    await consumer.has(1)
    await backend.put_batch([{"i": 1}, {"i": 2}, {"i": 3}])
    await consumer.ends()
    assert [r["i"] for r in consumer.got] == [0, 1, 2]


async def test_a_stream_with_a_limit_of_0_ends_immediately(bucket: Bucket, spawned: Any) -> None:
    consumer = Consumer(spawned, bucket.open(), 0, 0)
    await consumer.ends()
    assert consumer.got == []


async def test_a_blocking_stream_waits_for_an_offset_ahead(bucket: Bucket, spawned: Any) -> None:
    backend = bucket.open()
    consumer = Consumer(spawned, backend, 2, 2)
    for i in range(4):
        await backend.put({"i": i})
        await let_others_run()
    await consumer.ends()
    assert [r["i"] for r in consumer.got] == [2, 3]


async def test_a_waiting_stream_ends_when_the_backend_is_closed(
    bucket: Bucket, spawned: Any
) -> None:
    backend = bucket.open()
    await backend.put({"i": 0})
    consumers = [Consumer(spawned, backend) for _ in range(3)]
    for consumer in consumers:
        await consumer.has(1)
    await backend.close()
    for consumer in consumers:
        await consumer.ends()
        assert consumer.got == [{"i": 0}]


async def test_a_stream_in_the_middle_of_its_records_ends_cleanly_at_close(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put_batch([{"i": i} for i in range(3)])
    stream = backend.get_stream(block=True)
    first = await anext(stream)
    await backend.close()
    rest = [r async for r in stream]
    assert [first, *rest] == [{"i": i} for i in range(1 + len(rest))]


async def test_a_cancelled_stream_leaves_the_backend_usable(bucket: Bucket, spawned: Any) -> None:
    backend = bucket.open()
    await backend.put({"i": 0})
    cancelled, other = Consumer(spawned, backend), Consumer(spawned, backend)
    await cancelled.has(1)
    await let_others_run()
    cancelled.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled.task
    await backend.put({"i": 1})
    assert len(await other.has(2)) == 2
    assert len(cancelled.got) == 1
    assert await backend.get() == [{"i": 0}, {"i": 1}]


async def test_leaving_a_stream_early_leaves_the_backend_usable(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put_batch([{"i": i} for i in range(50)])
    await backend.flush()
    for _ in range(10):
        stream = backend.get_stream(block=True)
        assert await anext(stream) == {"i": 0}
        await stream.aclose()
    await backend.put({"i": 50})
    assert len(await backend.get()) == 51


async def test_blocking_stream_can_continue_after_a_timeout(bucket: Bucket) -> None:
    backend = bucket.open()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(backend.get_stream(block=True)), 0.05)
    await backend.put({"i": 0})
    assert await asyncio.wait_for(anext(backend.get_stream(block=True)), SOON) == {"i": 0}


async def test_many_streams_each_get_every_record(bucket: Bucket, spawned: Any) -> None:
    backend = bucket.open(flush_threshold=20)
    consumers = [Consumer(spawned, backend) for _ in range(10)]
    for i in range(100):
        await backend.put({"i": i})
    for consumer in consumers:
        assert [r["i"] for r in await consumer.has(100)] == list(range(100))


async def test_a_stream_checks_its_window_before_the_first_record(bucket: Bucket) -> None:
    backend = bucket.open()
    with pytest.raises(InvalidArgument):
        await anext(backend.get_stream(-1, block=True))


async def test_a_stream_over_many_rows_yields_each_once(bucket: Bucket) -> None:
    backend = bucket.open(flush_threshold=4000)
    rows = [{"i": i, "s": str(i)} for i in range(10_000)]
    for start in range(0, len(rows), 2500):
        await backend.put_batch(rows[start : start + 2500])
    position = 0
    async for record in backend.get_stream():
        assert record == rows[position]
        position += 1
    assert position == len(rows)


async def test_a_stream_of_a_closed_backend_raises(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.close()
    for block in (False, True):
        with pytest.raises(BucketClosed):
            await anext(backend.get_stream(block=block))


async def test_stream_over_a_long_table_uses_bounded_memory(stored: Bucket) -> None:
    backend = stored.open(flush_threshold=5000)
    for start in range(0, 20_000, 2000):
        await backend.put_batch([{"i": start + i, "t": f"{i:1000d}"} for i in range(2000)])
    await backend.flush()
    tracemalloc.start()
    try:
        count = 0
        async for record in backend.get_stream():
            assert record["i"] == count
            count += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 20_000
    assert peak < 8_000_000


@pytest.mark.parametrize("batch_size", [1, 7, 100, 1500, 5000])
async def test_stream_pages_have_batch_size_rows(stored: Bucket, batch_size: int) -> None:
    backend = stored.open(batch_size=batch_size, flush_interval=None, flush_threshold=10**6)
    await backend.put_batch([{"i": i} for i in range(1700)])
    await backend.flush()
    for i in range(1700, 1710):
        await backend.put({"i": i})
    await backend.put_batch([{"i": i} for i in range(1710, 3300)])
    pages = [page async for page in backend.get_pages(3)]
    whole, rest = divmod(3297, batch_size)
    assert [len(page.rows) for page in pages] == [batch_size] * whole + [rest] * bool(rest)
    assert [page.first for page in pages] == list(range(3, 3300, batch_size))
    assert [record["i"] for page in pages for record in page.rows] == list(range(3, 3300))
    limited = [page async for page in backend.get_pages(0, min(batch_size, 2000) + 1)]
    assert sum(len(page.rows) for page in limited) == min(batch_size, 2000) + 1
    assert len(limited) == (2 if batch_size <= 2000 else 1)


async def test_stream_page_of_large_rows_ends_before_batch_size(stored: Bucket) -> None:
    backend = stored.open(batch_size=100, flush_interval=None)
    await backend.put_batch([{"i": i, "b": b"x" * 500_000} for i in range(30)])
    pages = [page async for page in backend.get_pages()]
    assert 2 <= len(pages) < 30
    assert [record["i"] for page in pages for record in page.rows] == list(range(30))


@pytest.mark.parametrize("batch_size", [1, 7, 5000])
async def test_stream_returns_every_record_for_any_batch_size(
    bucket: Bucket, batch_size: int
) -> None:
    backend = bucket.open(batch_size=batch_size)
    await backend.put_batch([{"i": i} for i in range(120)])
    assert [record["i"] async for record in backend.get_stream(5)] == list(range(5, 120))
    assert [record["i"] async for record in backend.get_stream(5, 9)] == list(range(5, 14))


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, "100", True, None])
def test_invalid_batch_size_is_refused(bucket: Bucket, batch_size: Any) -> None:
    with pytest.raises(InvalidArgument, match="batch_size"):
        bucket.open(batch_size=batch_size)
