"""Backends across several event loops, and backends dropped without close."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from support.buckets import LANCE, MEMORY, WAL_SYNCED, WAL_ZSTD, Kind, until_freed
from support.waiting import until

from persisting.queue import BucketLocked

KINDS = [LANCE, WAL_SYNCED, WAL_ZSTD]


def open_fresh(kind: Kind, folder: Path, **options: Any) -> Any:
    return kind.cls(bucket_id=0, storage_path=str(folder), **{**kind.options, **options})


@pytest.mark.parametrize("kind", [MEMORY, *KINDS], ids=str)
def test_one_backend_serves_consecutive_event_loops(kind: Kind, folder: Path) -> None:
    backend = open_fresh(kind, folder)

    async def use(i: int) -> None:
        await asyncio.gather(backend.put({"i": 2 * i}), backend.flush())
        await backend.put_batch([{"i": 2 * i + 1}])
        waiting = asyncio.create_task(anext(backend.get_stream(2 * i + 2, block=True)))
        await asyncio.sleep(0.01)
        assert not waiting.done()  # it is cancelled when the loop ends

    for i in range(5):
        asyncio.run(use(i))
    assert backend.total_count() == 10
    records = asyncio.run(backend.get())
    assert [r["i"] for r in records] == list(range(10))
    asyncio.run(backend.close())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_closing_in_another_event_loop_works(kind: Kind, folder: Path) -> None:
    backend = open_fresh(kind, folder)
    asyncio.run(backend.put({"i": 0}))
    asyncio.run(backend.close())
    backend = open_fresh(kind, folder)
    assert asyncio.run(backend.get()) == [{"i": 0}]
    asyncio.run(backend.close())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_loop_that_ended_in_the_middle_of_puts_corrupts_nothing(kind: Kind, folder: Path) -> None:
    backend = open_fresh(kind, folder, flush_threshold=20)
    for attempt in range(6):

        async def start(attempt: int = attempt) -> None:
            for i in range(30):
                asyncio.get_running_loop().create_task(backend.put({"i": attempt * 100 + i}))
            for _ in range(attempt):
                await asyncio.sleep(0.001)

        asyncio.run(start())
    asyncio.run(backend.put({"i": -1}))
    asyncio.run(backend.flush())
    ids = [r["i"] for r in asyncio.run(backend.get())]
    assert len(ids) == len(set(ids)) == backend.total_count()
    assert ids[-1] == -1
    assert ids[:-1] == sorted(ids[:-1])
    asyncio.run(backend.close())


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_dropping_a_backend_frees_the_lock_and_corrupts_nothing(
    kind: Kind, folder: Path
) -> None:
    total = 0
    for _ in range(5):
        backend = open_fresh(kind, folder, flush_interval=None)
        assert backend.total_count() == total
        await backend.put_batch([{"i": total + i} for i in range(10)])
        await backend.flush()
        await backend.put({"i": total + 10})
        total += 11 if kind.logged else 10
        if not kind.logged:
            await backend.stats()
        with pytest.raises(BucketLocked):
            open_fresh(kind, folder)
        del backend
        await until_freed(folder)
    backend = open_fresh(kind, folder)
    ids = [r["i"] for r in await backend.get()]
    assert ids == list(range(total))
    await backend.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_dropped_and_closed_backends_leave_no_open_files(kind: Kind, folder: Path) -> None:
    async def open_files() -> int:
        gc.collect()
        await asyncio.sleep(0.05)
        return len(os.listdir("/proc/self/fd"))

    async def are_closed() -> bool:
        return await open_files() <= before + 3

    for round_ in range(2):
        backend = open_fresh(kind, folder / f"warm-{round_}")
        await backend.put({"a": 1})
        await backend.close()
    before = await open_files()
    for i in range(15):
        backend = open_fresh(kind, folder / f"dropped-{i}")
        await backend.put({"a": 1})
        del backend
        backend = open_fresh(kind, folder / f"closed-{i}")
        await backend.put({"a": 1})
        await backend.close()
        del backend
    await until(are_closed)  # a thread may still use a dropped backend


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_dropping_a_backend_during_a_flush_corrupts_nothing(kind: Kind, folder: Path) -> None:
    for i in range(5):
        backend = open_fresh(kind, folder / str(i), flush_threshold=100)
        await backend.put_batch([{"i": n} for n in range(100)])
        del backend
        gc.collect()
        while True:
            try:
                backend = open_fresh(kind, folder / str(i))
            except BucketLocked:
                await asyncio.sleep(0.005)
            else:
                break
        ids = [r["i"] for r in await backend.get()]
        assert ids in ([], list(range(100)))
        assert ids or not kind.logged
        await backend.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_puts_that_race_with_close_are_stored_or_refused(kind: Kind, folder: Path) -> None:
    for delay in range(5):
        backend = open_fresh(kind, folder / str(delay), flush_threshold=10)
        puts = [asyncio.create_task(backend.put({"i": i})) for i in range(40)]
        for _ in range(delay):
            await asyncio.sleep(0)
        late = [asyncio.create_task(backend.put({"i": 100 + i})) for i in range(5)]
        await backend.close()
        results = await asyncio.gather(*puts, *late, return_exceptions=True)
        ids = [*range(40), *range(100, 105)]
        stored = [i for i, r in zip(ids, results, strict=True) if r is None]
        backend = open_fresh(kind, folder / str(delay))
        assert [r["i"] for r in await backend.get()] == stored
        await backend.close()
