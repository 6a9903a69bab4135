"""Runs of topics: several rounds each, every round under a fault."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path

from support.crash.checks import PromiseBroken

from torture import injector, scenario
from torture.rerun import rerun_command
from torture.rounds import Follower, play
from torture.topic_model import TopicModel
from torture.workspace import Workspace

Between = Callable[[Workspace, scenario.Round, TopicModel], Awaitable[None]]
MEMORY = Path("/dev/shm")
ROUNDS = 6


async def run_topic(
    seed: int,
    tally: Counter[str],
    count: int = ROUNDS,
    fault: str | None = None,
    between: Between | None = None,
    kind: str | None = None,
    retention: bool | None = None,
) -> None:
    """Run one seed. If a promise is broken, raise with the seed and keep the disk.

    ``between`` works on the topic after each round, while the topic has no owner.
    """
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=MEMORY if MEMORY.is_dir() else None))
    library = injector.build(folder)
    workspace = Workspace(folder)
    workspace.disk.mkdir()
    rounds = scenario.rounds_of(seed, count, fault, kind, retention)
    model = TopicModel(rounds[0].num_buckets)
    with closing(Follower(workspace, rounds[0].num_buckets, tally)) as follower:
        for round_ in rounds:
            try:
                await play(workspace, round_, model, library, tally, follower)
                if between is not None:
                    await between(workspace, round_, model)
                if model.leaks:
                    raise PromiseBroken(
                        "errors that are not a StorageError:\n" + "\n".join(model.leaks.values())
                    )
            except PromiseBroken as exc:
                forced = _forced(fault, kind, retention)
                raise PromiseBroken(
                    f"seed {seed}, round {round_.number} ({round_.fault}, {round_.description}): "
                    f"{exc}\n"
                    f"{rerun_command('topic', seed, '--runs 1', *forced)}\ndisk kept in {folder}"
                ) from exc
            tally[round_.fault] += 1
            tally[round_.description] += 1
    tally["records"] += len(model.records)
    shutil.rmtree(folder)


def _forced(fault: str | None, kind: str | None, retention: bool | None) -> Iterator[str]:
    """Yield the command-line options for what the seed did not choose."""
    if fault:
        yield f"--fault {fault}"
    if kind:
        yield f"--kind {kind}"
    if retention is not None:
        yield "--retention" if retention else "--no-retention"


async def run_topics(
    first: int,
    seconds: float,
    tally: Counter[str],
    most: int | None,
    fault: str | None = None,
    between: Between | None = None,
    kind: str | None = None,
    retention: bool | None = None,
) -> None:
    """Run one seed after another until the time is over or ``most`` have run."""
    until = time.monotonic() + seconds
    seed = first
    while time.monotonic() < until and (most is None or seed - first < most):
        await run_topic(seed, tally, ROUNDS, fault, between, kind, retention)
        tally["runs"] += 1
        seed += 1
