"""Simulate power loss in the working process: lose what was not synced, then kill the process."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

from support.crash.disk_model import (
    FIXED_LOSSES,
    PARTIAL_LOSSES,
    Loss,
    after_power_loss,
    only_in,
    sampled,
    write_tree,
)
from support.crash.recording import RecordingFileSystem

PLACES = ("data", "_indices", "_versions", "_transactions", "_refs", "wal", "tags", "groups")


def random_loss(rng: random.Random) -> Loss:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(FIXED_LOSSES)
    if kind == 1:
        return only_in(rng.choice(PARTIAL_LOSSES), rng.choice(PLACES))
    return sampled(rng.random())


class PowerLossFileSystem(RecordingFileSystem):
    """Follows the disk call by call, and simulates power loss at the call with a given number."""

    def __init__(self, root: Path, target: Path, at: int, loss: Loss) -> None:
        self._target, self._at, self._loss = target, at, loss
        self.steps = 0
        self.before_kill: Callable[[str], None] = lambda _: None
        super().__init__(root)

    def _record(self, label: str) -> None:
        self.steps += 1
        if self.steps == self._at:
            # The guard is held, so nothing is acknowledged from here on.
            write_tree(after_power_loss(self.disk.freeze(), self._loss), self._target)
            self.before_kill(label)
            os.kill(os.getpid(), signal.SIGKILL)
