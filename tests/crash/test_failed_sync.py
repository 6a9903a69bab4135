"""After a failed sync the kernel may drop the dirty pages, and the next sync of the file succeeds.

Nothing may be acknowledged because of that later sync.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.crash.checks import BUCKET, CrashableBucket, ExpectedRecords, Open, check_folder
from support.crash.density import every_nth_unless_nightly
from support.crash.disk_model import (
    FIXED_LOSSES,
    LOSE_UNSYNCED,
    after_power_loss,
    sampled,
    write_tree,
)
from support.crash.failing_syncs import FailingSyncs, PageDroppingDisk
from support.crash.recording import CrashPoint
from support.crash.workloads import lance, no_log, wal

from persisting import fs
from persisting.errors import StorageError


async def run(
    root: Path, open_bucket: Open, index: int, logged: bool
) -> tuple[Any, ExpectedRecords, bool]:
    """Put and flush with one failing sync, and repeat each failed call. Return the recording, the
    records, and whether the sync failed."""
    disk = FailingSyncs(root)
    with fs.use(disk):
        handle = CrashableBucket(root / BUCKET, open_bucket)
        disk.index, disk.syncs = index, 0
        expected = ExpectedRecords()
        for number in range(6):
            record = {"id": f"r{number}", "n": number}
            try:
                await handle.backend.put(record)
            except StorageError:
                await handle.backend.put(record)
            expected.add(record)
            if logged:
                disk.promise(record["id"])
            if number in (1, 3):
                try:
                    await handle.backend.flush()
                except StorageError:
                    await handle.backend.flush()
                disk.promise(record["id"])
        fired = disk.syncs > index
        try:
            await handle.backend.close()
        except StorageError:
            await handle.backend.close()
        disk.promise(record["id"])
    return disk.recording, expected, fired


async def check_promises(
    tmp_path: Path, recording: Any, expected: ExpectedRecords, open_bucket: Open
) -> None:
    """Lose everything unsynced at every point where something was promised."""
    promises: list[CrashPoint] = [
        m for m in recording.crash_points if m.label.startswith("promised")
    ]
    for point in promises:
        required = max(map(expected.position, recording.promises[: point.promised]))
        root = tmp_path / "lost"
        write_tree(after_power_loss(point.disk, LOSE_UNSYNCED), root)
        await check_folder(root / BUCKET, open_bucket, expected, required)
        shutil.rmtree(root)


@every_nth_unless_nightly(3)
@pytest.mark.parametrize(
    ("open_bucket", "logged"),
    [
        pytest.param(wal(), True, id="wal"),
        pytest.param(no_log(), False, id="no_log"),
        pytest.param(lance(), False, id="lance"),
    ],
)
async def test_sync_after_a_failed_sync_makes_nothing_durable(
    tmp_path: Path, open_bucket: Open, logged: bool, every: int
) -> None:
    for index in range(0, 1000, every):
        root = tmp_path / str(index)
        root.mkdir()
        recording, expected, fired = await run(root, open_bucket, index, logged)
        if not fired:
            assert index > 15
            return
        try:
            await check_promises(tmp_path, recording, expected, open_bucket)
        except Exception as exc:
            raise AssertionError(f"sync {index} failed: {exc}") from exc
    raise AssertionError("the fault was hit in every run")


@every_nth_unless_nightly(2)
async def test_open_that_fails_half_way_does_not_mark_the_bucket_clean(
    tmp_path: Path, every: int
) -> None:
    """Another compression makes a new version. If it can be neither synced nor removed, it may be
    torn."""
    for index in range(0, 1000, every):
        root = tmp_path / str(index)
        root.mkdir()
        disk = FailingSyncs(root)
        expected = ExpectedRecords()
        expected.add({"id": "r0", "n": 0})
        with fs.use(disk):
            handle = CrashableBucket(root / BUCKET, wal())
            await handle.backend.put(expected.records[0])
            await handle.backend.close()
            disk.index, disk.syncs, disk.lasting = index, 0, True
            try:
                handle.open(wal(compression="zstd"))
            except StorageError:
                opened = False
            else:
                opened = True
                await handle.drop()
            disk.index = None
            disk.disk.observe()
        for loss in (*FIXED_LOSSES, sampled(index)):
            lost = tmp_path / "lost"
            write_tree(after_power_loss(disk.disk.freeze(), loss), lost)
            try:
                await check_folder(lost / BUCKET, wal(), expected, 1)
            except Exception as exc:
                raise AssertionError(f"from sync {index} on, {loss}: {exc}") from exc
            shutil.rmtree(lost)
        if opened:
            assert index > 5
            return
    raise AssertionError("the fault was hit in every run")


async def test_model_of_a_failed_sync_loses_the_dropped_pages(tmp_path: Path) -> None:
    """The model itself: a second sync does not restore what the first sync dropped."""
    disk = PageDroppingDisk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(b"given up")
    disk.observe()
    disk.sync_folder(tmp_path)
    disk.drop_dirty_pages(path)
    path.write_bytes(b"given up, then more")
    disk.observe()
    disk.sync_file(path)
    left = after_power_loss(disk.freeze(), LOSE_UNSYNCED)
    assert left[Path("file")] == bytes(8) + b", then more"
