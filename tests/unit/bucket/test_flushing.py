"""When rows are flushed to the table, and how the log is released."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance as lancedb
import pytest
from support.buckets import LANCE, PERSISTING, WAL_SYNCED, Bucket, Kind, until_freed
from support.waiting import until

from persisting.bucket import flusher
from persisting.queue import PersistingBackend


def log_bytes(folder: Path) -> int:
    """Return the bytes of the log; a flush may remove a segment meanwhile."""
    total = 0
    for segment in (folder / "wal").glob("*.wal"):
        with suppress(FileNotFoundError):
            total += segment.stat().st_size
    return total


@pytest.mark.parametrize("kind", [LANCE, PERSISTING, WAL_SYNCED], ids=str)
@pytest.mark.parametrize("way", ["put", "put_batch"])
async def test_the_threshold_starts_a_flush(kind: Kind, way: str, folder: Path) -> None:
    bucket = Bucket(kind, folder)
    backend = bucket.open(flush_threshold=10, flush_interval=None)
    for i in range(9):
        await backend.put({"i": i})
    await asyncio.sleep(0.05)
    assert (await backend.stats())["persisted_count"] == 0
    if way == "put":
        await backend.put({"i": 9})
    else:
        await backend.put_batch([{"i": 9}, {"i": 10}])

    async def flushed() -> bool:
        return (await backend.stats())["buffer_count"] == 0

    await until(flushed)
    assert len(await backend.get()) == backend.total_count()
    await bucket.close()


@pytest.mark.parametrize("kind", [LANCE, PERSISTING, WAL_SYNCED], ids=str)
async def test_threshold_starts_no_flush_right_after_the_last_one(
    kind: Kind, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(kind, folder)
    backend = bucket.open(flush_threshold=5, flush_interval=None)
    await backend.put_batch([{"i": 1}] * 10)

    async def flushed(times: int) -> bool:
        return (await backend.stats())["flush_count"] == times

    await until(lambda: flushed(1))
    monkeypatch.setattr(flusher, "FLUSH_PAUSE", 3600.0)
    for _ in range(20):
        await backend.put_batch([{"i": 1}] * 10)
    assert (await backend.stats())["flush_count"] == 1
    monkeypatch.setattr(flusher, "FLUSH_PAUSE", 0.0)
    backend.bucket.flusher.after_pause()  # as the timer does when the pause is over
    await until(lambda: flushed(2))
    assert (await backend.stats())["buffer_count"] == 0
    await bucket.close()


async def test_first_flush_at_the_threshold_does_not_wait(
    lance: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "FLUSH_PAUSE", 1e9)  # longer than the machine has been running
    backend = lance.open(flush_threshold=5, flush_interval=None)
    await backend.put_batch([{"i": 1}] * 10)

    async def flushed() -> bool:
        return (await backend.stats())["flush_count"] == 1

    await until(flushed)
    await lance.close()


async def test_records_put_while_a_flush_ends_are_flushed(
    lance: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = lance.open(flush_threshold=5, flush_interval=None)
    bucket = backend.bucket
    late = [{"i": 2} for _ in range(10)]
    look = bucket.maintenance.schedule_if_needed

    def put_and_look() -> None:
        while late:
            assert bucket.puts.add_row(late.pop())
        look()

    monkeypatch.setattr(bucket.maintenance, "schedule_if_needed", put_and_look)
    await backend.put_batch([{"i": 1}] * 10)

    async def flushed() -> bool:
        return (await backend.stats())["persisted_count"] == 20

    await until(flushed)
    await lance.close()


@pytest.mark.parametrize("kind", [LANCE, PERSISTING, WAL_SYNCED], ids=str)
async def test_flush_interval_flushes_older_records(kind: Kind, folder: Path) -> None:
    bucket = Bucket(kind, folder)
    backend = bucket.open(flush_interval=0.05)
    for i in range(3):
        await backend.put({"i": i})

        async def flushed() -> bool:
            return (await backend.stats())["buffer_count"] == 0

        await until(flushed)
    assert lancedb.dataset(str(folder / "data.lance")).count_rows() == 3
    await bucket.close()


async def test_without_an_interval_a_slow_topic_stays_buffered(lance: Bucket) -> None:
    backend = lance.open()
    await backend.put({"i": 0})
    await asyncio.sleep(0.1)
    assert (await backend.stats())["buffer_count"] == 1


@pytest.mark.parametrize("kind", [LANCE, PERSISTING, WAL_SYNCED], ids=str)
async def test_a_flush_adds_one_fragment_and_touches_no_other(kind: Kind, folder: Path) -> None:
    bucket = Bucket(kind, folder)
    backend = bucket.open(flush_interval=None)
    known: dict[str, int] = {}
    for i in range(5):
        for n in range(3):
            await backend.put({"i": i * 10 + n})
        await backend.put_batch([{"i": i * 10 + 3}, {"i": i * 10 + 4}])
        await backend.flush()
        now = {p.name: p.stat().st_mtime_ns for p in (folder / "data.lance" / "data").iterdir()}
        assert len(now) == i + 1
        assert known.items() <= now.items()
        known = now
    assert (await backend.stats())["flush_count"] == 5
    await bucket.close()


async def test_flushed_records_are_readable_with_lance(persisting: Bucket) -> None:
    backend = persisting.open()
    await backend.put({"i": 7, "text": "x"})
    await backend.flush()
    table = lancedb.dataset(str(persisting.folder / "data.lance")).to_table(columns=["i", "text"])
    assert table.to_pylist() == [{"i": 7, "text": "x"}]


async def test_wal_size_counts_the_bytes_of_unflushed_records(persisting: Bucket) -> None:
    backend = persisting.open(enable_wal=True, flush_interval=None)
    assert (await backend.stats())["wal_size"] == 0
    for i in range(5):
        await backend.put({"i": i, "t": "x" * 1000})
        size = (await backend.stats())["wal_size"]
        assert 1000 * (i + 1) < size < log_bytes(persisting.folder)
    await backend.flush()
    assert (await backend.stats())["wal_size"] == 0
    await backend.put({"i": 6, "t": ""})
    assert 0 < (await backend.stats())["wal_size"] < log_bytes(persisting.folder)


async def test_flush_releases_the_log(persisting: Bucket) -> None:
    backend = persisting.open(enable_wal=True, flush_interval=None)
    await backend.put_batch([{"t": "x" * 1000} for _ in range(50)])
    full = log_bytes(persisting.folder)
    await backend.flush()
    assert log_bytes(persisting.folder) < full / 10
    await backend.close()
    assert not list((persisting.folder / "wal").glob("*.wal"))


async def test_log_beyond_its_maximum_size_is_flushed(persisting: Bucket) -> None:
    limit = 50_000
    backend = persisting.open(
        enable_wal=True, max_wal_size=limit, flush_interval=None, flush_threshold=10**6
    )
    worst = 0
    for i in range(200):
        await backend.put({"i": i, "t": "x" * 2000})
        worst = max(worst, (await backend.stats())["wal_size"], log_bytes(persisting.folder))
    assert limit < worst <= 3 * limit
    assert (await backend.stats())["persisted_count"] > 0
    assert [r["i"] for r in await backend.get()] == list(range(200))


async def test_log_smaller_than_one_record_loses_no_put(persisting: Bucket) -> None:
    backend = persisting.open(enable_wal=True, max_wal_size=1, flush_interval=None)
    await asyncio.gather(*(backend.put({"i": i}) for i in range(20)))
    await backend.put_batch([{"i": 20 + i} for i in range(20)])
    assert sorted(r["i"] for r in await backend.get()) == list(range(40))
    backend = await persisting.reopen(backend)
    assert backend.total_count() == 40


async def test_switching_the_log_on_and_off_keeps_everything(persisting: Bucket) -> None:
    total = 0
    for number, options in enumerate(
        [
            {"enable_wal": True},
            {"enable_wal": False},
            {"enable_wal": True, "compression": "zstd"},
            {"enable_wal": True, "wal_sync_interval": 0.0},
            {"enable_wal": False, "compression": "lz4"},
        ]
    ):
        backend = PersistingBackend(0, str(persisting.folder), flush_interval=None, **options)
        assert backend.total_count() == total
        await backend.put({"i": total})
        await backend.put_batch([{"i": total + 1, f"f{number}": [number]}])
        if options["enable_wal"]:
            total += 2
            del backend
            await until_freed(persisting.folder)
        else:
            total += 2
            await backend.close()
    backend = persisting.open()
    assert [r["i"] for r in await backend.get()] == list(range(total))
    assert (await backend.stats())["wal_enabled"] is False


async def test_puts_continue_during_a_flush(persisting: Bucket, faults: Any) -> None:
    backend = persisting.open(flush_interval=None)
    await backend.put({"i": 0})
    faults.calls.clear()
    faults.gate.clear()
    flushing = asyncio.create_task(backend.flush())

    async def reached_the_disk() -> bool:
        return bool(faults.calls)

    await until(reached_the_disk)
    for i in range(1, 50):
        await backend.put({"i": i})
        assert backend.total_count() == i + 1
        assert (await backend.get(i)) == [{"i": i}]
    assert not flushing.done()
    assert [r["i"] for r in await backend.get()] == list(range(50))
    faults.gate.set()
    await flushing
    stats = await backend.stats()
    assert (stats["persisted_count"], stats["buffer_count"]) == (1, 49)


async def test_stats_of_persisting_backend_describe_the_log(persisting: Bucket) -> None:
    backend = persisting.open(enable_wal=True, wal_sync_interval=0.25, compression="zstd")
    await backend.put({"a": 1})
    stats = await backend.stats()
    assert stats["wal_enabled"] is True
    assert stats["wal_sync_interval"] == 0.25
    assert stats["compression"] == "zstd"
    assert stats["wal_failed"] is False
    assert stats["backend"] == "PersistingBackend"
