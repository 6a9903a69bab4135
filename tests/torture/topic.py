"""Lives of topics: some rounds each, every one under a fault."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from support.crash.checking import Broken

from torture import injector, plan
from torture.home import Home
from torture.model import Ledger
from torture.repeating import again
from torture.rounds import play

Between = Callable[[Home, plan.Round, Ledger], Awaitable[None]]
MEMORY = Path("/dev/shm")
ROUNDS = 6


async def live(
    seed: int,
    tally: Counter[str],
    count: int = ROUNDS,
    fault: str | None = None,
    between: Between | None = None,
    kind: str | None = None,
    retention: bool | None = None,
) -> None:
    """One life; what is broken is raised with the seed, and the disk is kept.

    ``between`` works on the topic after each round, while nobody owns it.
    """
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=MEMORY if MEMORY.is_dir() else None))
    library = injector.built(folder)
    home = Home(folder)
    home.disk.mkdir()
    rounds = plan.life(seed, count, fault, kind, retention)
    ledger = Ledger(rounds[0].num_buckets)
    for round_ in rounds:
        try:
            await play(home, round_, ledger, library, tally)
            if between is not None:
                await between(home, round_, ledger)
            if ledger.leaks:
                raise Broken(
                    "errors that are no StorageError:\n" + "\n".join(ledger.leaks.values())
                )
        except Broken as exc:
            forced = _forced(fault, kind, retention)
            raise Broken(
                f"seed {seed}, round {round_.number} ({round_.fault}, {round_.nature}): {exc}\n"
                f"{again('topic', seed, '--lives 1', *forced)}\nthe disk is kept in {folder}"
            ) from exc
        tally[round_.fault] += 1
        tally[round_.nature] += 1
    tally["records"] += len(ledger.records)
    shutil.rmtree(folder)


def _forced(fault: str | None, kind: str | None, retention: bool | None) -> Iterator[str]:
    """The options that name what else the seed would choose."""
    if fault:
        yield f"--fault {fault}"
    if kind:
        yield f"--kind {kind}"
    if retention is not None:
        yield "--retention" if retention else "--no-retention"


async def lives(
    first: int,
    seconds: float,
    tally: Counter[str],
    most: int | None,
    fault: str | None = None,
    between: Between | None = None,
    kind: str | None = None,
    retention: bool | None = None,
) -> None:
    """Life after life, until the time is over or there were ``most``."""
    until = time.monotonic() + seconds
    seed = first
    while time.monotonic() < until and (most is None or seed - first < most):
        await live(seed, tally, ROUNDS, fault, between, kind, retention)
        tally["lives"] += 1
        seed += 1
