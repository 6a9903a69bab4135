"""What docs/guide/durability.md promises, each sentence as a test."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from persisting.errors import BucketClosed, StorageError, WALError
from persisting.queue import LanceBackend, PersistingBackend
from persisting.wal.frame import FRAME_HEADER_SIZE, SEGMENT_HEADER_SIZE

SYNCED = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}
LOGGED = {"enable_wal": True, "wal_sync_interval": 60.0, "flush_interval": None}
NO_LOG = {"enable_wal": False, "flush_interval": None}


def backend(path: Path, **options) -> PersistingBackend:
    return PersistingBackend(bucket_id=0, storage_path=str(path), **options)


CHILD = """
import asyncio, sys
from persisting.queue import PersistingBackend
async def main():
    path, options, flush_at = sys.argv[1], eval(sys.argv[2]), int(sys.argv[3])
    backend = PersistingBackend(bucket_id=0, storage_path=path, **options)
    for n in range(1_000_000):
        await backend.put({"n": n})
        print(n, flush=True)
        if n == flush_at:
            await backend.flush()
            print("flushed", flush=True)
asyncio.run(main())
"""


def run_and_kill(path: Path, options: dict, *, after: int, flush_at: int = -1) -> int:
    """Put in a child process until ``after`` puts were acknowledged, kill -9; how many were."""
    code = CHILD.replace("eval(sys.argv[2])", repr(options))
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path), "-", str(flush_at)],
        stdout=subprocess.PIPE,
        text=True,
    )
    acknowledged = 0
    for line in child.stdout:
        acknowledged = acknowledged if line.startswith("flushed") else int(line) + 1
        if acknowledged > after:
            break
    os.kill(child.pid, signal.SIGKILL)
    rest = child.stdout.read()
    child.stdout.close()
    child.wait()
    whole = [int(n) for n in rest.split("\n")[:-1] if n.isdigit()]
    return whole[-1] + 1 if whole else acknowledged


@pytest.mark.parametrize("options", [SYNCED, LOGGED], ids=["interval 0", "interval 60"])
async def test_with_a_log_every_acknowledged_record_survives_kill_9(tmp_path, options):
    acknowledged = run_and_kill(tmp_path, options, after=200)
    async with backend(tmp_path, **options) as opened:
        found = [record["n"] for record in await opened.get()]
    assert found == list(range(len(found)))
    assert acknowledged <= len(found) <= acknowledged + 1


async def test_without_a_log_flushed_records_survive_kill_9_and_others_do_not(tmp_path):
    run_and_kill(tmp_path, NO_LOG, after=60, flush_at=49)
    async with backend(tmp_path, **NO_LOG) as opened:
        assert opened.total_count() == 50


async def test_interval_zero_syncs_before_every_acknowledgement(tmp_path, faults):
    async with backend(tmp_path, **SYNCED) as opened:
        for n in range(5):
            await opened.put({"n": n})
            assert faults.calls.count("sync") == n + 1


async def test_a_longer_interval_syncs_within_it(tmp_path, faults):
    async with backend(tmp_path, **{**LOGGED, "wal_sync_interval": 0.2}) as opened:
        await opened.put({"n": 0})
        assert faults.calls.count("sync") == 0
        for _ in range(200):
            if faults.calls.count("sync"):
                break
            await asyncio.sleep(0.01)
        assert faults.calls.count("sync") == 1


async def test_waiting_puts_share_one_sync(tmp_path, faults):
    async with backend(tmp_path, **SYNCED) as opened:
        await opened.put({"n": -1})
        before = faults.calls.count("sync")
        await asyncio.gather(*(opened.put({"n": n}) for n in range(200)))
        assert faults.calls.count("sync") - before < 20


async def test_flush_empties_the_log(tmp_path):
    async with backend(tmp_path, **SYNCED) as opened:
        await opened.put({"n": 0})
        assert (await opened.stats())["wal_size"] > 0
        await opened.flush()
        stats = await opened.stats()
        assert (stats["wal_size"], stats["persisted_count"], stats["buffer_count"]) == (0, 1, 0)


@pytest.mark.parametrize("call", ["write", "sync"])
async def test_a_put_that_cannot_be_logged_raises_and_stores_nothing(tmp_path, faults, call):
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


async def test_after_a_failed_sync_the_records_go_to_the_table_first(tmp_path, faults):
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


async def test_a_failed_flush_is_tried_again_without_a_call(tmp_path, faults):
    async with backend(tmp_path, **SYNCED) as opened:
        await opened.put({"n": 0})
        faults.fail_always("sync_file", error=errno.ENOSPC)
        with pytest.raises(StorageError):
            await opened.flush()
        faults.heal()
        deadline = time.monotonic() + 10
        while (await opened.stats())["flush_error"] is not None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert (await opened.stats())["persisted_count"] == 1


async def test_a_flush_that_fails_raises_and_keeps_every_record(tmp_path, faults):
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


async def test_while_the_last_flush_has_failed_a_put_tries_it_again_first(tmp_path, faults):
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


async def test_close_raises_when_its_flush_fails_and_can_be_called_again(tmp_path, faults):
    opened = backend(tmp_path, **NO_LOG)
    await opened.put({"n": 0})
    faults.fail_always("sync_file", error=errno.ENOSPC)
    with pytest.raises(StorageError):
        await opened.close()
    assert await opened.get() == [{"n": 0}]
    faults.heal()
    await opened.close()
    with pytest.raises(BucketClosed):
        await opened.put({"n": 1})
    async with backend(tmp_path, **NO_LOG) as again:
        assert again.total_count() == 1


def segments(path: Path) -> list[Path]:
    return sorted((path / "wal").glob("*.wal"))


def killed_log(path: Path, options: dict = LOGGED) -> Path:
    """The only segment of a bucket whose writer was killed."""
    run_and_kill(path, options, after=20)
    (only,) = segments(path)
    return only


async def test_a_torn_tail_is_cut_off_and_a_copy_is_kept(tmp_path, caplog):
    segment = killed_log(tmp_path)
    whole = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b"garbage after the last whole frame")
    async with backend(tmp_path, **LOGGED) as opened:
        assert opened.total_count() > 20
        (copy,) = (tmp_path / "wal" / "trimmed").iterdir()
        assert copy.name.startswith(f"{segment.name}.{whole}.")
        assert copy.read_bytes() == b"garbage after the last whole frame"
    assert "cut off 34 bytes" in caplog.text


def test_damage_to_what_was_synced_raises_and_changes_nothing(tmp_path):
    segment = killed_log(tmp_path, SYNCED)
    data = bytearray(segment.read_bytes())
    data[SEGMENT_HEADER_SIZE + FRAME_HEADER_SIZE + 3] ^= 1
    segment.write_bytes(data)
    for _ in range(2):
        with pytest.raises(WALError, match=rf"{segment.name} is damaged: .* at byte \d+"):
            backend(tmp_path, **SYNCED)
    assert segment.read_bytes() == bytes(data)
    assert not (tmp_path / "wal" / "trimmed").exists()


def test_lance_backend_refuses_a_folder_with_a_log(tmp_path):
    killed_log(tmp_path)
    with pytest.raises(StorageError, match="open and close it once with PersistingBackend"):
        LanceBackend(bucket_id=0, storage_path=str(tmp_path))


async def test_a_log_is_recovered_even_when_it_is_switched_off(tmp_path):
    killed_log(tmp_path)
    async with backend(tmp_path, **NO_LOG) as opened:
        stats = await opened.stats()
        assert stats["persisted_count"] == stats["total_count"] > 20
        assert stats["buffer_count"] == 0
    assert segments(tmp_path) == []


async def test_a_full_log_starts_a_flush_and_never_grows_beyond_twice_its_size(tmp_path):
    limit = 64 * 1024
    options = {**LOGGED, "max_wal_size": limit, "flush_threshold": 1 << 30}
    async with backend(tmp_path, **options) as opened:
        for n in range(200):
            await opened.put_batch([{"n": n, "text": "x" * 100} for _ in range(20)])
            assert (await opened.stats())["wal_size"] <= 2 * limit + 4096
        assert (await opened.stats())["flush_count"] > 0


async def test_a_full_buffer_makes_puts_wait_for_the_flush(tmp_path):
    options = {**NO_LOG, "max_buffer_bytes": 10_000, "flush_threshold": 1 << 30}
    async with backend(tmp_path, **options) as opened:
        for n in range(100):
            await opened.put({"n": n, "text": "x" * 1000})
        stats = await opened.stats()
        assert stats["flush_count"] > 0
        assert stats["buffer_count"] < 20
        assert stats["total_count"] == 100
