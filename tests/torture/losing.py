"""Power loss in the process that it strikes: what was not synced is gone, and so is the process."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

from support.crash.disk import (
    COME_BACK,
    FIXED,
    NAMES,
    ZEROS,
    Loss,
    after_power_loss,
    lay_out,
    only_in,
    sampled,
)
from support.crash.recording import RecordingFileSystem

PLACES = ("data", "_indices", "_versions", "_transactions", "_refs", "wal", "tags", "groups")


def any_loss(dice: random.Random) -> Loss:
    kind = dice.randrange(4)
    if kind == 0:
        return dice.choice(FIXED)
    if kind == 1:
        return only_in(dice.choice((NAMES, ZEROS, COME_BACK)), dice.choice(PLACES))
    return sampled(dice.random())


class LosingFileSystem(RecordingFileSystem):
    """Follows the disk call by call, and loses it at the call with a given number."""

    def __init__(self, root: Path, left_on: Path, at: int, loss: Loss) -> None:
        self._left_on, self._at, self._loss = left_on, at, loss
        self.moments = 0
        self.before_the_end: Callable[[str], None] = lambda _: None
        super().__init__(root)

    def _record(self, label: str) -> None:
        self.moments += 1
        if self.moments == self._at:
            # The guard is held: nothing is acknowledged from here on.
            lay_out(after_power_loss(self.disk.freeze(), self._loss), self._left_on)
            self.before_the_end(label)
            os.kill(os.getpid(), signal.SIGKILL)
