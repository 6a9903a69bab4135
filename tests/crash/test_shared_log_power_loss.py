"""Power loss at every file call of two buckets that share a log: each list put is in both buckets
or in none, nothing acknowledged is lost, and both buckets open."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.crash.density import every_nth_unless_nightly
from support.crash.disk_model import (
    LOSE_UNSYNCED,
    UNDO_REMOVALS,
    after_power_loss,
    sampled,
    write_tree,
)
from support.crash.recording import CrashPoint, RecordingFileSystem, promises_before
from support.filesystems import QuickFileSystem

from persisting import fs
from persisting.backends.log_puts import put_to_log
from persisting.backends.persisting import new_owner_log
from persisting.bucket import log_index
from persisting.queue import PersistingBackend

TOPIC = "home/topic"
BUCKETS = (0, 1)
SINGLE = 100
"""The ids of single puts begin here; lower ids are list puts, with one record for each bucket."""


class Owner:
    """Writes to two buckets of one log, and notes what was acknowledged."""

    def __init__(self, disk: Path, **options: Any) -> None:
        self.topic = disk / TOPIC
        self.topic.mkdir(parents=True)
        self.recorder = RecordingFileSystem(disk)
        self.options = {
            "enable_wal": True,
            "wal_sync_interval": 0.0,
            "flush_interval": None,
            **options,
        }
        self.durable = self.options["wal_sync_interval"] == 0.0
        self.order: dict[int, list[int]] = {number: [] for number in BUCKETS}
        self.backends: dict[int, PersistingBackend] = {}
        with fs.use(self.recorder):
            self.log = new_owner_log(self.topic, **self.options)
        for number in BUCKETS:
            self.open(number)

    def open(self, number: int) -> None:
        folder = str(self.topic / f"bucket_{number}")
        with fs.use(self.recorder):
            self.backends[number] = PersistingBackend(
                number, folder, owner_log=self.log, **self.options
            )

    async def put_list(self, record: int) -> None:
        parts = []
        for number, backend in self.backends.items():
            self.order[number].append(record)
            parts.append((backend.bucket, [{"id": record}]))
        await put_to_log(parts)
        self._promise(*((number, record) for number in self.backends))

    async def put(self, number: int, record: int) -> None:
        self.order[number].append(record)
        await self.backends[number].put({"id": record})
        self._promise((number, record))

    def _promise(self, *what: tuple[int, int]) -> None:
        if self.durable:
            self.recorder.promise(*what)

    async def flush(self, number: int) -> None:
        await self.backends[number].flush()

    async def close_bucket(self, number: int) -> None:
        await self.backends.pop(number).close()

    async def close(self) -> None:
        for number in list(self.backends):
            await self.close_bucket(number)
        self.log.retire()


Work = Callable[[Owner], Awaitable[None]]


async def flushes(owner: Owner) -> None:
    """One bucket is flushed while the log has records of the other."""
    await owner.put_list(1)
    await owner.put(0, SINGLE)
    await owner.flush(0)
    await owner.put_list(2)
    await owner.flush(1)
    await owner.flush(0)
    await owner.put_list(3)


async def reopened_bucket(owner: Owner) -> None:
    """A bucket is closed and opened again by the same owner."""
    await owner.put_list(1)
    await owner.close_bucket(1)
    await owner.put(0, SINGLE)
    owner.open(1)
    await owner.put_list(2)
    await owner.flush(1)
    await owner.put(1, SINGLE + 1)


async def rotation(owner: Owner) -> None:
    """Each put begins a segment, and a flush releases several."""
    owner.log.group_commit._log._segment_bytes = 1
    await owner.put_list(1)
    await owner.put(1, SINGLE)
    await owner.put_list(2)
    await owner.flush(0)
    await owner.flush(1)
    await owner.put_list(3)


async def check(owner: Owner, point: CrashPoint, loss: Any, folder: Path) -> None:
    """Open both buckets as power loss left them, and compare."""
    write_tree(after_power_loss(point.disk, loss), folder)
    found: dict[int, list[int]] = {}
    with fs.use(QuickFileSystem()):
        for number in reversed(BUCKETS):
            backend = PersistingBackend(number, str(folder / TOPIC / f"bucket_{number}"))
            found[number] = [record["id"] for record in await backend.get()]
            await backend.close()
    place = f"after {point.label!r}, {loss}: {found}"
    for number, ids in found.items():
        assert ids == owner.order[number][: len(ids)], place
    for number, record in promises_before(owner.recorder.recording, point):  # type: ignore[misc]
        assert record in found[number], place
    lists = [[record for record in ids if record < SINGLE] for ids in found.values()]
    assert lists[0] == lists[1], place
    shutil.rmtree(folder)


async def explore(tmp_path: Path, work: Work, every: int, **options: Any) -> None:
    owner = Owner(tmp_path / "disk", **options)
    await work(owner)
    await owner.close()
    points = owner.recorder.recording.crash_points
    seen: set[Any] = set()
    checked = 0
    for index, point in list(enumerate(points))[::every]:
        for loss in (LOSE_UNSYNCED, UNDO_REMOVALS, sampled((work.__name__, index))):
            state = (point.promised, repr(sorted(after_power_loss(point.disk, loss).items())))
            if state in seen:
                continue
            seen.add(state)
            await check(owner, point, loss, tmp_path / "state")
            log_index._indexes.clear()
            checked += 1
    assert checked > 40 / every


@every_nth_unless_nightly(3)
@pytest.mark.parametrize("work", [flushes, reopened_bucket, rotation])
async def test_acknowledged_list_put_survives_power_loss_in_all_its_buckets(
    tmp_path: Path, work: Work, every: int
) -> None:
    await explore(tmp_path, work, every)


@every_nth_unless_nightly(3)
@pytest.mark.parametrize("work", [flushes, reopened_bucket, rotation])
async def test_power_loss_with_a_sync_interval_leaves_list_puts_whole(
    tmp_path: Path, work: Work, every: int
) -> None:
    """The log is synced before a table commits a part of a put."""
    await explore(tmp_path, work, every, wal_sync_interval=60.0)
