"""Time for leases: microseconds of Unix time that never go back."""

from __future__ import annotations

import time


class Clock:
    """Follows the monotonic clock from the wall clock's time at its start.

    A wall clock that is set back or forward changes no lease. After a restart the clock continues
    at ``latest``, the last time in the journal, if the wall clock is behind it.
    """

    def __init__(self, latest: int = 0) -> None:
        self._began = max(time.time_ns() // 1000, latest)
        self._monotonic = time.monotonic_ns()

    def now(self) -> int:
        return self._began + (time.monotonic_ns() - self._monotonic) // 1000
