"""A writer that repeats its puts after a crash stores each of them once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.crash.checks import (
    BUCKET,
    CrashableBucket,
    ExpectedRecords,
    Open,
    check_records,
    read_checked,
)
from support.crash.disk_model import FIXED_LOSSES, after_power_loss, sampled, write_tree
from support.crash.recording import QuickFileSystem, RecordingFileSystem
from support.crash.workloads import no_log, wal

from persisting import fs

PUTS = [
    [{"id": f"{number}.{i}", "n": i} for i in range(1 + 2 * (number % 3))] for number in range(7)
]


async def put_all(backend: Any, *, numbers: range) -> None:
    for number in numbers:
        await backend.put_once(PUTS[number], "writer", number)


def all_puts() -> ExpectedRecords:
    expected = ExpectedRecords()
    for records in PUTS:
        expected.add(*records)
    return expected


async def recorded_run(root: Path, open_bucket: Open) -> RecordingFileSystem:
    disk = RecordingFileSystem(root)
    with fs.use(disk):
        handle = CrashableBucket(root / BUCKET, open_bucket)
        await put_all(handle.backend, numbers=range(0, 2))
        await handle.backend.flush()
        await put_all(handle.backend, numbers=range(2, 4))
        await handle.drop()
        handle.open()
        await put_all(handle.backend, numbers=range(0, 6))
        await handle.backend.flush()
        await put_all(handle.backend, numbers=range(5, 7))
        await handle.backend.close()
    return disk


@pytest.mark.parametrize(
    "open_bucket", [pytest.param(wal(), id="wal"), pytest.param(no_log(), id="no_log")]
)
async def test_puts_repeated_after_power_loss_are_stored_once(
    tmp_path: Path, open_bucket: Open
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    crash_points = (await recorded_run(disk, open_bucket)).recording.crash_points
    expected, seen = all_puts(), set()
    for index, point in enumerate(crash_points):
        for loss in (*FIXED_LOSSES, sampled(index)):
            tree = after_power_loss(point.disk, loss)
            key = hash(frozenset(tree.items()))
            if key in seen:
                continue
            seen.add(key)
            root = tmp_path / "state"
            write_tree(tree, root)
            try:
                with fs.use(QuickFileSystem()):
                    await check_repeated(root / BUCKET, open_bucket, expected)
            except Exception as exc:
                raise AssertionError(f"point {index} ({point.label}), {loss}: {exc}") from exc
            shutil.rmtree(root)
    assert len(seen) > 40


async def check_repeated(folder: Path, open_bucket: Open, expected: ExpectedRecords) -> None:
    """Repeat all puts from the first, twice, with a kill in between."""
    handle = CrashableBucket(folder, open_bucket)
    check_records(await read_checked(handle.backend), expected, 0)
    await put_all(handle.backend, numbers=range(0, 5))
    await handle.drop()
    handle.open()
    assert handle.backend.last_number("writer") <= len(PUTS) - 1
    await put_all(handle.backend, numbers=range(0, 7))
    check_records(await read_checked(handle.backend), expected, len(expected.records))
    assert handle.backend.last_number("writer") == len(PUTS) - 1
    await handle.backend.close()
    handle.open()
    await put_all(handle.backend, numbers=range(0, 7))
    check_records(await read_checked(handle.backend), expected, len(expected.records))
    await handle.backend.close()
