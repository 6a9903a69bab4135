"""A failed log write, sync or flush raises, and no acknowledged record is lost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from support.crash.checks import stats_when

from persisting.errors import StorageError, WALError
from persisting.queue import PersistingBackend

SYNCED = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}


NO_LOG = {"enable_wal": False, "flush_interval": None}


def backend(path: Path, **options) -> PersistingBackend:
    return PersistingBackend(bucket_id=0, storage_path=str(path), **options)


@pytest.mark.parametrize("call", ["write", "sync"])
async def test_put_that_cannot_be_logged_raises_and_stores_nothing(tmp_path, faults, call):
    async with backend(tmp_path, **SYNCED) as opened:
        await opened.put({"n": 0})
        faults.fail_always(call, error=errno.ENOSPC)
        with pytest.raises(WALError):
            await opened.put({"n": 1})
        assert await opened.get() == [{"n": 0}]
        faults.heal()
        await opened.put({"n": 2})
        assert await opened.get() == [{"n": 0}, {"n": 2}]
    async with backend(tmp_path, **SYNCED) as again:
        assert await again.get() == [{"n": 0}, {"n": 2}]


async def test_records_are_flushed_before_the_first_put_after_a_failed_sync(tmp_path, faults):
    async with backend(tmp_path, **SYNCED) as opened:
        await opened.put({"n": 0})
        faults.fail_always("sync", error=errno.ENOSPC)
        with pytest.raises(WALError):
            await opened.put({"n": 1})
        assert (await opened.stats())["wal_failed"]
        faults.heal()
        await opened.put({"n": 2})
        stats = await opened.stats()
        assert not stats["wal_failed"]
        assert stats["persisted_count"] == 1
        await opened.flush()
        assert (await opened.stats())["wal_size"] == 0


async def test_failed_flush_is_retried_in_the_background(tmp_path, faults):
    async with backend(tmp_path, **SYNCED) as opened:
        await opened.put({"n": 0})
        faults.fail_always("sync_file", error=errno.ENOSPC)
        with pytest.raises(StorageError):
            await opened.flush()
        faults.heal()
        stats = await stats_when(opened, lambda stats: stats["flush_error"] is None)
        assert stats["persisted_count"] == 1


async def test_failed_flush_raises_and_keeps_every_record(tmp_path, faults):
    async with backend(tmp_path, **SYNCED) as opened:
        await opened.put_batch([{"n": n} for n in range(3)])
        faults.fail_always("sync_file", error=errno.EIO)
        with pytest.raises(StorageError):
            await opened.flush()
        assert "injected fault in sync_file" in (await opened.stats())["flush_error"]
        assert [r["n"] for r in await opened.get()] == [0, 1, 2]
        faults.heal()
        await opened.flush()
        stats = await opened.stats()
        assert (stats["flush_error"], stats["persisted_count"]) == (None, 3)


async def test_put_retries_the_failed_flush_first(tmp_path, faults):
    async with backend(tmp_path, **NO_LOG) as opened:
        await opened.put({"n": 0})
        faults.fail_always("sync_file", error=errno.ENOSPC)
        with pytest.raises(StorageError):
            await opened.flush()
        with pytest.raises(StorageError):
            await opened.put({"n": 1})
        faults.heal()
        await opened.put({"n": 2})
        assert [r["n"] for r in await opened.get()] == [0, 2]
        assert (await opened.stats())["persisted_count"] == 1
