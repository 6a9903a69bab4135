"""Record a history of table maintenance, then check every state that power loss may leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from support.crash.checks import Open, TableCrashExplorer
from support.crash.disk_model import (
    FIXED_LOSSES,
    KEEP_EVERYTHING,
    PARTIAL_LOSSES,
    Loss,
    after_power_loss,
    only_in,
    sampled,
)
from support.crash.recording import CrashPoint
from support.crash.workloads import History, run_history

PLACES = ("data", "_indices", "_versions", "_transactions", "_refs")
"""Lance writes to these in one operation: any of them may reach the disk without the others."""
PARTIAL = tuple(only_in(loss, place) for place in PLACES for loss in PARTIAL_LOSSES)


def all_losses(index: int) -> Iterator[Loss]:
    yield from FIXED_LOSSES
    yield from PARTIAL
    for number in range(4):
        yield sampled(f"{index}-{number}")


async def replay_history(
    tmp_path: Path,
    open_bucket: Open,
    history: History,
    *,
    logged: bool = True,
    afterwards: Open | None = None,
    thoroughly: bool = False,
) -> TableCrashExplorer:
    """Record a history, then check the states that power loss may leave."""
    workspace = tmp_path / "states"
    workspace.mkdir()
    table = await run_history(tmp_path / "disk", open_bucket, history, logged=logged)
    replay = TableCrashExplorer(
        table.recorder.recording, table.states, afterwards or open_bucket, workspace, logged=logged
    )
    await explore(replay, thoroughly=thoroughly)
    all_but_the_last = set(range(len(table.states) - 1))
    assert replay.found >= all_but_the_last if thoroughly else len(replay.found) > 3
    return replay


async def explore(replay: TableCrashExplorer, *, thoroughly: bool) -> None:
    """Check every loss at every crash point; or, unless ``thoroughly``, one loss each at some
    points directly after a write of Lance."""
    replay.continue_every = 1 if thoroughly else 2
    crash_points = list(enumerate(replay.recording.crash_points))
    if not thoroughly:
        crash_points = [(i, m) for i, m in crash_points if m.label.startswith("before")]
        crash_points = crash_points[:: len(crash_points) // 10 + 1]
    for number, (index, point) in enumerate(crash_points):
        losses = list(all_losses(index))
        for loss in losses if thoroughly else [next_effective_loss(point, losses, number * 5)]:
            await replay.check(point, loss)
    print(f"{replay.checked} states of {len(replay.recording.crash_points)} crash_points")


def next_effective_loss(point: CrashPoint, losses: list[Loss], first: int) -> Loss:
    """Return the next loss that changes anything at this point."""
    whole = after_power_loss(point.disk, KEEP_EVERYTHING)
    rotated = losses[first % len(losses) :] + losses[: first % len(losses)]
    return next(
        (loss for loss in rotated if after_power_loss(point.disk, loss) != whole), KEEP_EVERYTHING
    )
