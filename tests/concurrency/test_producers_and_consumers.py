"""Many producers and consumers on one backend."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from support.buckets import Bucket

from persisting.queue import SchemaError

PRODUCERS, EACH = 8, 120


def check_order(records: list[dict[str, Any]], each: int = EACH) -> None:
    """Assert that every record is there once, each producer's in the order of its puts."""
    by_producer: dict[int, list[int]] = {}
    for record in records:
        by_producer.setdefault(record["who"], []).append(record["n"])
    assert len(by_producer) == PRODUCERS
    for numbers in by_producer.values():
        assert numbers == list(range(each))


async def produce(backend: Any, who: int) -> None:
    luck = random.Random(who)
    n = 0
    while n < EACH:
        count = min(luck.choice([1, 1, 1, 2, 7]), EACH - n)
        rows = [{"who": who, "n": n + i, "text": "x" * luck.randrange(50)} for i in range(count)]
        if count == 1:
            await backend.put(rows[0])
        else:
            await backend.put_batch(rows)
        n += count
        if luck.random() < 0.05:
            await backend.flush()


async def consume(backend: Any) -> list[dict[str, Any]]:
    stream = backend.get_stream(0, PRODUCERS * EACH, block=True)
    return [record async for record in stream]


async def read_windows(backend: Any, stop: asyncio.Event) -> None:
    """Assert that windows read the same later: offsets never move."""
    luck = random.Random(1)
    while not stop.is_set():
        await asyncio.sleep(0)
        count = backend.total_count()
        offset = luck.randrange(count + 1)
        seen = await backend.get(offset, 20)
        assert len(seen) >= min(20, count - offset)
        again = await backend.get(offset, 20)
        assert again[: len(seen)] == seen
        assert backend.total_count() >= count


async def test_producers_and_consumers_share_one_backend(bucket: Bucket, spawned: Any) -> None:
    backend = bucket.open(flush_threshold=100)
    stop = asyncio.Event()
    consumers = [spawned(consume(backend)) for _ in range(3)]
    window = spawned(read_windows(backend, stop))
    await asyncio.gather(*(produce(backend, who) for who in range(PRODUCERS)))
    streams = await asyncio.gather(*consumers)
    stop.set()
    await window
    records = await backend.get()
    check_order(records)
    assert all(stream == records for stream in streams)
    backend = await bucket.reopen(backend)
    assert await backend.get() == records


async def test_concurrent_batches_are_not_interleaved(bucket: Bucket) -> None:
    backend = bucket.open(flush_threshold=50)

    async def put_batches(who: int) -> None:
        for number in range(15):
            await backend.put_batch([{"who": who, "batch": number, "i": i} for i in range(6)])

    await asyncio.gather(*(put_batches(who) for who in range(6)))
    records = await backend.get()
    for start in range(0, len(records), 6):
        batch = records[start : start + 6]
        assert len({(r["who"], r["batch"]) for r in batch}) == 1
        assert [r["i"] for r in batch] == list(range(6))


async def test_concurrent_first_records_agree_on_one_schema(bucket: Bucket) -> None:
    backend = bucket.open()
    rows = [{"i": i, "v": [float(i), 0.5]} for i in range(20)]
    await asyncio.gather(*(backend.put(row) for row in rows))
    assert sorted(r["i"] for r in await backend.get()) == list(range(20))


async def test_one_of_two_conflicting_first_records_is_stored(bucket: Bucket) -> None:
    backend = bucket.open()
    puts = [backend.put({"a": 1}), backend.put({"a": "x"}), backend.put({"a": [1]})]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(r, BaseException) for r in results].count(False) == 1
    await backend.flush()
    assert backend.total_count() == len(await backend.get()) == 1


async def test_concurrent_flushes_store_each_record_once(bucket: Bucket) -> None:
    backend = bucket.open()
    for i in range(30):
        await backend.put({"i": i})
        if i % 3 == 0:
            await asyncio.gather(*(backend.flush() for _ in range(5)))
    assert [r["i"] for r in await backend.get()] == list(range(30))
    assert (await backend.stats())["total_count"] == 30


async def test_records_put_before_a_flush_are_persisted_when_it_returns(bucket: Bucket) -> None:
    backend = bucket.open()
    for i in range(10):
        flushing = asyncio.create_task(backend.flush())
        await asyncio.sleep(0)
        await backend.put({"i": i})
        await backend.flush()
        assert (await backend.stats())["persisted_count"] == i + 1
        await flushing


async def test_evolution_under_concurrent_puts_loses_nothing(persisting: Bucket) -> None:
    for options in ({}, {"enable_wal": True}):
        backend = persisting.open(flush_threshold=40, **options)
        before = backend.total_count()

        async def put_shapes(who: int, backend: Any = backend) -> None:
            for n in range(40):
                await backend.put({"who": who, "n": n if who % 2 else n + 0.5, f"f{n % 5}": [n]})
                if n % 10 == who % 10:
                    await backend.flush()

        await asyncio.gather(*(put_shapes(who) for who in range(6)))
        records = (await backend.get())[before:]
        for who in range(6):
            assert [int(r["n"]) for r in records if r["who"] == who] == list(range(40))
        assert all(r[f"f{int(r['n']) % 5}"] == [int(r["n"])] for r in records)
        await backend.flush()
        assert (await backend.get())[before:] == records
        await backend.close()


async def test_concurrent_widening_never_changes_a_large_int(persisting: Bucket) -> None:
    for attempt in range(10):
        for options in ({}, {"enable_wal": True, "wal_sync_interval": 0.0}):
            folder = persisting.folder / f"{attempt}-{len(options)}"
            backend = persisting.kind.cls(0, str(folder), **options)
            await backend.put({"a": 1})
            puts = [backend.put({"a": 2**53 + 1}), backend.put({"a": 1.5})]
            if attempt % 2:
                puts.reverse()
            results = await asyncio.gather(*puts, return_exceptions=True)
            accepted = [1 for r in results if r is None]
            await backend.flush()
            assert len(await backend.get()) == 1 + len(accepted)
            assert len(accepted) == 1
            await backend.close()


async def test_field_may_widen_while_its_first_record_is_queued(persisting: Bucket) -> None:
    for attempt in range(5):
        folder = str(persisting.folder / str(attempt))
        async with persisting.kind.cls(
            0, folder, enable_wal=True, wal_sync_interval=0.0
        ) as backend:
            rows = [{"i": 0}, {"i": 1, "n": 1}, {"i": 2, "n": 1.5}, {"i": 3, "n": [1]}]
            puts = [backend.put(row) for row in rows]
            results = await asyncio.gather(*puts, return_exceptions=True)
            assert results[:3] == [None, None, None]
            assert isinstance(results[3], SchemaError)
            await backend.flush()
            found = {r["i"]: r["n"] for r in await backend.get()}
            assert found == {0: None, 1: 1.0, 2: 1.5}
