"""Buckets that share one log: a crash at any time leaves each list put whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.buckets import until_freed
from support.log_builder import FailingFileSystem, content, segments_in
from support.waiting import until

from persisting import fs
from persisting.backends.log_puts import put_to_log
from persisting.backends.persisting import new_owner_log
from persisting.bucket import log_note
from persisting.bucket.log_index import LogIndex, PlainRows
from persisting.bucket.owner_log import OwnerLog, remove_unused
from persisting.bucket.table_writer import TableWriter
from persisting.errors import WALError
from persisting.fs import FileSystem
from persisting.queue import PersistingBackend
from persisting.wal.frame import (
    FRAME_HEADER_SIZE,
    SEGMENT_HEADER_SIZE,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
)

OPTIONS: dict[str, Any] = {
    "enable_wal": True,
    "wal_sync_interval": 0.0,
    "flush_interval": None,
    "flush_threshold": 10**6,
}


def open_bucket(topic: Path, number: int, log: OwnerLog, **options: Any) -> PersistingBackend:
    given = {**OPTIONS, **options}
    return PersistingBackend(number, str(topic / f"bucket_{number}"), owner_log=log, **given)


@asynccontextmanager
async def owner(
    topic: Path, *numbers: int, **options: Any
) -> AsyncIterator[tuple[OwnerLog, list[Any]]]:
    """Open a log and buckets that write to it; close them at the end."""
    log = new_owner_log(topic, **{**OPTIONS, **options})
    backends = [open_bucket(topic, number, log, **options) for number in numbers]
    try:
        yield log, backends
    finally:
        for backend in backends:
            if backend is not None:
                await backend.close()
        log.retire()


async def put_list(backends: list[Any], *ids: int, producer: Any = None) -> None:
    """Put one record into each bucket, as one entry."""
    rows = [[{"id": number}] for number in ids]
    await put_to_log(list(zip([b.bucket for b in backends], rows, strict=True)), producer)


def crashed(topic: Path, name: str = "crashed") -> Path:
    """Copy a topic as a killed process leaves it."""
    return Path(shutil.copytree(topic, topic.parent / name))


def log_folder(topic: Path) -> Path:
    (folder,) = (topic / log_note.LOGS_FOLDER).iterdir()
    return folder


async def ids_in(topic: Path, number: int) -> list[int]:
    """Open a bucket after a crash, and return what it holds."""
    backend = PersistingBackend(number, str(topic / f"bucket_{number}"), flush_interval=None)
    try:
        return [record["id"] for record in await backend.get()]
    finally:
        await backend.close()


async def refuses(topic: Path, number: int, match: str) -> None:
    """Check that a bucket does not open, and that nothing is changed by the attempt."""
    log, note = content(topic / "log"), topic / f"bucket_{number}" / log_note.FILE
    with pytest.raises(WALError, match=match):
        await ids_in(topic, number)
    assert content(topic / "log") == log
    assert note.exists()


# All or nothing


async def test_records_of_all_buckets_survive_a_kill(tmp_path: Path) -> None:
    topic = tmp_path / "topic"
    async with owner(topic, 0, 1, 2) as (_, backends):
        await put_list(backends, 1, 2, 3)
        for number, backend in enumerate(backends):
            await backend.put({"id": 10 + number})
        await put_list(backends[:2], 4, 5)
        copy = crashed(topic)
    for found in (copy, topic):
        assert await ids_in(found, 0) == [1, 10, 4]
        assert await ids_in(found, 1) == [2, 11, 5]
        assert await ids_in(found, 2) == [3, 12]


async def test_log_cut_at_any_byte_holds_a_list_put_whole_or_not_at_all(tmp_path: Path) -> None:
    topic = tmp_path / "topic"
    async with owner(topic, 0, 1) as (log, backends):
        await put_list(backends, 1, 2)
        before = segments_in(log.folder)[0].stat().st_size
        await put_list(backends, 3, 4)
        copy = crashed(topic)
    (segment,) = segments_in(log_folder(copy))
    data = segment.read_bytes()
    for length in [*range(before, len(data), 23), len(data) - 1, len(data)]:
        folder = crashed(copy, f"cut-{length}")
        (segment,) = segments_in(log_folder(folder))
        segment.write_bytes(data[:length])
        whole = length == len(data)
        assert await ids_in(folder, 0) == ([1, 3] if whole else [1]), length
        assert await ids_in(folder, 1) == ([2, 4] if whole else [2]), length
        shutil.rmtree(folder)


async def test_flush_of_one_bucket_keeps_the_log_for_the_others(tmp_path: Path) -> None:
    topic = tmp_path / "topic"
    async with owner(topic, 0, 1) as (log, backends):
        await put_list(backends, 1, 2)
        await backends[0].flush()
        assert segments_in(log.folder) != []
        await put_list(backends, 3, 4)
        copy = crashed(topic)
        for backend in backends:
            await backend.flush()
        assert segments_in(log.folder) == []
    assert await ids_in(copy, 1) == [2, 4]
    assert await ids_in(copy, 0) == [1, 3]


async def test_numbered_put_is_stored_once_when_repeated_after_a_kill(tmp_path: Path) -> None:
    topic = tmp_path / "topic"
    async with owner(topic, 0, 1) as (_, backends):
        await put_list(backends, 1, 2, producer=("producer", 1))
        await backends[1].flush()
        copy = crashed(topic)
    async with owner(copy, 0, 1) as (_, backends):
        await put_list(backends, 1, 2, producer=("producer", 1))
        await put_list(backends, 3, 4, producer=("producer", 2))
        again = crashed(copy, "again")
    assert await ids_in(again, 0) == [1, 3]
    assert await ids_in(again, 1) == [2, 4]


# Sequences


async def test_bucket_with_higher_sequences_leaves_a_gap_that_is_recovered(tmp_path: Path) -> None:
    """Its table is at a higher sequence than the new log, which skips to there."""
    topic = tmp_path / "topic"
    async with owner(topic, 1) as (_, (backend,)):
        for number in range(40):
            await backend.put({"id": number})
    async with owner(topic, 0) as (log, backends):
        await backends[0].put({"id": 100})
        backends.append(open_bucket(topic, 1, log))
        await put_list(backends, 101, 102)
        assert len(segments_in(log.folder)) == 2
        copy = crashed(topic)
    assert await ids_in(copy, 0) == [100, 101]
    assert await ids_in(copy, 1) == [*range(40), 102]


async def test_bucket_opened_twice_by_one_owner_keeps_its_order(tmp_path: Path) -> None:
    topic = tmp_path / "topic"
    async with owner(topic, 0, 1) as (log, backends):
        await put_list(backends, 1, 2)
        await backends[1].close()
        await backends[0].put({"id": 3})
        backends[1] = open_bucket(topic, 1, log)
        await put_list(backends, 4, 5)
        copy = crashed(topic)
    assert await ids_in(copy, 0) == [1, 3, 4]
    assert await ids_in(copy, 1) == [2, 5]


async def test_bucket_dropped_without_a_close_keeps_its_records_in_the_log(tmp_path: Path) -> None:
    topic = tmp_path / "topic"
    async with owner(topic, 0, 1) as (log, backends):
        await put_list(backends, 1, 2)
        backends[1] = None
        await until_freed(topic / "bucket_1")
        await backends[0].flush()
        assert segments_in(log.folder) != []
        backends[1] = open_bucket(topic, 1, log)
        assert [record["id"] for record in await backends[1].get()] == [2]
        await backends[0].put({"id": 3})
        await backends[0].flush()
        assert segments_in(log.folder) == [], "the bucket's table has them now"


# Damage


async def rotated_topic(topic: Path) -> Path:
    """Write a log of three segments: records of bucket 0, of bucket 1, of both; return a copy."""
    async with owner(topic, 0, 1) as (log, backends):
        log.group_commit._log._segment_bytes = 1
        await backends[0].put({"id": 1})
        await backends[1].put({"id": 2})
        await put_list(backends, 3, 4)
        return crashed(topic)


async def test_missing_first_segment_is_found_by_the_bucket_that_needs_it(tmp_path: Path) -> None:
    copy = await rotated_topic(tmp_path / "topic")
    first, _, _ = segments_in(log_folder(copy))
    first.unlink()
    await refuses(copy, 0, "first segments of the log .* are missing")
    assert await ids_in(copy, 1) == [2, 4], "it had no records there"


async def test_missing_middle_segment_is_damage(tmp_path: Path) -> None:
    copy = await rotated_topic(tmp_path / "topic")
    segments_in(log_folder(copy))[1].unlink()
    await refuses(copy, 0, "missing")
    await refuses(copy, 1, "missing")


async def test_missing_log_is_damage(tmp_path: Path) -> None:
    copy = await rotated_topic(tmp_path / "topic")
    shutil.rmtree(log_folder(copy))
    await refuses(copy, 0, "is missing")
    await refuses(copy, 1, "is missing")


async def test_segment_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    """Its records are not skipped: it is unknown what it holds."""
    copy = await rotated_topic(tmp_path / "topic")
    last = segments_in(log_folder(copy))[-1]
    data = last.read_bytes()
    header = decode_segment_header(memoryview(data))
    newer = SegmentHeader(header.first_sequence, header.salt, version=3)
    last.write_bytes(encode_segment_header(newer) + data[SEGMENT_HEADER_SIZE:])
    await refuses(copy, 0, "format 3")
    await refuses(copy, 1, "format 3")


async def test_copied_or_renamed_segment_is_refused(tmp_path: Path) -> None:
    copy = await rotated_topic(tmp_path / "topic")
    first = segments_in(log_folder(copy))[0]
    (first.parent / "copy.wal").write_bytes(first.read_bytes())
    await refuses(copy, 0, "copied or renamed")
    await refuses(copy, 1, "copied or renamed")


async def test_damage_in_records_that_a_table_holds_does_not_stop_its_bucket(
    tmp_path: Path,
) -> None:
    topic = tmp_path / "topic"
    async with owner(topic, 0, 1) as (_, backends):
        await put_list(backends, 1, 2)
        await put_list(backends, 3, 4)
        await backends[0].flush()
        copy = crashed(topic)
    (segment,) = segments_in(log_folder(copy))
    data = bytearray(segment.read_bytes())
    data[SEGMENT_HEADER_SIZE + FRAME_HEADER_SIZE + 1] ^= 0x10
    segment.write_bytes(data)
    await refuses(copy, 1, "damaged")
    assert await ids_in(copy, 0) == [1, 3]
    await refuses(copy, 1, "damaged")


async def test_dead_log_is_never_changed_and_removed_after_its_last_bucket(tmp_path: Path) -> None:
    topic = tmp_path / "topic"
    async with owner(topic, 0, 1) as (_, backends):
        await put_list(backends, 1, 2)
        copy = crashed(topic)
    folder = log_folder(copy)
    (segment,) = segments_in(folder)
    segment.write_bytes(segment.read_bytes() + b"half a frame")
    before = content(folder)
    assert await ids_in(copy, 1) == [2]
    assert content(folder) == before
    remove_unused(copy, FileSystem())
    assert content(folder) == before, "bucket 0 still needs it"
    assert await ids_in(copy, 0) == [1]
    assert not folder.exists()


async def test_index_yields_the_frames_of_one_bucket_in_order(tmp_path: Path) -> None:
    copy = await rotated_topic(tmp_path / "topic")
    index = LogIndex(log_folder(copy), FileSystem())
    for bucket, count in ((0, 2), (1, 2), (7, 0)):
        sequences = sequences_in(index, bucket)
        assert sequences == sorted(sequences)
        assert len(sequences) == count
    assert index.last_sequence == max(sequences_in(index, 0))


def sequences_in(index: LogIndex, bucket: int) -> list[int]:
    """Return the sequence of each frame, or of the last frame of rows that are read together."""
    return [
        block.sequences[-1] if isinstance(block, PlainRows) else block.sequence
        for block in index.blocks(bucket, 0)
    ]


@pytest.mark.parametrize("buckets", [[0], [0, 1]])
async def test_log_of_a_topic_is_synced_before_a_flush_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buckets: list[int]
) -> None:
    """A reader may commit an offset of a version that is not durable yet: the log must be."""
    synced: list[bool] = []
    append = TableWriter.append

    def observed(writer: TableWriter, chunks: Any, *args: Any) -> None:
        synced.append(log.group_commit._log._synced >= chunks[-1].sequence)
        append(writer, chunks, *args)

    async with owner(tmp_path / "topic", *buckets, wal_sync_interval=600.0) as (log, backends):
        await put_list(backends, *range(len(buckets)))
        assert log.group_commit._log._synced == 0
        monkeypatch.setattr(TableWriter, "append", observed)
        await backends[0].flush()
    assert synced[0]


# Failures


class FailingLog(FailingFileSystem):
    """Fails calls on segments of a shared log, and no others."""

    def fail_log(self, name: str) -> None:
        self.fail = lambda call, what: (
            OSError(errno.EIO, "Input/output error") if call == name and is_segment(what) else None
        )


def is_segment(what: object) -> bool:
    path = Path(os.readlink(f"/proc/self/fd/{what}")) if isinstance(what, int) else Path(str(what))
    return path.suffix == ".wal"


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("buckets", [(0,), (0, 1)])
async def test_failed_log_stores_nothing_of_a_put_and_works_again_afterwards(
    tmp_path: Path, call: str, buckets: tuple[int, ...]
) -> None:
    topic, disk = tmp_path / "topic", FailingLog()
    with fs.use(disk):
        async with owner(topic, *buckets) as (log, backends):
            await put_list(backends, *(1 for _ in buckets))
            disk.fail_log(call)
            with ExitStack() as before_any_flush:
                for backend in backends:
                    before_any_flush.enter_context(backend.bucket.flusher.lock)
                with pytest.raises(WALError):
                    await put_list(backends, *(2 for _ in buckets))
                disk.heal()
                copy = crashed(topic)
            for backend in backends:
                await backend.flush()
            assert not log.group_commit.failed
            await put_list(backends, *(3 for _ in buckets))
            again = crashed(topic, "again")
    for number in buckets:
        assert await ids_in(copy, number) == [1]
        assert await ids_in(again, number) == [1, 3]


async def test_failed_sync_at_the_interval_moves_the_records_of_all_buckets_to_their_tables(
    tmp_path: Path,
) -> None:
    topic, disk = tmp_path / "topic", FailingLog()
    with fs.use(disk):
        async with owner(topic, 0, 1, wal_sync_interval=0.05) as (log, backends):
            disk.fail_log("sync")
            await put_list(backends, 1, 2)

            async def flushed() -> bool:
                stats = [await backend.stats() for backend in backends]
                return all(found["buffer_count"] == 0 for found in stats)

            await until(flushed)
            disk.heal()
            await until(lambda: restarted(log))
            await put_list(backends, 3, 4)
            copy = crashed(topic)
    assert await ids_in(copy, 0) == [1, 3]
    assert await ids_in(copy, 1) == [2, 4]


async def restarted(log: OwnerLog) -> bool:
    return not log.group_commit.failed


async def test_log_of_a_killed_owner_is_synced_before_its_records_reach_a_table(
    tmp_path: Path,
) -> None:
    """Its frames may be only in the page cache, where power loss could take the other buckets'."""
    copy = await rotated_topic(tmp_path / "topic")
    disk = FailingLog()
    disk.fail_log("sync_file")
    with fs.use(disk):
        await refuses(copy, 0, "cannot read or repair the log")
    disk.heal()
    synced: list[str] = []
    disk.fail = lambda call, what: synced.append(Path(what).name) if call == "sync_file" else None
    LogIndex(log_folder(copy), disk)
    assert synced == [path.name for path in segments_in(log_folder(copy))]
    assert disk.calls[-1] == "sync_folder"


# The log in a bucket's own folder


async def test_bucket_opened_under_another_number_recovers_its_own_log(tmp_path: Path) -> None:
    """The log in its folder holds no other bucket, so the number does not matter."""
    folder = tmp_path / "bucket"
    backend = PersistingBackend(0, str(folder), **OPTIONS)
    await backend.put({"id": 1})
    await backend.put({"id": 2})
    copy = shutil.copytree(folder, tmp_path / "copy")
    await backend.close()
    backend = PersistingBackend(5, str(copy), **OPTIONS)
    await backend.put({"id": 3})
    again = shutil.copytree(copy, tmp_path / "again")
    await backend.close()
    backend = PersistingBackend(0, str(again), **OPTIONS)
    assert [record["id"] for record in await backend.get()] == [1, 2, 3]
    await backend.close()
