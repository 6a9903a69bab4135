"""Record a history of table maintenance, then check what power loss may leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from support.crash.checking import Open, Replay
from support.crash.disk import (
    COME_BACK,
    EVERYTHING,
    FIXED,
    NAMES,
    ZEROS,
    Loss,
    after_power_loss,
    only_in,
    sampled,
)
from support.crash.recording import Moment
from support.crash.workloads import History, kept

PLACES = ("data", "_indices", "_versions", "_transactions", "_refs")
"""Lance writes to these in one go: any of them may reach the disk without the others."""
PARTIAL = tuple(only_in(loss, place) for place in PLACES for loss in (NAMES, ZEROS, COME_BACK))


def every_way(index: int) -> Iterator[Loss]:
    yield from FIXED
    yield from PARTIAL
    for number in range(4):
        yield sampled(f"{index}-{number}")


async def replayed(
    tmp_path: Path,
    open_bucket: Open,
    history: History,
    *,
    logged: bool = True,
    afterwards: Open | None = None,
    thoroughly: bool = False,
) -> Replay:
    """Record a history, then check what power loss may leave of it."""
    workspace = tmp_path / "states"
    workspace.mkdir()
    keeper = await kept(tmp_path / "disk", open_bucket, history, logged=logged)
    replay = Replay(keeper.recorder.recording, keeper.states, afterwards or open_bucket, workspace)
    await explore(replay, thoroughly=thoroughly)
    before_the_last = set(range(len(keeper.states) - 1))
    assert replay.found >= before_the_last if thoroughly else len(replay.found) > 3
    return replay


async def explore(replay: Replay, *, thoroughly: bool) -> None:
    """Every moment in every way; or one way each for some at which Lance has just written."""
    replay.going_on = 1 if thoroughly else 2
    moments = list(enumerate(replay.recording.moments))
    if not thoroughly:
        moments = [(i, m) for i, m in moments if m.label.startswith("before")]
        moments = moments[:: len(moments) // 10 + 1]
    for number, (index, moment) in enumerate(moments):
        ways = list(every_way(index))
        for loss in ways if thoroughly else [telling(moment, ways, number * 5)]:
            await replay.check(moment, loss)
    print(f"{replay.checked} states of {len(replay.recording.moments)} moments")


def telling(moment: Moment, ways: list[Loss], first: int) -> Loss:
    """The next of the ways in which something is lost."""
    whole = after_power_loss(moment.disk, EVERYTHING)
    turned = ways[first % len(ways) :] + ways[: first % len(ways)]
    return next((w for w in turned if after_power_loss(moment.disk, w) != whole), EVERYTHING)
