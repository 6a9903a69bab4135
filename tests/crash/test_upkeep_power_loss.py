"""Power loss at every file call of compaction, retention, tags, restores, indexes and cleaning.

What is found is the state that was acknowledged last or the one that the interrupted step leads
to: rows at their offsets, the start, every tag with its rows, the number of restores. It verifies,
every version in the list can be read, every index finds every row, and work goes on.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.crash import workloads
from support.crash.checking import Open, Replay, check_state, read_state
from support.crash.disk import (
    EVERYTHING,
    NAMES,
    NOTHING,
    ZEROS,
    Loss,
    after_power_loss,
    lay_out,
    lay_over,
    only_in,
)
from support.crash.maintenance_replay import explore, replayed
from support.crash.recording import Moment, RecordingFileSystem
from support.crash.workloads import AGED, History, Keeper, every_kind, kept, lance, no_log, wal

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
async def test_power_loss_in_the_upkeep_leaves_what_was_acknowledged(
    tmp_path: Path, history: History
) -> None:
    await replayed(tmp_path, wal(), history)


async def test_power_loss_while_versions_are_cleaned_leaves_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    opener = wal(keep_versions=0.001)
    await replayed(tmp_path, opener, workloads.cleaning, afterwards=wal())


async def test_power_loss_while_a_default_is_written_leaves_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    await replayed(tmp_path, wal(schema_defaults={"age": 7}), workloads.filled_fields)


@pytest.mark.parametrize("history", STRICT.values(), ids=STRICT)
@pytest.mark.nightly
async def test_power_loss_in_the_upkeep_of_a_strict_bucket_leaves_what_was_flushed(
    tmp_path: Path, history: History
) -> None:
    await replayed(tmp_path, lance(), history, logged=False)


async def test_power_loss_in_the_upkeep_without_a_log_leaves_what_was_flushed(
    tmp_path: Path,
) -> None:
    async def history(keeper: Keeper) -> None:
        await keeper.flushes(3, v=1)
        await keeper.put(2, v=1)
        await keeper.tag("old")
        await keeper.put(v=1.5)
        await keeper.compact()
        await keeper.retain(rows=2)
        await keeper.put(v=1)
        await keeper.restore("old")
        await keeper.put(v=2)
        await keeper.close()

    await replayed(tmp_path, no_log(), history, logged=False)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
async def test_power_loss_at_every_call_of_the_upkeep_leaves_what_was_acknowledged(
    tmp_path: Path, history: History
) -> None:
    await replayed(tmp_path, wal(), history, thoroughly=True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_power_loss_at_every_call_of_cleaning_leaves_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    opener = wal(keep_versions=0.001)
    await replayed(tmp_path, opener, workloads.cleaning, afterwards=wal(), thoroughly=True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_power_loss_at_every_call_of_filling_leaves_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    opener = wal(schema_defaults={"age": 7})
    await replayed(tmp_path, opener, workloads.filled_fields, thoroughly=True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(16))
async def test_power_loss_in_a_random_history_of_a_table_leaves_what_was_acknowledged(
    tmp_path: Path, seed: int
) -> None:
    opener = wal(keep_versions=(600, 0.001)[seed % 2], compression=(None, "zstd")[seed % 3 == 0])
    history = workloads.any_upkeep(seed, 60)
    await replayed(tmp_path, opener, history, afterwards=wal())


STRIKES = (
    only_in(ZEROS, "data"),
    only_in(ZEROS, "_indices"),
    only_in(NAMES, "_indices"),
    only_in(NAMES, "_versions"),
    only_in(ZEROS, "_transactions"),
)


@pytest.mark.parametrize("loss", STRIKES, ids=str)
async def test_power_loss_that_strikes_one_folder_only_leaves_what_was_acknowledged(
    tmp_path: Path, loss: Loss
) -> None:
    """All else that Lance wrote had reached the disk in time."""
    keeper = await kept(tmp_path / "disk", AGED, every_kind)
    (tmp_path / "states").mkdir()
    replay = Replay(keeper.recorder.recording, keeper.states, AGED, tmp_path / "states")
    struck = [
        moment
        for moment in replay.recording.moments
        if moment.label.startswith("before")
        and after_power_loss(moment.disk, loss) != after_power_loss(moment.disk, EVERYTHING)
    ]
    assert struck
    for moment in struck[:: len(struck) // 10 + 1]:
        await replay.check(moment, loss)


# Power loss after a kill


async def killed_then_lost(
    tmp_path: Path,
    keeper: Keeper,
    moment: Moment,
    open_bucket: Open,
    *,
    thoroughly: bool = False,
    loss: Loss | None = None,
) -> int:
    """Kill at a moment, open and work on; lose power at every call of that. The states checked."""
    disk, workspace = tmp_path / "killed", tmp_path / "lost"
    workspace.mkdir()
    lay_out(after_power_loss(moment.disk, NOTHING), disk)
    recorder = RecordingFileSystem(disk)
    lay_over(after_power_loss(moment.disk, EVERYTHING), disk)  # written, and not synced
    first = Replay(keeper.recorder.recording, keeper.states, open_bucket, workspace)
    allowed = first.allowed(moment)
    again = Keeper(disk, open_bucket, recorder=recorder, first=1000)
    found = await read_state(again.backend)
    again.states = [*allowed, replace(check_state(found, allowed), tags=found.tags)]
    again._promise()  # what can be read after a recovery does not vanish again
    await again.put(text="words")
    await again.tag("again")
    await again.compact()
    await again.close()
    replay = Replay(recorder.recording, again.states, open_bucket, workspace)
    if loss is None:
        await explore(replay, thoroughly=thoroughly)
    else:
        for later in recorder.recording.moments[::-8]:
            await replay.check(later, loss)
    shutil.rmtree(workspace)
    shutil.rmtree(disk)
    return replay.checked


async def test_power_loss_after_a_kill_in_the_upkeep_leaves_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    keeper = await kept(tmp_path / "disk", AGED, every_kind)
    moments = [m for m in keeper.recorder.recording.moments if m.label.startswith("before sync_")]
    for moment in moments[-1 :: -len(moments) // 3]:
        assert await killed_then_lost(tmp_path, keeper, moment, AGED)


async def test_power_loss_after_a_kill_between_the_versions_of_one_change_leaves_all_readable(
    tmp_path: Path,
) -> None:
    """A compaction makes two versions: both are durable before anything else is acknowledged."""

    def young(moment: Moment) -> int:
        found = [after_power_loss(moment.disk, loss) for loss in (EVERYTHING, NOTHING)]
        return sum(p.suffix == ".manifest" and bool(found[0][p]) for p in {*found[0]} - {*found[1]})

    keeper = await kept(tmp_path / "disk", AGED, every_kind)
    moment = next(m for m in keeper.recorder.recording.moments if young(m) == 2)
    assert await killed_then_lost(tmp_path, keeper, moment, AGED, loss=NOTHING)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(6))
async def test_power_loss_after_a_kill_at_any_call_of_the_upkeep_leaves_what_was_acknowledged(
    tmp_path: Path, part: int
) -> None:
    keeper = await kept(tmp_path / "disk", AGED, every_kind)
    for moment in keeper.recorder.recording.moments[part::12]:
        await killed_then_lost(tmp_path, keeper, moment, AGED, thoroughly=part == 0)
