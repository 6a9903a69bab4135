"""Power loss during recovery, and power loss after a kill."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.crash import workloads
from support.crash.checks import (
    BUCKET,
    CrashableBucket,
    CrashExplorer,
    ExpectedRecords,
    Open,
    check_folder,
)
from support.crash.density import every_nth_unless_nightly
from support.crash.disk_model import (
    KEEP_EVERYTHING,
    LOSE_UNSYNCED,
    Loss,
    after_power_loss,
    sampled,
    write_tree,
)
from support.crash.recording import CrashPoint, RecordingFileSystem
from support.crash.workloads import Durable, RecordedWriter, no_log, wal

from persisting import fs
from persisting.wal.frame import SEGMENT_HEADER_SIZE, decode_segment_header
from persisting.wal.frame_run import read_run


async def record_workload(
    tmp_path: Path,
    open_bucket: Open,
    workload: Any,
    durable: Durable = Durable.ACKNOWLEDGED,
) -> RecordedWriter:
    disk = tmp_path / "disk"
    disk.mkdir()
    writer = RecordedWriter(disk, open_bucket, durable)
    await workload(writer)
    return writer


async def check_second_crash(
    tmp_path: Path,
    writer: RecordedWriter,
    point: CrashPoint,
    loss: Loss,
    open_bucket: Open,
    required: int,
    every: int = 1,
) -> int:
    """Lose power, then again at every call (or every ``every``-th) of the recovery and of the next
    put."""
    states = tmp_path / "states"
    states.mkdir()
    disk = tmp_path / "second"
    write_tree(after_power_loss(point.disk, loss), disk)
    recorder = RecordingFileSystem(disk)
    with fs.use(recorder):
        handle = CrashableBucket(disk / BUCKET, open_bucket)
        found = [record["id"] for record in await handle.backend.get()]
        assert len(found) >= required
        recorder.promise(*found[-1:])  # what can be read after a recovery must stay
        expected = ExpectedRecords(writer.expected.records[: len(found)], {*writer.expected.ends})
        await handle.backend.put({"id": "later", "n": 0})
        if (await handle.backend.stats()).get("wal_sync_interval") == 0:
            recorder.promise("later")
        await handle.backend.close()
        recorder.promise("later")
    expected.add({"id": "later", "n": 0})
    explorer = CrashExplorer(recorder.recording, expected, open_bucket, states, minimum=required)
    await explorer.explore(recorder.recording.crash_points[::every])
    shutil.rmtree(states)
    shutil.rmtree(disk)
    return explorer.checked


@every_nth_unless_nightly(3)
async def test_power_loss_during_log_recovery_loses_nothing(tmp_path: Path, every: int) -> None:
    async def workload(writer: RecordedWriter) -> None:
        await writer.put(v=1)
        await writer.flush()
        await writer.batch(2, v=1)
        await writer.put(v=1)

    open_bucket = wal()
    writer = await record_workload(tmp_path, open_bucket, workload)
    last = writer.recorder.recording.crash_points[-1]
    await check_second_crash(tmp_path, writer, last, LOSE_UNSYNCED, open_bucket, 4, every)


@every_nth_unless_nightly(3)
async def test_power_loss_during_recovery_of_a_log_longer_than_the_buffer_loses_nothing(
    tmp_path: Path, every: int
) -> None:
    """The recovery flushes in the middle of the log and in the middle of a batch."""

    async def workload(writer: RecordedWriter) -> None:
        await writer.put(v=1)
        for _ in range(3):
            await writer.batch(120, v=1, text="x" * 50)

    writer = await record_workload(tmp_path, wal(), workload)
    last = writer.recorder.recording.crash_points[-1]
    opener = wal(max_buffer_bytes=3000)
    await check_second_crash(tmp_path, writer, last, LOSE_UNSYNCED, opener, 361, every)


@every_nth_unless_nightly(3)
async def test_power_loss_while_a_torn_tail_is_trimmed_loses_nothing(
    tmp_path: Path, every: int
) -> None:
    async def workload(writer: RecordedWriter) -> None:
        await writer.put(v=1)
        await writer.put(v=1)
        await writer.batch(3, v=1)

    open_bucket = wal()
    writer = await record_workload(tmp_path, open_bucket, workload)
    crash_points = writer.recorder.recording.crash_points
    written = [i for i, m in enumerate(crash_points) if m.label.startswith("write")][-1]
    for loss in (sampled("cut"), sampled("cut-again"), sampled("third")):
        await check_second_crash(
            tmp_path, writer, crash_points[written], loss, open_bucket, 2, every
        )


@every_nth_unless_nightly(3)
async def test_power_loss_while_several_torn_segments_are_trimmed_leaves_a_prefix(
    tmp_path: Path, every: int
) -> None:
    """The segments were never synced: the first is torn, the later ones may be intact."""

    async def workload(writer: RecordedWriter) -> None:
        for _ in range(3):
            await writer.put(v=1)
            await writer.put(v=1, text="x" * 700)
            writer.backend._bucket.group_commit.seal()

    open_bucket = wal(wal_sync_interval=60.0)
    writer = await record_workload(tmp_path, open_bucket, workload, Durable.FLUSHED)
    last = writer.recorder.recording.crash_points[-1]
    for seed in range(4):
        loss = sampled(f"segments-{seed}")
        every_name = Loss(str(loss), lambda: True, lambda: True, loss.content)
        await check_second_crash(tmp_path, writer, last, every_name, open_bucket, 0, every)


@every_nth_unless_nightly(3)
async def test_power_loss_while_a_torn_version_is_rolled_back_loses_nothing(
    tmp_path: Path, every: int
) -> None:
    async def workload(writer: RecordedWriter) -> None:
        await writer.put(v=1)
        await writer.flush()
        await writer.put(v=1)
        await writer.flush()

    open_bucket = wal()
    writer = await record_workload(tmp_path, open_bucket, workload)
    crash_points = writer.recorder.recording.crash_points
    torn = [i for i, m in enumerate(crash_points) if m.label.endswith(".manifest")][-2:]
    names = Loss("manifest-torn", lambda: True, lambda: True, lambda durable, _: durable)
    explorer = CrashExplorer(writer.recorder.recording, writer.expected, open_bucket, tmp_path)
    for index in torn:
        before = crash_points[index - 1]
        required = explorer.required(before)
        await check_second_crash(tmp_path, writer, before, names, open_bucket, required, every)


@every_nth_unless_nightly(3)
async def test_power_loss_while_an_interrupted_widening_is_completed_loses_nothing(
    tmp_path: Path, every: int
) -> None:
    async def workload(writer: RecordedWriter) -> None:
        await writer.put(v=1)
        await writer.flush()
        await writer.put(v=1.5)
        await writer.flush()

    open_bucket = no_log()
    writer = await record_workload(tmp_path, open_bucket, workload, Durable.FLUSHED)
    crash_points = writer.recorder.recording.crash_points
    committed = [m for m in crash_points if m.label.startswith("sync_folder _versions")]
    for point in committed[1:-1]:
        await check_second_crash(tmp_path, writer, point, KEEP_EVERYTHING, open_bucket, 1, every)


async def test_log_of_a_killed_owner_is_durable_once_a_later_put_is_acknowledged(
    tmp_path: Path,
) -> None:
    """The first owner's records were only in the page cache; the second owner syncs each put."""
    disk = tmp_path / "disk"
    disk.mkdir()
    first = RecordedWriter(disk, wal(wal_sync_interval=60.0), Durable.SYNCED)
    await first.put(v=1)
    await first.put(v=1)
    await first.reopen(cleanly=False, open_bucket=wal())
    first.durable = Durable.ACKNOWLEDGED
    await first.put(v=1)
    await first.close()
    states = tmp_path / "states"
    states.mkdir()
    explorer = CrashExplorer(first.recorder.recording, first.expected, wal(), states)
    await explorer.explore()


@pytest.mark.parametrize(
    "open_bucket", [pytest.param(wal(), id="wal"), pytest.param(no_log(), id="no_log")]
)
async def test_folders_created_by_a_killed_process_are_durable_once_a_put_is_acknowledged(
    tmp_path: Path, open_bucket: Open
) -> None:
    """The process died between creating a folder and syncing its name."""
    disk = tmp_path / "disk"
    disk.mkdir()
    recorder = RecordingFileSystem(disk)
    with fs.use(recorder):
        await CrashableBucket(disk / BUCKET, open_bucket).backend.close()
    killed = [
        m for m in recorder.recording.crash_points if m.label.startswith("before sync_folder")
    ]
    assert len(killed) >= 3
    for number, point in enumerate(killed):
        root = tmp_path / f"killed-{number}"
        write_tree({}, root)
        after = RecordingFileSystem(root)
        write_tree(after_power_loss(point.disk, KEEP_EVERYTHING), tmp_path / "left")
        shutil.copytree(tmp_path / "left", root, dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "left")
        with fs.use(after):
            handle = CrashableBucket(root / BUCKET, open_bucket)
            await handle.backend.put({"id": "one", "n": 1})
            await handle.backend.flush()
            await handle.backend.put({"id": "two", "n": 2})
            if (await handle.backend.stats()).get("wal_enabled"):
                after.promise("two")
            await handle.backend.close()
            after.promise("two")
        lost = tmp_path / f"lost-{number}"
        write_tree(after_power_loss(after.recording.crash_points[-1].disk, LOSE_UNSYNCED), lost)
        expected = ExpectedRecords()
        expected.add({"id": "one", "n": 1})
        expected.add({"id": "two", "n": 2})
        await check_folder(lost / BUCKET, open_bucket, expected, 2)


async def test_power_loss_between_a_kill_and_the_next_open_leaves_a_prefix(
    tmp_path: Path,
) -> None:
    """Whatever survives of an unsynced log, a prefix of it is recovered, and the same again
    later."""

    async def workload(writer: RecordedWriter) -> None:
        for number in range(6):
            await writer.put(v=1, text="x" * (200 * number))
            if number == 3:
                await writer.flush()
        await asyncio.sleep(0)

    open_bucket = wal(wal_sync_interval=60.0)
    writer = await record_workload(tmp_path, open_bucket, workload, Durable.FLUSHED)
    states = tmp_path / "states"
    states.mkdir()
    explorer = CrashExplorer(
        writer.recorder.recording, writer.expected, open_bucket, states, losses=(), samples=1
    )
    for seed in range(60):
        point = writer.recorder.recording.crash_points[-1 - seed % 20]
        tree = after_power_loss(point.disk, sampled(f"unsynced-{seed}"))
        await explorer.check(tree, point, sampled(seed), explorer.required(point))


async def test_log_continues_after_a_segment_that_has_lost_its_first_entry(tmp_path: Path) -> None:
    """Only the frames that begin the segment are left of it: they hold no records."""
    folder = tmp_path / "bucket"
    handle = CrashableBucket(folder, wal())
    for number in range(2):  # each life writes a segment of its own
        await handle.backend.put({"id": f"r{number}"})
        await handle.drop()
        handle.open()
    await handle.drop()
    last = max((folder / "wal").glob("*.wal"))
    data = last.read_bytes()
    header = decode_segment_header(memoryview(data))
    frames = read_run(data, SEGMENT_HEADER_SIZE, header.salt, header.first_sequence)
    last.write_bytes(data[: int(frames.positions[2]) + 10])
    handle.open()
    assert [record["id"] for record in await handle.backend.get()] == ["r0"]
    await handle.backend.flush()
    await handle.backend.put({"id": "later"})
    await handle.drop()
    handle.open()
    assert [record["id"] for record in await handle.backend.get()] == ["r0", "later"]
    await handle.backend.close()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
async def test_second_power_loss_in_a_random_workload_loses_nothing(
    tmp_path: Path, seed: int
) -> None:
    open_bucket = wal(flush_threshold=9)
    workload = workloads.random_workload(200 + seed, 25)
    writer = await record_workload(tmp_path, open_bucket, workload)
    recording = writer.recorder.recording
    explorer = CrashExplorer(recording, writer.expected, open_bucket, tmp_path)
    for index in range(seed, len(recording.crash_points), 9):
        point = recording.crash_points[index]
        await check_second_crash(
            tmp_path,
            writer,
            point,
            sampled(f"{seed}-{index}"),
            open_bucket,
            explorer.required(point),
        )
