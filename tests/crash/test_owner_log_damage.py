"""Damage to a shared log, its notes and its folder: a bucket has everything, or it raises."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.crash.topics import (
    CrashableTopic,
    ExpectedTopic,
    RecordedTopic,
    Unrecorded,
    check_topic,
)

from persisting import fs
from persisting.bucket import log_note
from persisting.bucket.log_index import LogIndex, PlainRows, index_of
from persisting.errors import StorageError, WALError

pytestmark = pytest.mark.usefixtures("no_syncs")

BUCKETS = 3


class LeftTopic:
    """A topic whose owner was killed: nothing is in the tables, everything in one log."""

    def __init__(self, root: Path, expected: ExpectedTopic) -> None:
        self.root, self.expected = root, expected
        self.folder = root / "queues" / "topic"
        (self.log,) = (self.folder / log_note.LOGS_FOLDER).iterdir()

    @property
    def segments(self) -> list[Path]:
        return sorted(self.log.glob("*.wal"))

    def opened(self) -> CrashableTopic:
        return CrashableTopic(self.root, BUCKETS)

    async def read_one_by_one(self) -> dict[int, list[Any] | StorageError]:
        """Open each bucket by itself; return its records, or why it cannot be opened."""
        topic, found = self.opened(), {}
        for bucket in range(BUCKETS):
            try:
                found[bucket] = await (await topic.backend(bucket)).get(0, None)
            except StorageError as exc:
                found[bucket] = exc
        await topic.close()
        return found

    async def check_all(self) -> None:
        """Raise unless everything that was put is there."""
        await check_topic(self.root, self.expected, self.expected.puts)


@pytest.fixture
async def left(tmp_path: Path) -> LeftTopic:
    return await left_topic(tmp_path)


@pytest.fixture
async def segmented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LeftTopic:
    """The same, with a segment for each put."""
    monkeypatch.setattr("persisting.wal.log.SEGMENT_BYTES", 100)
    left = await left_topic(tmp_path)
    assert len(left.segments) == 4
    return left


async def left_topic(tmp_path: Path) -> LeftTopic:
    root = tmp_path / "disk"
    root.mkdir()
    topic = RecordedTopic(root, buckets=BUCKETS, recorder=Unrecorded())
    await topic.put()
    await topic.put(0, 1, rows=2)
    await topic.single(2)
    await topic.put()
    await topic.topic.drop()
    return LeftTopic(root, topic.expected)


def frames_by_bucket(log: Path) -> dict[int, list[bytes] | WALError]:
    """Return what recovery would replay for each bucket, or why it refuses."""
    index, found = LogIndex(log, fs.current()), {}
    for bucket in range(BUCKETS):
        try:
            index.check(bucket, 0)
            found[bucket] = [
                part.values if isinstance(part, PlainRows) else bytes(part.frame.payload)
                for part in index.blocks(bucket, 0)
            ]
        except WALError as exc:
            found[bucket] = exc
    return found


def last_append(left: LeftTopic) -> int:
    """Return where the last put begins in the log: nothing after it proves that it was synced."""
    data = left.segments[-1].read_bytes()
    return data.rindex(b"PSTf")


def test_flipped_bit_anywhere_in_a_shared_log_is_detected(left: LeftTopic) -> None:
    (segment,) = left.segments
    data = bytearray(segment.read_bytes())
    whole, tail = frames_by_bucket(left.log), last_append(left)
    rng = random.Random(1)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        segment.write_bytes(damaged)
        for bucket, found in frames_by_bucket(left.log).items():
            if isinstance(found, WALError) or found == whole[bucket]:
                continue
            # As after a torn write, and in all buckets alike.
            assert position >= tail, f"a flip at {position} went unnoticed in bucket {bucket}"
            assert found == whole[bucket][:-1], f"a flip at {position}, bucket {bucket}"


async def test_bucket_opens_with_everything_or_raises_after_a_flipped_bit(left: LeftTopic) -> None:
    (segment,) = left.segments
    data, tail = segment.read_bytes(), last_append(left)
    rng = random.Random(2)
    for position in rng.sample(range(tail), k=12):
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        segment.write_bytes(damaged)
        found = await left.read_one_by_one()
        assert all(isinstance(rows, WALError) for rows in found.values()), position
    segment.write_bytes(data)
    await left.check_all()


async def test_bucket_whose_table_is_ahead_of_the_damage_opens(tmp_path: Path) -> None:
    left = await left_topic(tmp_path)
    (segment,) = left.segments
    data = segment.read_bytes()
    topic = left.opened()
    await topic.backend(0)  # its table holds everything now
    await topic.drop()
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    segment.write_bytes(damaged)
    found = await left.read_one_by_one()
    assert [row["id"] for row in found[0]] == [row["id"] for row in left.expected.rows[0]]
    assert isinstance(found[1], WALError)
    segment.write_bytes(data)
    await left.check_all()


async def test_restored_segment_is_read_again_even_with_the_same_size_and_time(
    left: LeftTopic,
) -> None:
    (segment,) = left.segments
    data, before = segment.read_bytes(), segment.stat()
    segment.write_bytes(data[:60] + b"x" + data[61:])
    os.utime(segment, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert isinstance((await left.read_one_by_one())[0], WALError)
    segment.write_bytes(data)
    os.utime(segment, ns=(before.st_atime_ns, before.st_mtime_ns))
    await left.check_all()


async def test_row_that_rots_after_the_log_was_indexed_is_detected(tmp_path: Path) -> None:
    """The index is kept for the next bucket, which may be opened much later."""
    topic = RecordedTopic(tmp_path, buckets=BUCKETS, recorder=Unrecorded())
    await topic.put()
    for bucket in range(BUCKETS):
        await topic.single(bucket, text="some text")
    await topic.put()
    await topic.topic.drop()
    left = LeftTopic(tmp_path, topic.expected)
    (segment,) = left.segments
    data, before = segment.read_bytes(), segment.stat()
    first = left.opened()
    await first.backend(0)
    rotten = bytearray(data)
    rotten[data.rindex(b"some text")] ^= 1
    for content, is_whole in ((rotten, False), (data, True)):
        segment.write_bytes(content)
        os.utime(segment, ns=(before.st_atime_ns, before.st_mtime_ns))
        if is_whole:
            await first.drop()
            await left.check_all()
        else:
            with pytest.raises(WALError, match="has changed"):
                await first.backend(2)


@pytest.mark.parametrize("cut", [1, 20, 60, 90])
async def test_torn_tail_loses_at_most_the_last_put_in_all_its_buckets(
    left: LeftTopic, cut: int
) -> None:
    (segment,) = left.segments
    data = segment.read_bytes()
    assert len(data) - last_append(left) > cut
    segment.write_bytes(data[:-cut])
    *acknowledged, _ = left.expected.puts
    found = await check_topic(left.root, left.expected, acknowledged)
    assert sum(map(len, found.values())) == sum(map(len, left.expected.rows.values())) - BUCKETS


async def test_missing_segment_raises_and_loses_nothing(
    segmented: LeftTopic, tmp_path: Path
) -> None:
    for segment in segmented.segments[:-1]:
        segment.rename(tmp_path / segment.name)
        found = await segmented.read_one_by_one()
        for bucket, rows in found.items():
            whole = [row["id"] for row in segmented.expected.rows[bucket]]
            is_whole = isinstance(rows, list) and [row["id"] for row in rows] == whole
            assert is_whole or isinstance(rows, WALError), (segment, bucket, rows)
        assert any(isinstance(rows, WALError) for rows in found.values())
        (tmp_path / segment.name).rename(segment)
    await segmented.check_all()


@pytest.mark.parametrize("kind", ["copied", "renamed", "foreign"])
async def test_copied_or_renamed_segment_raises_and_loses_nothing(
    segmented: LeftTopic, kind: str
) -> None:
    second = segmented.segments[1]
    sequence, salt = second.name.split("-")
    name = {
        "copied": f"{int(sequence) + 1:020d}-{salt}",
        "renamed": f"{sequence}-{int(salt.split('.')[0], 16) ^ 1:08x}.wal",
        "foreign": f"{second.stem} (copy).wal",
    }[kind]
    if kind == "renamed":
        second.rename(second.with_name(name))
    else:
        shutil.copy(second, second.with_name(name))
    for rows in (await segmented.read_one_by_one()).values():
        assert isinstance(rows, WALError), rows
    if kind == "renamed":
        second.with_name(name).rename(second)
    else:
        second.with_name(name).unlink()
    await segmented.check_all()


async def test_missing_log_folder_raises_and_a_restored_one_is_read(left: LeftTopic) -> None:
    elsewhere = left.root / "moved"
    left.log.rename(elsewhere)
    for rows in (await left.read_one_by_one()).values():
        assert isinstance(rows, WALError)
        assert "missing" in str(rows)
    elsewhere.rename(left.log)
    await left.check_all()


async def test_damaged_note_stops_only_its_own_bucket(left: LeftTopic) -> None:
    note = left.folder / "bucket_1" / log_note.FILE
    data = note.read_bytes()
    rng = random.Random(3)
    for position in rng.sample(range(len(data)), k=16):
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(7)
        note.write_bytes(damaged)
        try:
            named = log_note.noted_log(note.parent, fs.current())
        except StorageError:
            continue
        assert named is not None
        if named == left.log:
            continue
        with pytest.raises(WALError, match="missing"):
            index_of(named, fs.current())
    note.write_bytes(b'{"format":1,"log":')
    found = await left.read_one_by_one()
    assert isinstance(found[1], WALError)
    for bucket in (0, 2):
        whole = [row["id"] for row in left.expected.rows[bucket]]
        assert [row["id"] for row in found[bucket]] == whole
    assert left.log.is_dir()
    note.write_bytes(data)
    await left.check_all()


async def test_leftover_files_of_a_removed_log_are_removed(left: LeftTopic) -> None:
    """Power loss may undo the removal of any file but the lock."""
    topic = left.opened()
    kept = left.root / "kept"
    shutil.copytree(left.log, kept)
    for bucket in range(BUCKETS):
        await topic.backend(bucket)
    await topic.close()
    assert not left.log.exists()
    kept.rename(left.log)
    (left.log / ".lock").unlink()
    await left.check_all()
    assert not left.log.exists()
