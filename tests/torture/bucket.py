"""Single buckets, with the machinery of tests/crash: seeds in place of its fixed cases."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import test_kill
import test_upkeep_kill
from support.crash import workloads
from support.crash.checking import Broken, Explorer
from support.crash.maintenance_replay import replayed
from support.crash.workloads import Durable, Scribe, wal

from torture.repeating import again
from torture.topic import MEMORY


async def lives(first: int, seconds: float, tally: Counter[str], most: int | None) -> None:
    """Seed after seed, each in one of the ways to suffer."""
    until, seed = time.monotonic() + seconds, first
    while time.monotonic() < until and (most is None or seed - first < most):
        await live(seed, tally)
        seed += 1


async def live(seed: int, tally: Counter[str]) -> None:
    suffering = (killed, killed_in_upkeep, without_power, without_power_in_upkeep)[seed % 4]
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        await suffering(folder, seed, tally)
    except AssertionError as exc:
        raise Broken(
            f"seed {seed} ({suffering.__name__}): {exc}\n{again('bucket', seed, '--lives 1')}"
        ) from exc
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def killed(folder: Path, seed: int, tally: Counter[str]) -> None:
    tally["records"] += await test_kill.rounds_of_killing(folder / "bucket", 5, seed)
    tally["kills"] += 5


async def killed_in_upkeep(folder: Path, seed: int, tally: Counter[str]) -> None:
    tally["steps"] += await test_upkeep_kill.rounds_of_killing(folder / "bucket", 5, seed)
    tally["kills"] += 5


async def without_power(folder: Path, seed: int, tally: Counter[str]) -> None:
    """A random history of puts, and the states that power loss leaves of some of its moments."""
    disk, workspace = folder / "disk", folder / "states"
    disk.mkdir()
    workspace.mkdir()
    scribe = Scribe(disk, wal(), Durable.ACKNOWLEDGED)
    await workloads.anything(seed, 12)(scribe)
    recording = scribe.recorder.recording
    explorer = Explorer(recording, scribe.story, wal(), workspace, samples=1)
    await explorer.explore(recording.moments[:: len(recording.moments) // 20 + 1])
    tally["power losses"] += explorer.checked


async def without_power_in_upkeep(folder: Path, seed: int, tally: Counter[str]) -> None:
    opener = wal(
        keep_versions=(600, 0.001)[seed // 4 % 2], compression=(None, "zstd")[seed % 3 == 0]
    )
    replay = await replayed(folder, opener, workloads.any_upkeep(seed, 40), afterwards=wal())
    tally["power losses"] += replay.checked
