"""Power loss while a recovery is at work, and power loss after a kill."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.crash import workloads
from support.crash.checking import BUCKET, Explorer, Handle, Open, Story, check_folder
from support.crash.disk import EVERYTHING, NOTHING, Loss, after_power_loss, lay_out, sampled
from support.crash.recording import Moment, RecordingFileSystem
from support.crash.workloads import Durable, Scribe, no_log, wal

from persisting import fs


async def told(
    tmp_path: Path,
    open_bucket: Open,
    workload: Any,
    durable: Durable = Durable.ACKNOWLEDGED,
) -> Scribe:
    disk = tmp_path / "disk"
    disk.mkdir()
    scribe = Scribe(disk, open_bucket, durable)
    await workload(scribe)
    return scribe


async def survives_a_second_crash(
    tmp_path: Path, scribe: Scribe, moment: Moment, loss: Loss, open_bucket: Open, least: int
) -> int:
    """Lose power, and again at every call of the recovery and of a put behind it."""
    states = tmp_path / "states"
    states.mkdir()
    disk = tmp_path / "second"
    lay_out(after_power_loss(moment.disk, loss), disk)
    recorder = RecordingFileSystem(disk)
    with fs.use(recorder):
        handle = Handle(disk / BUCKET, open_bucket)
        found = [record["id"] for record in await handle.backend.get()]
        assert len(found) >= least
        recorder.promise(*found[-1:])  # what can be read after a recovery does not vanish again
        story = Story(scribe.story.records[: len(found)], {*scribe.story.ends})
        await handle.backend.put({"id": "later", "n": 0})
        if (await handle.backend.stats()).get("wal_sync_interval") == 0:
            recorder.promise("later")
        await handle.backend.close()
        recorder.promise("later")
    story.tell({"id": "later", "n": 0})
    explorer = Explorer(recorder.recording, story, open_bucket, states, minimum=least)
    await explorer.explore()
    shutil.rmtree(states)
    shutil.rmtree(disk)
    return explorer.checked


async def test_power_loss_while_a_log_is_recovered_loses_nothing(tmp_path: Path) -> None:
    async def workload(scribe: Scribe) -> None:
        await scribe.put(v=1)
        await scribe.flush()
        await scribe.batch(2, v=1)
        await scribe.put(v=1)

    open_bucket = wal()
    scribe = await told(tmp_path, open_bucket, workload)
    last = scribe.recorder.recording.moments[-1]
    await survives_a_second_crash(tmp_path, scribe, last, NOTHING, open_bucket, 4)


async def test_power_loss_while_a_log_longer_than_the_buffer_is_recovered_loses_nothing(
    tmp_path: Path,
) -> None:
    """The recovery flushes in the middle of the log, and in the middle of a batch."""

    async def workload(scribe: Scribe) -> None:
        await scribe.put(v=1)
        for _ in range(3):
            await scribe.batch(120, v=1, text="x" * 50)

    scribe = await told(tmp_path, wal(), workload)
    last = scribe.recorder.recording.moments[-1]
    opener = wal(max_buffer_bytes=3000)
    await survives_a_second_crash(tmp_path, scribe, last, NOTHING, opener, 361)


async def test_power_loss_while_a_torn_tail_is_trimmed_loses_nothing(tmp_path: Path) -> None:
    async def workload(scribe: Scribe) -> None:
        await scribe.put(v=1)
        await scribe.put(v=1)
        await scribe.batch(3, v=1)

    open_bucket = wal()
    scribe = await told(tmp_path, open_bucket, workload)
    moments = scribe.recorder.recording.moments
    written = [i for i, m in enumerate(moments) if m.label.startswith("write")][-1]
    for loss in (sampled("cut"), sampled("cut-again"), sampled("third")):
        await survives_a_second_crash(tmp_path, scribe, moments[written], loss, open_bucket, 2)


async def test_power_loss_while_several_torn_segments_are_trimmed_leaves_a_beginning(
    tmp_path: Path,
) -> None:
    """Segments that were never synced: the first is torn, the later ones may be whole."""

    async def workload(scribe: Scribe) -> None:
        for _ in range(3):
            await scribe.put(v=1)
            await scribe.put(v=1, text="x" * 700)
            scribe.backend._bucket.group_commit.seal()

    open_bucket = wal(wal_sync_interval=60.0)
    scribe = await told(tmp_path, open_bucket, workload, Durable.FLUSHED)
    last = scribe.recorder.recording.moments[-1]
    for seed in range(4):
        loss = sampled(f"segments-{seed}")
        every_name = Loss(str(loss), lambda: True, lambda: True, loss.content)
        await survives_a_second_crash(tmp_path, scribe, last, every_name, open_bucket, 0)


async def test_power_loss_while_a_torn_version_is_taken_back_loses_nothing(
    tmp_path: Path,
) -> None:
    async def workload(scribe: Scribe) -> None:
        await scribe.put(v=1)
        await scribe.flush()
        await scribe.put(v=1)
        await scribe.flush()

    open_bucket = wal()
    scribe = await told(tmp_path, open_bucket, workload)
    moments = scribe.recorder.recording.moments
    torn = [i for i, m in enumerate(moments) if m.label.endswith(".manifest")][-2:]
    names = Loss("manifest-torn", lambda: True, lambda: True, lambda durable, _: durable)
    explorer = Explorer(scribe.recorder.recording, scribe.story, open_bucket, tmp_path)
    for index in torn:
        before = moments[index - 1]
        least = explorer.least(before)
        await survives_a_second_crash(tmp_path, scribe, before, names, open_bucket, least)


async def test_power_loss_while_an_interrupted_widening_is_finished_loses_nothing(
    tmp_path: Path,
) -> None:
    async def workload(scribe: Scribe) -> None:
        await scribe.put(v=1)
        await scribe.flush()
        await scribe.put(v=1.5)
        await scribe.flush()

    open_bucket = no_log()
    scribe = await told(tmp_path, open_bucket, workload, Durable.FLUSHED)
    moments = scribe.recorder.recording.moments
    settled = [m for m in moments if m.label.startswith("sync_folder _versions")]
    for moment in settled[1:-1]:
        await survives_a_second_crash(tmp_path, scribe, moment, EVERYTHING, open_bucket, 1)


async def test_a_log_left_by_a_kill_is_as_durable_as_what_is_acknowledged_after_it(
    tmp_path: Path,
) -> None:
    """The first owner's records were in the page cache only; the second owner syncs each put."""
    disk = tmp_path / "disk"
    disk.mkdir()
    first = Scribe(disk, wal(wal_sync_interval=60.0), Durable.SYNCED)
    await first.put(v=1)
    await first.put(v=1)
    await first.reopen(cleanly=False, open_bucket=wal())
    first.durable = Durable.ACKNOWLEDGED
    await first.put(v=1)
    await first.close()
    states = tmp_path / "states"
    states.mkdir()
    explorer = Explorer(first.recorder.recording, first.story, wal(), states)
    await explorer.explore()


@pytest.mark.parametrize(
    "open_bucket", [pytest.param(wal(), id="wal"), pytest.param(no_log(), id="no_log")]
)
async def test_folders_made_by_a_killed_process_are_durable_when_something_is_acknowledged(
    tmp_path: Path, open_bucket: Open
) -> None:
    """The process died between making a folder and syncing its name."""
    disk = tmp_path / "disk"
    disk.mkdir()
    recorder = RecordingFileSystem(disk)
    with fs.use(recorder):
        await Handle(disk / BUCKET, open_bucket).backend.close()
    killed = [m for m in recorder.recording.moments if m.label.startswith("before sync_folder")]
    assert len(killed) >= 3
    for number, moment in enumerate(killed):
        root = tmp_path / f"killed-{number}"
        lay_out({}, root)
        after = RecordingFileSystem(root)
        lay_out(after_power_loss(moment.disk, EVERYTHING), tmp_path / "left")
        shutil.copytree(tmp_path / "left", root, dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "left")
        with fs.use(after):
            handle = Handle(root / BUCKET, open_bucket)
            await handle.backend.put({"id": "one", "n": 1})
            await handle.backend.flush()
            await handle.backend.put({"id": "two", "n": 2})
            if (await handle.backend.stats()).get("wal_enabled"):
                after.promise("two")
            await handle.backend.close()
            after.promise("two")
        lost = tmp_path / f"lost-{number}"
        lay_out(after_power_loss(after.recording.moments[-1].disk, NOTHING), lost)
        story = Story()
        story.tell({"id": "one", "n": 1})
        story.tell({"id": "two", "n": 2})
        await check_folder(lost / BUCKET, open_bucket, story, 2)


async def test_power_loss_between_a_kill_and_the_next_open_leaves_a_beginning(
    tmp_path: Path,
) -> None:
    """Whatever of an unsynced log survives, a beginning of it is found, also the second time."""

    async def workload(scribe: Scribe) -> None:
        for number in range(6):
            await scribe.put(v=1, text="x" * (200 * number))
            if number == 3:
                await scribe.flush()
        await asyncio.sleep(0)

    open_bucket = wal(wal_sync_interval=60.0)
    scribe = await told(tmp_path, open_bucket, workload, Durable.FLUSHED)
    states = tmp_path / "states"
    states.mkdir()
    explorer = Explorer(
        scribe.recorder.recording, scribe.story, open_bucket, states, losses=(), samples=1
    )
    for seed in range(60):
        moment = scribe.recorder.recording.moments[-1 - seed % 20]
        tree = after_power_loss(moment.disk, sampled(f"unsynced-{seed}"))
        await explorer.check(tree, moment, sampled(seed), explorer.least(moment))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
async def test_power_loss_twice_in_a_random_history_loses_nothing(
    tmp_path: Path, seed: int
) -> None:
    open_bucket = wal(flush_threshold=9)
    workload = workloads.anything(200 + seed, 25)
    scribe = await told(tmp_path, open_bucket, workload)
    recording = scribe.recorder.recording
    explorer = Explorer(recording, scribe.story, open_bucket, tmp_path)
    for index in range(seed, len(recording.moments), 9):
        moment = recording.moments[index]
        await survives_a_second_crash(
            tmp_path,
            scribe,
            moment,
            sampled(f"{seed}-{index}"),
            open_bucket,
            explorer.least(moment),
        )
