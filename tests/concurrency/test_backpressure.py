"""A full buffer makes puts wait; a failing disk makes them raise until it recovers."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pyarrow as pa
import pytest
from support.buckets import Bucket, read_all

from persisting.queue import StorageError, WALError

LIMIT = 200_000
BIG = 20_000

SHAPES = {
    "text": lambda i: {"i": i, "x": "t" * BIG},
    "wide-text": lambda i: {"i": i, "x": "漢" * (BIG // 3)},
    "bytes": lambda i: {"i": i, "x": b"b" * BIG},
    "list": lambda i: {"i": i, "x": [i] * (BIG // 8)},
    "vector": lambda i: {"i": i, "x": [0.5] * (BIG // 8)},
    "dict": lambda i: {"i": i, "x": {"y": "t" * BIG}},
}


async def buffered_bytes(backend: Any) -> int:
    """Estimate the buffered bytes from the statistics."""
    stats = await backend.stats()
    return int(stats["buffer_count"]) * BIG


@pytest.mark.parametrize("shape", SHAPES)
async def test_puts_wait_when_the_buffer_is_full(bucket: Bucket, shape: str) -> None:
    backend = bucket.open(flush_threshold=10**6, flush_interval=None, max_buffer_bytes=LIMIT)
    worst = 0
    for i in range(60):
        await backend.put(SHAPES[shape](i))
        worst = max(worst, await buffered_bytes(backend))
    assert worst <= 2 * LIMIT
    assert [r["i"] async for r in backend.get_stream()] == list(range(60))


async def test_concurrent_producers_stay_within_the_buffer_limit(bucket: Bucket) -> None:
    backend = bucket.open(flush_threshold=10**6, flush_interval=None, max_buffer_bytes=LIMIT)
    worst = 0

    async def produce(who: int) -> None:
        nonlocal worst
        for n in range(10):
            await backend.put(SHAPES["bytes"](who * 100 + n))
            worst = max(worst, await buffered_bytes(backend))

    await asyncio.gather(*(produce(who) for who in range(8)))
    assert worst <= LIMIT + 8 * 2 * BIG
    assert len(await read_all(backend)) == 80


async def test_arrow_puts_and_batches_wait_when_the_buffer_is_full(bucket: Bucket) -> None:
    backend = bucket.open(flush_threshold=10**6, flush_interval=None, max_buffer_bytes=LIMIT)
    table = pa.table({"i": list(range(10)), "x": ["t" * BIG] * 10})
    for _ in range(8):
        await backend.put_arrow(table)
        await backend.put_batch(table.to_pylist())
        assert await buffered_bytes(backend) <= LIMIT + 2 * table.nbytes
    assert backend.total_count() == 160


@pytest.mark.parametrize("call", ["sync_file", "sync_folder"])
async def test_a_failed_background_flush_surfaces_and_heals(
    bucket: Bucket, faults: Any, call: str
) -> None:
    backend = bucket.open(flush_threshold=5, flush_interval=None)
    await backend.put({"i": 0})
    await backend.flush()
    faults.fail_always(call)
    errors: list[str] = []
    acknowledged = [0]
    for i in range(1, 2000):
        try:
            await backend.put({"i": i})
            acknowledged.append(i)
        except StorageError as exc:
            errors.append(str(exc))
            if len(errors) == 3:
                break
        await asyncio.sleep(0.005)
    assert len(errors) == 3
    assert all("injected" in text for text in errors)
    with pytest.raises(StorageError, match="injected"):
        await backend.flush()
    assert [r["i"] for r in await backend.get()] == acknowledged
    assert "injected" in (await backend.stats())["flush_error"]
    faults.heal()
    await backend.put({"i": -1})
    await backend.flush()
    assert (await backend.stats())["flush_error"] is None
    backend = await bucket.reopen(backend)
    assert [r["i"] for r in await backend.get()] == [*acknowledged, -1]


async def test_full_disk_raises_with_its_cause_and_recovers(bucket: Bucket, faults: Any) -> None:
    backend = bucket.open()
    await backend.put({"i": 0})
    faults.fail_always("write", "sync_file", "sync_folder", error=errno.ENOSPC)
    if bucket.kind.logged:
        with pytest.raises(StorageError, match=r"No space left|injected"):
            await backend.put({"i": 1})
    else:
        await backend.put({"i": 1})
        with pytest.raises(StorageError, match=r"No space left|injected"):
            await backend.flush()
    assert {"i": 0} in await backend.get()
    faults.heal()
    await backend.put({"i": 2})
    await backend.flush()
    ids = [r["i"] for r in await backend.get()]
    assert ids == ([0, 2] if bucket.kind.logged else [0, 1, 2])
    backend = await bucket.reopen(backend)
    assert [r["i"] for r in await backend.get()] == ids


async def test_a_failed_close_keeps_the_backend_open_and_can_be_tried_again(
    bucket: Bucket, faults: Any
) -> None:
    backend = bucket.open()
    await backend.put({"i": 0})
    faults.fail_always("sync_file", "sync_folder")
    with pytest.raises(StorageError):
        await backend.close()
    assert await backend.get() == [{"i": 0}]
    with pytest.raises(StorageError):
        await backend.close()
    faults.heal()
    await backend.put({"i": 1})
    await backend.close()
    assert await bucket.open().get() == [{"i": 0}, {"i": 1}]


async def test_a_blocking_stream_outlives_a_failed_close(
    bucket: Bucket, faults: Any, spawned: Any
) -> None:
    backend = bucket.open()
    await backend.put({"i": 0})
    stream = backend.get_stream(block=True)
    assert await anext(stream) == {"i": 0}
    waiting = spawned(anext(stream))
    await asyncio.sleep(0.01)
    faults.fail_always("sync_file", "sync_folder")
    with pytest.raises(StorageError):
        await backend.close()
    faults.heal()
    await backend.put({"i": 1})
    assert await asyncio.wait_for(waiting, 20) == {"i": 1}


async def test_failed_sync_fails_all_puts_that_shared_it(persisting: Bucket, faults: Any) -> None:
    options = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}
    backend = persisting.open(**options)
    await backend.put({"i": 0})
    for call in ("write", "sync"):
        faults.fail_always(call)
        results = await asyncio.gather(
            *(backend.put({"i": i, "new": [i]}) for i in range(1, 11)), return_exceptions=True
        )
        assert all(isinstance(r, WALError) for r in results)
        assert await backend.get() == [{"i": 0}]
        faults.heal()
    await backend.put({"i": 11})
    backend = await persisting.reopen(backend, **options)
    assert await backend.get() == [{"i": 0}, {"i": 11}]


async def test_refused_schema_change_leaves_the_schema_unchanged(
    persisting: Bucket, faults: Any
) -> None:
    backend = persisting.open(enable_wal=True, wal_sync_interval=0.0, flush_interval=None)
    await backend.put({"a": 1})
    faults.fail_always("write")
    for refused in ({"a": 1.5}, {"a": 2, "new": "text"}):
        with pytest.raises(WALError):
            await backend.put(refused)
    faults.heal()
    await backend.put({"a": 2, "new": 5})
    assert await backend.get() == [{"a": 1, "new": None}, {"a": 2, "new": 5}]
    assert isinstance((await backend.get())[0]["a"], int)
    await backend.flush()
    assert await backend.get() == [{"a": 1, "new": None}, {"a": 2, "new": 5}]
