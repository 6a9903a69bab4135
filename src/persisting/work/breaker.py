"""Slows a group down while most of its deliveries fail."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 60.0
LEAST_OUTCOMES = 20
"""Fewer outcomes say nothing."""

_SECOND = 1_000_000
_SHORTEST, _LONGEST = 1 * _SECOND, 30 * _SECOND


class Breaker:
    """Counts outcomes of deliveries. Open, it lets one delivery through per pause.

    It opens when more than half of at least :data:`LEAST_OUTCOMES` outcomes of the last minute were
    failures, and closes with the first success. A delivery that was let through and failed doubles
    the pause; the failures of deliveries from before it opened do not.
    """

    def __init__(self) -> None:
        self._outcomes: deque[tuple[int, int, int]] = deque()
        """Second, outcomes and failures: at most one entry for each second of the window."""
        self._total = self._failures = 0
        self._pause = 0
        self._next_probe = 0
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._pause > 0

    def outcome(self, now: int, *, failed: bool, count: int = 1) -> bool:
        """Count outcomes; return whether the breaker has opened or closed."""
        if self._pause:
            if not failed:
                self._pause = 0
                self._outcomes.clear()
                self._total = self._failures = 0
                return True
            if self._probing:
                self._probing = False
                self._pause = min(2 * self._pause, _LONGEST)
                self._next_probe = now + self._pause
            return False
        if failed or self._failures:
            self._add(now // _SECOND, count, count if failed else 0)
        self._forget(now // _SECOND)
        if self._total >= LEAST_OUTCOMES and 2 * self._failures > self._total:
            self._pause = _SHORTEST
            self._next_probe = now + self._pause
            self._probing = False
            return True
        return False

    def _add(self, second: int, outcomes: int, failures: int) -> None:
        self._total += outcomes
        self._failures += failures
        if self._outcomes and self._outcomes[-1][0] == second:
            _, before, failed_before = self._outcomes.pop()
            outcomes, failures = outcomes + before, failures + failed_before
        self._outcomes.append((second, outcomes, failures))

    def _forget(self, second: int) -> None:
        while self._outcomes and self._outcomes[0][0] < second - WINDOW_SECONDS:
            _, outcomes, failures = self._outcomes.popleft()
            self._total -= outcomes
            self._failures -= failures

    def allowed(self, now: int, count: int) -> int:
        """Return how many of ``count`` records may be delivered now."""
        if not self._pause:
            return count
        if now < self._next_probe or not count:
            return 0
        self._next_probe = now + self._pause
        self._probing = True
        return 1

    def retry_at(self) -> int:
        """Return the time at which the next delivery may be allowed; 0 while the breaker is
        closed."""
        return self._next_probe if self._pause else 0
