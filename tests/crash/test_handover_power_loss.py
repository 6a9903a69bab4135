"""Power loss at every file call of a hand-over: all buckets get the rows or none, and once.

Where the rows replace the content, the old records are there or the new ones, and what was put
after those. In every state that power loss may leave, the buckets are opened one after the other,
as by new owners.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.crash.disk_model import (
    FIXED_LOSSES,
    LOSE_UNSYNCED,
    Loss,
    after_power_loss,
    sampled,
    write_tree,
)
from support.crash.recording import CrashPoint, RecordingFileSystem, promises_before
from support.filesystems import QuickFileSystem
from support.handover import hand_over, leave_notes, texts, written_notes
from support.spark.topics import content, ids, put, writer

from persisting import fs as filesystem
from persisting.bucket import handover_notes
from persisting.topic import handover
from persisting.topic.ownership import owned
from persisting.topic.spec import bucket_folder
from persisting.topic.topic_files import TopicFolder

HOME = "home"
"""The folder of the topic below the root of the recorded disk."""
LOGGED = {"enable_wal": True, "wal_sync_interval": 0.0}
HANDED = set(range(20))
"""The ids of the rows that are handed over; the queue puts others."""
REPLACED = set(range(90, 110))
"""The ids of the records that an overwrite replaces."""

History = Callable[[Path, RecordingFileSystem], None]


def open_buckets(home: Path) -> None:
    """Open every bucket and close it again, as a new owner of each."""
    topic = TopicFolder.open(home / "t")
    for bucket in topic.buckets:
        with owned(topic.folder, topic.config, bucket):
            pass


def live_owner(home: Path, disk: RecordingFileSystem) -> None:
    """A driver hands over files to a live queue, which puts before and after that."""
    with writer(home, local_socket=False) as queue:
        queue.put_batch(texts(100, 10))
        disk.promise(*range(100, 110))
        for bucket in (0, 1):  # by a driver that died before it synced them
            (bucket_folder(home / "t", bucket) / handover_notes.FOLDER).mkdir()
        hand_over(home / "t", texts(0, 20), "~anonymous")
        disk.promise(*HANDED)
        queue.put_batch(texts(110, 10))
        disk.promise(*range(110, 120))


def dead_driver(home: Path, disk: RecordingFileSystem) -> None:
    """The driver is killed after its decision has its name and before that name is synced."""
    topic = home / "t"
    name = leave_notes(topic, texts(0, 20), decided=False)
    (topic / handover_notes.FOLDER / f"{name}.decided").touch()
    open_buckets(home)
    disk.promise(*HANDED)


def withdrawn(home: Path, disk: RecordingFileSystem) -> None:
    """The driver gives up before its decision; then it repeats the write."""
    topic = home / "t"
    config, notes = written_notes(topic, texts(0, 20))
    fs = filesystem.current()
    name, lock = handover_notes.hold_lock(topic, fs)
    for bucket, note in notes.items():
        handover_notes.write_note(bucket_folder(topic, bucket), name, note, fs)
    open_buckets(home)
    for bucket in notes:
        handover_notes.remove_note(bucket_folder(topic, bucket), name, fs)
    handover_notes.forget(topic, name, fs)
    lock.free()
    handover.adopt(topic, config, notes)
    disk.promise(*HANDED)


def live_owner_replaces(home: Path, disk: RecordingFileSystem) -> None:
    """A driver replaces the content of a live queue, which puts before and after that."""
    with writer(home, local_socket=False) as queue:
        queue.put_batch(texts(100, 10))
        disk.promise(*range(100, 110))
        hand_over(home / "t", texts(0, 20), "w", overwrite=True)
        disk.promise(*HANDED)
        queue.put_batch(texts(110, 10))
        disk.promise(*range(110, 120))


def dead_driver_replaces(home: Path, disk: RecordingFileSystem) -> None:
    """The driver is killed after its decision has its name and before that name is synced; the next
    owners replace the content and put more."""
    topic = home / "t"
    name = leave_notes(topic, texts(0, 20), "w", overwrite=True, decided=False)
    (topic / handover_notes.FOLDER / f"{name}.decided").touch()
    with writer(home) as queue:
        queue.put_batch(texts(110, 10))
        disk.promise(*HANDED, *range(110, 120))


HISTORIES: dict[str, History] = {
    "live_owner": live_owner,
    "dead_driver": dead_driver,
    "withdrawn": withdrawn,
    "live_owner_replaces": live_owner_replaces,
    "dead_driver_replaces": dead_driver_replaces,
}
REPLACING = (live_owner_replaces, dead_driver_replaces)
"""Histories in which the rows replace the content."""


def recorded(folder: Path, history: History) -> RecordingFileSystem:
    """Record a history in a topic of two buckets."""
    home = folder / HOME
    home.mkdir(parents=True)
    put(home, texts(90, 10), buckets=2, **LOGGED)
    disk = RecordingFileSystem(folder)
    with filesystem.use(disk):
        history(home, disk)
    return disk


def check(
    disk: RecordingFileSystem, point: CrashPoint, loss: Loss, folder: Path, replaces: bool
) -> None:
    """Lose power at a point, open the buckets, and check what they hold; then repeat the write."""
    write_tree(after_power_loss(point.disk, loss), folder)
    home = folder / HOME
    when = f"power loss after {point.label!r}, {loss}"
    with filesystem.use(QuickFileSystem()):
        open_buckets(home)
        numbers = [record["id"] for records in content(home).values() for record in records]
        assert len(numbers) == len(set(numbers)), f"{when}: duplicated"
        found = set(numbers)
        promised = {*range(90, 100), *promises_before(disk.recording, point)}
        assert HANDED & found in (HANDED, set()), f"{when}: only some buckets have their rows"
        is_new = found >= HANDED
        if replaces and is_new:
            assert not REPLACED & found, f"{when}: old records beside those that replaced them"
            promised -= REPLACED
        assert promised <= found, f"{when}: lost"
        if replaces:
            again = hand_over(home / "t", texts(0, 20), "w", overwrite=True)
            assert again == (0 if is_new else 20), when
            assert set(ids(home)) == (found if is_new else HANDED), f"{when}: replaced twice"
        elif not is_new:
            assert hand_over(home / "t", texts(0, 20), "again") == 20, when
    shutil.rmtree(folder)


def explore(folder: Path, history: History, every: int = 1) -> None:
    """Check every loss at every point; with ``every``, one loss at some points."""
    disk = recorded(folder / "disk", history)
    points = disk.recording.crash_points
    replaces = history in REPLACING
    for number, point in enumerate(points[:-1:every]):
        losses = [*FIXED_LOSSES, sampled(f"{number}")]
        if every > 1:
            losses = [LOSE_UNSYNCED] if number % 2 else [losses[number // 2 % len(losses)]]
        for loss in losses:
            check(disk, point, loss, folder / "state", replaces)
    check(disk, points[-1], LOSE_UNSYNCED, folder / "state", replaces)
    print(f"{len(points)} crash points")


def test_an_owner_removes_no_answer_before_the_removal_of_its_note_is_durable(
    tmp_path: Path,
) -> None:
    bucket = tmp_path / "bucket"
    quick = QuickFileSystem()
    note, answer = handover_notes.Note(kind="adopt"), handover_notes.Answer(state="done")
    bucket.mkdir()
    handover_notes.write_note(bucket, "id", note, quick)
    handover_notes.write_answer(bucket, "id", answer, quick)
    disk = RecordingFileSystem(tmp_path)
    disk.remove(handover_notes.note_path(bucket, "id"))  # by the driver, which has not synced it
    handover_notes.clear_answers(bucket, disk)
    for point in disk.recording.crash_points:
        folder = point.disk.current["bucket"].current[handover_notes.FOLDER]
        comes_back = "id.note" in folder.durable
        assert "id.answer" in folder.current or not comes_back, point.label


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_power_loss_during_a_hand_over_leaves_all_rows_or_none(
    tmp_path: Path, history: History
) -> None:
    explore(tmp_path, history, every=10)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_power_loss_at_every_call_of_a_hand_over_leaves_all_rows_or_none(
    tmp_path: Path, history: History
) -> None:
    explore(tmp_path, history)
