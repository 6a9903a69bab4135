"""The workers of a measurement: what they have claimed and finished, and when they stop."""

from __future__ import annotations

import time

from peersbench.record_kinds import KINDS, Record

WORKERS = 64
LEASE = 30.0
SMALL = KINDS["small"]


class Crowd:
    """Counts what workers finish, until they have finished enough or the time is over."""

    def __init__(self, workers: int, seconds: float, most: int | None = None) -> None:
        self.workers, self.most = workers, most
        self._until = time.perf_counter() + seconds
        self._began = time.perf_counter()
        self.claimed: list[Record] = []
        self.finished = 0
        self.seconds = 0.0
        """From the start until the last record was finished: some systems only notice a while later
        that there is no more."""

    @property
    def more(self) -> bool:
        """Whether a worker should claim another record."""
        enough = self.most is not None and len(self.claimed) >= self.most
        return not enough and time.perf_counter() < self._until

    def finish(self) -> None:
        """Count a record that was acknowledged."""
        self.finished += 1
        self.seconds = time.perf_counter() - self._began
