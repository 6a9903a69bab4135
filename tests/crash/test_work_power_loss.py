"""Power loss and failed writes at every file call of a work group's journal."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.crash.disk_model import (
    LOSE_UNSYNCED,
    UNDO_REMOVALS,
    after_power_loss,
    sampled,
    write_tree,
)
from support.crash.recording import CrashPoint, RecordingFileSystem, promises_before
from support.faults import FaultyFileSystem
from support.filesystems import QuickFileSystem

from persisting import fs as filesystem
from persisting.backends.persisting import PersistingBackend
from persisting.bucket.group_offsets import read_committed
from persisting.errors import StorageError, WALError
from persisting.queue import read_queue, write_queue
from persisting.work import journal
from persisting.work.group_storage import FolderGroup, journal_folder
from persisting.work.group_values import Letter
from persisting.work.journal import replay
from persisting.work.keeper import Keeper

TOPIC = "home/topic"
REDRIVEN = {(0, 0): 1, (1, 0): 2}
"""Positions of records that are rejected, and the numbers of their dead letters."""
pytestmark = pytest.mark.asyncio


class Group:
    """A keeper whose journal is recorded, and what it has promised."""

    def __init__(self, disk: Path) -> None:
        self.topic = disk / TOPIC
        self.topic.mkdir(parents=True)
        self.recorder = RecordingFileSystem(disk)
        self.keeper: Keeper
        self.open()

    def open(self) -> None:
        self.keeper = Keeper(FolderGroup(self.topic, "g", self.recorder))
        for bucket in (0, 1):
            self.keeper.set_span(bucket, 0, 50)

    async def claim(self, count: int, lease: float = 60.0) -> list[Any]:
        """Claim ``count`` records of each bucket."""
        leases = []
        for other in (1, 0):
            leases += (await self.keeper.claim("m", count, lease, 0, without=[other]))[0]
        self.recorder.promise(
            *(("claimed", lease.bucket, lease.offset, lease.attempt) for lease in leases)
        )
        return leases

    async def ack(self, leases: list[Any]) -> None:
        assert await self.keeper.ack([lease[:3] for lease in leases]) == []
        self.recorder.promise(*(("finished", lease.bucket, lease.offset) for lease in leases))

    def reopen(self) -> None:
        self.keeper.close()
        self.open()


async def claims_and_acks(group: Group) -> None:
    first = await group.claim(3)
    await group.ack(first[:3])
    again = await group.claim(1, lease=0.0)
    await group.claim(2)
    await group.ack(first[3:5])
    assert again


async def reopened(group: Group) -> None:
    leases = await group.claim(2)
    await group.ack(leases[:1])
    group.reopen()
    await group.ack(leases[1:2])
    await group.claim(1)


async def dead_letters(group: Group) -> None:
    leases = await group.claim(2)
    with group.keeper._guard:
        for lease in leases[::2]:
            group.keeper.state.reject(group.keeper.clock.now(), *lease[:3], "broken")
    batch = await group.keeper.next_batch(10, 0)
    group.recorder.promise(("batch", batch[-1].number))
    await group.keeper.letters_stored([record.position for record in batch])
    group.recorder.promise(*(("finished", *record.position) for record in batch))
    await group.ack(leases[1::2])


async def redriven(group: Group) -> None:
    await dead_letters(group)
    keeper = group.keeper
    letters = [Letter(letter, 0, *position, 0) for position, letter in REDRIVEN.items()]
    keeper.write_floors()
    assert await keeper.redrive(letters) == 2
    group.recorder.promise(*(("redriven", letter, *p) for p, letter in REDRIVEN.items()))
    group.reopen()
    assert await group.keeper.redrive(letters) == 0
    leases = await group.claim(1)
    assert sorted(lease[:2] for lease in leases) == [(0, 0), (1, 0)]
    assert await group.keeper.ack([leases[0][:3]]) == []


def check(group: Group, point: CrashPoint, loss: Any, folder: Path) -> None:
    write_tree(after_power_loss(point.disk, loss), folder)
    place = journal_folder(folder / TOPIC, "g")
    place.mkdir(parents=True, exist_ok=True)
    state, log = replay(place, QuickFileSystem())
    log.close()
    when = f"after {point.label!r}, {loss}"
    promised = list(promises_before(group.recorder.recording, point))
    finished = {promise[1:] for promise in promised if promise[0] == "finished"}
    finished -= {promise[2:] for promise in promised if promise[0] == "redriven"}
    for promise in promised:
        if promise[0] == "batch":
            assert state.batch >= promise[1], when
            continue
        if promise[0] == "redriven":
            _, letter, number, offset = promise
            assert state.was_redriven(letter), f"{when}: it could be re-driven twice"
            floor = read_committed(place.parent, number, QuickFileSystem()).offset
            assert floor <= offset or state.bucket(number).records.find(offset) is None, when
            continue
        _, number, offset, *attempt = promise
        bucket = state.bucket(number)
        assert offset < bucket.next, when
        row = bucket.records.find(offset)
        if (number, offset) in finished:
            letter = REDRIVEN.get((number, offset), 0)  # even if its call had not returned yet
            again = row is not None and not state.was_redriven(letter)
            assert not again, f"{when}: offset {offset} would be delivered again"
        elif attempt and row is not None and (number, offset) not in REDRIVEN:
            assert bucket.records.attempts[row] >= attempt[0], when


@pytest.mark.parametrize("work", [claims_and_acks, reopened, dead_letters, redriven])
@pytest.mark.parametrize("limit", [0, journal.SEGMENT_BYTES])
async def test_power_loss_takes_back_nothing_that_was_promised(
    work: Callable[[Group], Awaitable[None]],
    limit: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "segment_limit", lambda _: limit)
    group = Group(tmp_path / "disk")
    await work(group)
    group.keeper.close()
    points = group.recorder.recording.crash_points
    assert len(points) > 10
    for number, point in enumerate(points):
        for kind, loss in enumerate((LOSE_UNSYNCED, UNDO_REMOVALS, sampled(number))):
            check(group, point, loss, tmp_path / f"after-{number}-{kind}")


class StalledOwner(RecordingFileSystem):
    """Keeps one thread waiting before it syncs a new version of a table."""

    def __init__(self, disk: Path) -> None:
        self.owner: threading.Thread | None = None
        self.waits, self.may_go_on = threading.Event(), threading.Event()
        super().__init__(disk)

    def sync_file(self, path: Path) -> None:
        if threading.current_thread() is self.owner and path.suffix == ".manifest":
            self.waits.set()
            self.may_go_on.wait()
        super().sync_file(path)


async def finish_all(where: dict[str, str], works: bool) -> list[int]:
    """Get everything that a group has not got yet, and acknowledge or commit it."""
    if works:
        member = await read_queue(**where, group="g", mode="work")
        deliveries = await member.fetch(9, wait=True, timeout=60)
        await member.ack(deliveries)
        await member.close()
        return [delivery.record["id"] for delivery in deliveries]
    reader = await read_queue(**where, group="g")
    records = await reader.get(9, wait=True, timeout=60)
    await reader.commit()
    await reader.close()
    return [record["id"] for record in records]


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("logged", [True, False])
async def test_records_of_a_version_that_its_owner_has_not_synced_are_not_lost(
    logged: bool, works: bool, tmp_path: Path
) -> None:
    home = tmp_path / "disk" / "home"
    home.mkdir(parents=True)
    options = {"enable_wal": True, "wal_sync_interval": 0.0} if logged else {}
    disk = StalledOwner(tmp_path / "disk")
    with filesystem.use(disk):
        where = {"topic": "t", "storage_path": str(home)}
        queue = await write_queue(
            **where, backend="persisting", num_buckets=1, backend_options=options
        )
        await queue.put({"id": 0})
        await queue.close()
        owner = PersistingBackend(bucket_id=0, storage_path=str(home / "t" / "bucket_0"))
        await owner.put_batch([{"id": 1}, {"id": 2}])
        disk.owner = threading.Thread(target=owner.bucket.flusher.flush)
        disk.owner.start()
        try:
            await asyncio.to_thread(disk.waits.wait)
            assert await finish_all(where, works) == [0, 1, 2]
            disk.promise("acknowledged")
            point = disk.recording.crash_points[-1]
        finally:
            disk.may_go_on.set()
            disk.owner.join()
        await owner.close()

    write_tree(after_power_loss(point.disk, LOSE_UNSYNCED), tmp_path / "after")
    where = {"topic": "t", "storage_path": str(tmp_path / "after" / "home")}
    with filesystem.use(QuickFileSystem()):
        queue = await write_queue(**where)
        await queue.put([{"id": 3}, {"id": 4}])
        await queue.flush()
        assert await finish_all(where, works) == [3, 4]
        await queue.close()


@pytest.mark.parametrize("call", ["write", "sync"])
async def test_a_failed_journal_acknowledges_nothing_and_the_next_keeper_continues(
    call: str, tmp_path: Path
) -> None:
    faulty = FaultyFileSystem()
    keeper = Keeper(FolderGroup(tmp_path, "g", faulty))
    keeper.set_span(0, 0, 10)
    leases, _ = await keeper.claim("m", 4, 60.0, 0)
    assert await keeper.ack([leases[0][:3]]) == []
    faulty.fail_always(call)
    with pytest.raises(WALError, match="the log in"):
        await keeper.ack([leases[1][:3]])
    with pytest.raises(StorageError):
        await keeper.claim("m", 1, 60.0, 0)
    faulty.heal()
    keeper.close()

    following = Keeper(FolderGroup(tmp_path, "g", faulty))
    following.set_span(0, 0, 10)
    assert await following.ack([leases[2][:3]]) == []
    assert following.state.bucket(0).records.find(leases[0].offset) is None
    assert await following.ack([leases[1][:3]]) == []
    assert [lease.offset for lease in (await following.claim("m", 10, 60.0, 0))[0]] == [
        4,
        5,
        6,
        7,
        8,
        9,
    ]
    following.close()


async def test_a_failed_keeper_is_not_followed_while_it_writes_a_floor(tmp_path: Path) -> None:
    class Stalled(FaultyFileSystem):
        waits, may_go_on = threading.Event(), threading.Event()

        def write_file(self, path: Path, data: bytes) -> None:
            self.waits.set()
            self.may_go_on.wait()
            super().write_file(path, data)

    stalled = Stalled()
    keeper = Keeper(FolderGroup(tmp_path, "g", stalled))
    keeper.set_span(0, 0, 2)
    leases, _ = await keeper.claim("m", 2, 60.0, 0)
    assert await keeper.ack([leases[0][:3]]) == []
    writing = threading.Thread(target=keeper.write_floors)
    writing.start()
    await asyncio.to_thread(stalled.waits.wait)
    stalled.fail_always("sync")
    with pytest.raises(WALError):
        await keeper.ack([leases[1][:3]])
    stalled.heal()
    closing = threading.Thread(target=keeper.close)
    closing.start()
    await asyncio.to_thread(closing.join, 0.5)
    try:
        # The next keeper may lower the floor for a re-driven record, which retention must not take.
        assert closing.is_alive()
    finally:
        stalled.may_go_on.set()
        closing.join()
        writing.join()
    assert read_committed(tmp_path / "groups" / "g", 0, QuickFileSystem()).offset == 1
    Keeper(FolderGroup(tmp_path, "g", QuickFileSystem())).close()


async def test_a_keeper_whose_lock_takes_no_note_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    keeper = Keeper(FolderGroup(tmp_path, "g", QuickFileSystem()))
    with monkeypatch.context() as full:
        full.setattr("persisting.lock.LockedFile.write_note", refuse)
        keeper.close()
    Keeper(FolderGroup(tmp_path, "g", QuickFileSystem())).close()


async def test_a_clock_that_goes_back_neither_loses_nor_prolongs_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from persisting.work import clock

    keeper = Keeper(FolderGroup(tmp_path, "g", QuickFileSystem()))
    keeper.set_span(0, 0, 2)
    leases, _ = await keeper.claim("m", 2, 60.0, 0)
    assert await keeper.ack([leases[0][:3]]) == []
    keeper.close()
    hour_ago = clock.time.time_ns() - 3600 * 10**9
    monkeypatch.setattr(clock.time, "time_ns", lambda: hour_ago)
    following = Keeper(FolderGroup(tmp_path, "g", QuickFileSystem()))
    following.set_span(0, 0, 2)
    assert (await following.claim("m", 2, 60.0, 0))[0] == []
    records = following.state.bucket(0).records
    row = records.find(leases[1].offset)
    assert row is not None
    assert 0 < records.due[row] - following.clock.now() <= 60_000_000
    following.close()


@pytest.mark.nightly
async def test_the_state_of_many_records_in_flight_is_small(tmp_path: Path) -> None:
    keeper = Keeper(FolderGroup(tmp_path, "g", QuickFileSystem()))
    keeper.set_span(0, 0, 100_000)
    for _ in range(10):
        leases, _ = await keeper.claim("m", 10_000, 60.0, 0)
        assert await keeper.ack([lease[:3] for lease in leases[::7]]) == []
    stats = await keeper.stats()
    assert stats["in_flight"] > 80_000
    assert stats["state_bytes"] / stats["in_flight"] < 100
    assert await keeper.release_all() == stats["in_flight"]
    again, _ = await keeper.claim("m", 10_000, 60.0, 0)
    while again:
        assert await keeper.ack([lease[:3] for lease in again]) == []
        again, _ = await keeper.claim("m", 10_000, 60.0, 0)
    assert (await keeper.stats())["state_bytes"] < 10_000
    keeper.close()
