"""Power loss at every file call of compaction, retention, tags, restores, indexing and cleanup.

The bucket is in the last acknowledged state or in the one that the interrupted step leads to: rows
at their offsets, the start, every tag with its rows, the number of restores. It verifies, every
listed version can be read, every index finds every row, and work continues.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.crash import workloads
from support.crash.checks import Open, TableCrashExplorer, check_state, read_state
from support.crash.disk_model import (
    KEEP_EVERYTHING,
    KEEP_NAMES_ONLY,
    LOSE_UNSYNCED,
    ZERO_BYTES,
    Loss,
    after_power_loss,
    only_in,
    write_tree,
)
from support.crash.maintenance_replay import explore, replay_history
from support.crash.recording import CrashPoint, RecordingFileSystem
from support.crash.workloads import (
    WITH_DEFAULT_AGE,
    History,
    RecordedTable,
    every_operation,
    lance,
    no_log,
    run_history,
    wal,
)

HISTORIES = {
    "compactions": workloads.compactions,
    "retentions": workloads.retentions,
    "tagging": workloads.tagging,
    "restores": workloads.restores,
    "indexing": workloads.indexing,
    "evolving": workloads.evolving,
}
STRICT = {name: HISTORIES[name] for name in ("compactions", "retentions", "tagging", "restores")}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
async def test_acknowledged_state_survives_power_loss_during_maintenance(
    tmp_path: Path, history: History
) -> None:
    await replay_history(tmp_path, wal(), history)


async def test_acknowledged_state_survives_power_loss_during_version_cleanup(
    tmp_path: Path,
) -> None:
    opener = wal(keep_versions=0.001)
    await replay_history(tmp_path, opener, workloads.cleaning, afterwards=wal())


async def test_acknowledged_state_survives_power_loss_while_a_default_is_written(
    tmp_path: Path,
) -> None:
    await replay_history(tmp_path, wal(schema_defaults={"age": 7}), workloads.filled_fields)


@pytest.mark.parametrize("history", STRICT.values(), ids=STRICT)
@pytest.mark.nightly
async def test_flushed_state_of_a_strict_bucket_survives_power_loss_during_maintenance(
    tmp_path: Path, history: History
) -> None:
    await replay_history(tmp_path, lance(), history, logged=False)


async def test_flushed_state_without_a_log_survives_power_loss_during_maintenance(
    tmp_path: Path,
) -> None:
    async def history(table: RecordedTable) -> None:
        await table.flushes(3, v=1)
        await table.put(2, v=1)
        await table.tag("old")
        await table.put(v=1.5)
        await table.compact()
        await table.retain(rows=2)
        await table.put(v=1)
        await table.restore("old")
        await table.put(v=2)
        await table.close()

    await replay_history(tmp_path, no_log(), history, logged=False)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
async def test_acknowledged_state_survives_power_loss_at_every_call_of_maintenance(
    tmp_path: Path, history: History
) -> None:
    await replay_history(tmp_path, wal(), history, thoroughly=True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_acknowledged_state_survives_power_loss_at_every_call_of_version_cleanup(
    tmp_path: Path,
) -> None:
    opener = wal(keep_versions=0.001)
    await replay_history(tmp_path, opener, workloads.cleaning, afterwards=wal(), thoroughly=True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_acknowledged_state_survives_power_loss_at_every_call_of_filling_a_default(
    tmp_path: Path,
) -> None:
    opener = wal(schema_defaults={"age": 7})
    await replay_history(tmp_path, opener, workloads.filled_fields, thoroughly=True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(16))
async def test_acknowledged_state_survives_power_loss_in_a_random_maintenance_history(
    tmp_path: Path, seed: int
) -> None:
    opener = wal(keep_versions=(600, 0.001)[seed % 2], compression=(None, "zstd")[seed % 3 == 0])
    history = workloads.random_maintenance(seed, 60)
    await replay_history(tmp_path, opener, history, afterwards=wal())


PARTIAL_LOSSES = (
    only_in(ZERO_BYTES, "data"),
    only_in(ZERO_BYTES, "_indices"),
    only_in(KEEP_NAMES_ONLY, "_indices"),
    only_in(KEEP_NAMES_ONLY, "_versions"),
    only_in(ZERO_BYTES, "_transactions"),
)


@pytest.mark.parametrize("loss", PARTIAL_LOSSES, ids=str)
async def test_acknowledged_state_survives_power_loss_that_affects_one_folder_only(
    tmp_path: Path, loss: Loss
) -> None:
    """Everything else that Lance wrote had reached the disk."""
    table = await run_history(tmp_path / "disk", WITH_DEFAULT_AGE, every_operation)
    (tmp_path / "states").mkdir()
    replay = TableCrashExplorer(
        table.recorder.recording, table.states, WITH_DEFAULT_AGE, tmp_path / "states"
    )
    affected = [
        point
        for point in replay.recording.crash_points
        if point.label.startswith("before")
        and after_power_loss(point.disk, loss) != after_power_loss(point.disk, KEEP_EVERYTHING)
    ]
    assert affected
    for point in affected[:: len(affected) // 10 + 1]:
        await replay.check(point, loss)


# Power loss after a kill


async def lose_power_after_kill(
    tmp_path: Path,
    table: RecordedTable,
    point: CrashPoint,
    open_bucket: Open,
    *,
    thoroughly: bool = False,
    loss: Loss | None = None,
) -> int:
    """Kill at a crash point, open and continue work; lose power at every call of that work. Return
    the number of states checked."""
    disk, workspace = tmp_path / "killed", tmp_path / "lost"
    workspace.mkdir()
    write_tree(after_power_loss(point.disk, KEEP_EVERYTHING), disk)
    recorder = RecordingFileSystem(disk, point.disk)  # what was not synced is still not synced
    first = TableCrashExplorer(table.recorder.recording, table.states, open_bucket, workspace)
    allowed = first.allowed(point)
    again = RecordedTable(disk, open_bucket, recorder=recorder, first=1000)
    found = await read_state(again.backend)
    again.states = [*allowed, replace(check_state(found, allowed), tags=found.tags)]
    again._promise()  # what can be read after a recovery must stay
    await again.put(text="words")
    await again.tag("again")
    await again.compact()
    await again.close()
    replay = TableCrashExplorer(recorder.recording, again.states, open_bucket, workspace)
    if loss is None:
        await explore(replay, thoroughly=thoroughly)
    else:
        for later in recorder.recording.crash_points[::-8]:
            await replay.check(later, loss)
    shutil.rmtree(workspace)
    shutil.rmtree(disk)
    return replay.checked


async def test_acknowledged_state_survives_power_loss_after_a_killed_maintenance(
    tmp_path: Path,
) -> None:
    table = await run_history(tmp_path / "disk", WITH_DEFAULT_AGE, every_operation)
    crash_points = [
        m for m in table.recorder.recording.crash_points if m.label.startswith("before sync_")
    ]
    for point in crash_points[-1 :: -len(crash_points) // 3]:
        assert await lose_power_after_kill(tmp_path, table, point, WITH_DEFAULT_AGE)


async def test_power_loss_after_a_kill_between_two_versions_of_one_change_leaves_all_readable(
    tmp_path: Path,
) -> None:
    """A compaction makes two versions: both must be durable before anything else is
    acknowledged."""

    def unsynced_manifests(point: CrashPoint) -> int:
        found = [after_power_loss(point.disk, loss) for loss in (KEEP_EVERYTHING, LOSE_UNSYNCED)]
        return sum(p.suffix == ".manifest" and bool(found[0][p]) for p in {*found[0]} - {*found[1]})

    table = await run_history(tmp_path / "disk", WITH_DEFAULT_AGE, every_operation)
    point = next(m for m in table.recorder.recording.crash_points if unsynced_manifests(m) == 2)
    assert await lose_power_after_kill(tmp_path, table, point, WITH_DEFAULT_AGE, loss=LOSE_UNSYNCED)


async def test_power_loss_after_a_kill_during_a_tag_leaves_the_tag_that_was_read(
    tmp_path: Path,
) -> None:
    """The killed process had not synced the name of the tag; the next owner must, since it lists
    the tag."""
    table = await run_history(tmp_path / "disk", WITH_DEFAULT_AGE, every_operation)
    named = [
        point
        for point in table.recorder.recording.crash_points
        if point.label.startswith("rename") and point.label.endswith("old.json")
    ]
    assert named
    for point in named:
        assert await lose_power_after_kill(
            tmp_path, table, point, WITH_DEFAULT_AGE, loss=LOSE_UNSYNCED
        )


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(6))
async def test_acknowledged_state_survives_power_loss_after_a_kill_at_any_call_of_maintenance(
    tmp_path: Path, part: int
) -> None:
    table = await run_history(tmp_path / "disk", WITH_DEFAULT_AGE, every_operation)
    for point in table.recorder.recording.crash_points[part::12]:
        await lose_power_after_kill(tmp_path, table, point, WITH_DEFAULT_AGE, thoroughly=part == 0)
