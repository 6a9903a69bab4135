"""Single buckets, and buckets that share a log, under kills and power loss: tests/crash with random
seeds."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.crash import workloads
from support.crash.checks import CrashExplorer, PromiseBroken
from support.crash.killed_maintenance import kill_owners
from support.crash.killed_writers import kill_writers
from support.crash.maintenance_replay import replay_history
from support.crash.moving_buckets import move_buckets
from support.crash.topics import RecordedTopic, TopicExplorer, random_story
from support.crash.workloads import Durable, RecordedWriter, wal
from support.filesystems import QuickFileSystem

from persisting import fs
from torture.rerun import rerun_command
from torture.topic import MEMORY


async def run_buckets(first: int, seconds: float, tally: Counter[str], most: int | None) -> None:
    """Run one seed after another until the time is over or ``most`` have run."""
    until, seed = time.monotonic() + seconds, first
    while time.monotonic() < until and (most is None or seed - first < most):
        await run_bucket(seed, tally)
        seed += 1


async def run_bucket(seed: int, tally: Counter[str]) -> None:
    scenario = (
        killed,
        killed_in_maintenance,
        power_loss,
        power_loss_in_maintenance,
        moved,
        power_loss_of_shared_log,
    )[seed % 6]
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        await scenario(folder, seed, tally)
    except AssertionError as exc:
        raise PromiseBroken(
            f"seed {seed} ({scenario.__name__}): {exc}\n{rerun_command('bucket', seed, '--runs 1')}"
        ) from exc
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def killed(folder: Path, seed: int, tally: Counter[str]) -> None:
    tally["records"] += await kill_writers(folder / "bucket", 5, seed)
    tally["kills"] += 5


async def killed_in_maintenance(folder: Path, seed: int, tally: Counter[str]) -> None:
    tally["steps"] += await kill_owners(folder / "bucket", 5, seed)
    tally["kills"] += 5


async def power_loss(folder: Path, seed: int, tally: Counter[str]) -> None:
    """Record a random workload; check what power loss leaves at some of its crash points."""
    disk, workspace = folder / "disk", folder / "states"
    disk.mkdir()
    workspace.mkdir()
    writer = RecordedWriter(disk, wal(), Durable.ACKNOWLEDGED)
    await workloads.random_workload(seed, 12)(writer)
    recording = writer.recorder.recording
    explorer = CrashExplorer(recording, writer.expected, wal(), workspace, samples=1)
    await explorer.explore(recording.crash_points[:: len(recording.crash_points) // 20 + 1])
    tally["power losses"] += explorer.checked


async def moved(folder: Path, seed: int, tally: Counter[str]) -> None:
    """Move buckets between owners that put and are killed."""
    with fs.use(QuickFileSystem()):
        tally["puts"] += await move_buckets(folder, seed, 150, wal_sync_interval=60.0 * (seed % 4))


async def power_loss_of_shared_log(folder: Path, seed: int, tally: Counter[str]) -> None:
    """Like :func:`power_loss`, for a topic whose buckets share a log."""
    disk, workspace = folder / "disk", folder / "states"
    disk.mkdir()
    workspace.mkdir()
    topic = RecordedTopic(disk)
    with fs.use(topic.recorder):
        await random_story(seed, 12)(topic)
    recording = topic.recorder.recording
    explorer = TopicExplorer(recording, topic.expected, workspace, numbers=topic.numbers)
    await explorer.explore(len(recording.crash_points) // 15 + 1, seed % 3)
    tally["power losses"] += explorer.checked


async def power_loss_in_maintenance(folder: Path, seed: int, tally: Counter[str]) -> None:
    opener = wal(
        keep_versions=(600, 0.001)[seed // 4 % 2], compression=(None, "zstd")[seed % 3 == 0]
    )
    replay = await replay_history(
        folder, opener, workloads.random_maintenance(seed, 40), afterwards=wal()
    )
    tally["power losses"] += replay.checked
