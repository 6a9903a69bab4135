"""Concurrent puts share syncs, and the log stays within its bounds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.crash.checks import PATIENCE, CrashableBucket
from support.crash.workloads import wal

from persisting import fs


class Counting(fs.FileSystem):
    """Counts the syncs of the log. A sync lasts until ``may_end`` allows it."""

    def __init__(self) -> None:
        self.syncs = 0
        self.largest = 0
        self.log: Path | None = None
        self.may_end: Callable[[], bool] = lambda: True
        self._guard = threading.Lock()

    def sync(self, fd: int) -> None:
        with self._guard:
            self.syncs += 1
        deadline = time.monotonic() + PATIENCE
        while not self.may_end() and time.monotonic() < deadline:
            time.sleep(0.001)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        super().write(fd, data)
        if self.log is not None:
            self.largest = max(self.largest, bytes_of(self.log))

    def sync_file(self, path: Path) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


def bytes_of(log: Path) -> int:
    total = 0
    for path in log.glob("*.wal"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


@pytest.fixture
def disk() -> Any:
    counting = Counting()
    with fs.use(counting):
        yield counting


async def test_concurrent_puts_share_syncs(tmp_path: Path, disk: Counting) -> None:
    backend = wal()(tmp_path)
    await backend.put({"id": -1})
    disk.syncs = 0
    started = 0

    async def put(number: int) -> None:
        nonlocal started
        started += 1
        await backend.put({"id": number})

    disk.may_end = lambda: started == 300
    await asyncio.gather(*(put(number) for number in range(300)))
    assert 1 <= disk.syncs <= 30
    assert sorted(r["id"] for r in await backend.get()) == list(range(-1, 300))
    await backend.close()


async def test_producers_that_await_each_put_share_syncs(tmp_path: Path, disk: Counting) -> None:
    backend = wal()(tmp_path)

    running, waiting, called = 30, 0, 0

    async def producer(name: int) -> None:
        nonlocal running, waiting, called
        for number in range(10):
            waiting, called = waiting + 1, called + 1
            await backend.put({"id": f"{name}.{number}"})
            waiting -= 1
        running -= 1

    # A sync ends when every producer that is not done has a put that is not acknowledged yet. So
    # two syncs in a row store a put of each of them.
    disk.may_end = lambda: waiting == running == called - backend.total_count()
    await asyncio.gather(*(producer(name) for name in range(30)))
    assert backend.total_count() == 300
    assert 10 <= disk.syncs <= 40
    await backend.close()


async def test_sequential_puts_are_each_synced(tmp_path: Path, disk: Counting) -> None:
    backend = wal()(tmp_path)
    for number in range(10):
        await backend.put({"id": number})
        assert disk.syncs == number + 1
    await backend.put_batch([{"id": 100 + i} for i in range(50)])
    assert disk.syncs == 11
    await backend.close()


async def test_puts_with_a_sync_interval_do_not_wait_for_syncs(
    tmp_path: Path, disk: Counting
) -> None:
    backend = wal(wal_sync_interval=60.0)(tmp_path)
    for number in range(100):
        await backend.put({"id": number})
    assert disk.syncs == 0
    await backend.close()


async def test_sync_interval_limits_how_often_the_log_is_synced(
    tmp_path: Path, disk: Counting
) -> None:
    backend = wal(wal_sync_interval=0.2)(tmp_path)
    started = time.monotonic()
    while disk.syncs < 4 and time.monotonic() - started < PATIENCE:
        await backend.put({"id": 1})
        await asyncio.sleep(0.002)
    elapsed = time.monotonic() - started
    assert 4 <= disk.syncs <= elapsed / 0.1 + 2
    await backend.close()


async def test_log_longer_than_max_wal_size_is_flushed(tmp_path: Path, disk: Counting) -> None:
    limit, record = 50_000, {"id": 0, "text": "x" * 400}
    disk.log = tmp_path / "wal"
    backend = wal(max_wal_size=limit, flush_threshold=10**9, wal_sync_interval=60.0)(tmp_path)
    for _ in range(1000):
        await backend.put(record)
    one_put = 2000
    assert limit < disk.largest <= 2 * limit + one_put
    stats = await backend.stats()
    assert stats["flush_count"] >= 2
    await backend.flush()
    assert (await backend.stats())["wal_size"] == bytes_of(disk.log) == 0
    assert backend.total_count() == 1000
    await backend.close()


async def test_wal_size_is_what_the_log_holds_of_unflushed_records(
    tmp_path: Path, disk: Counting
) -> None:
    log = tmp_path / "wal"

    async def size() -> int:
        reported = (await handle.backend.stats())["wal_size"]
        assert (reported == 0) == (bytes_of(log) == 0)
        return int(reported)

    handle = CrashableBucket(tmp_path, wal())
    assert await size() == 0
    await handle.backend.put({"id": 0})
    first = await size()
    assert first > 0
    await handle.backend.put_batch([{"id": i} for i in range(100)])
    assert await size() > first
    await handle.drop()
    handle.open()
    assert await size() > first
    await handle.backend.put({"id": 1, "new": "field"})
    assert await size() > first
    await handle.backend.flush()
    assert await size() == 0
    await handle.backend.put({"id": 2, "new": "field"})
    assert await size() > 0
    await handle.backend.close()
    assert bytes_of(log) == 0


async def test_flush_keeps_the_log_of_concurrent_puts(tmp_path: Path, disk: Counting) -> None:
    """The log keeps the records that the flush did not include."""
    handle = CrashableBucket(tmp_path, wal(flush_threshold=20))
    await asyncio.gather(*(handle.backend.put({"id": i}) for i in range(200)))
    stats = await handle.backend.stats()
    if stats["buffer_count"]:
        assert stats["wal_size"] > 0
    await handle.drop()
    handle.open()
    assert sorted(r["id"] for r in await handle.backend.get()) == list(range(200))
    await handle.backend.close()
