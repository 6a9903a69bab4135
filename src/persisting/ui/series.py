"""Values over the last hour, stored as steps: a value that does not change costs nothing."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

KEPT_SECONDS = 3600.0


class Point(NamedTuple):
    time: float
    value: float


class Series:
    """A value over time; one thread adds to it, others read it."""

    def __init__(self) -> None:
        self._times, self._values = array("d"), array("d")
        self._lock = threading.Lock()

    def add(self, time: float, value: float) -> None:
        with self._lock:
            self._add(time, value)

    def _add(self, time: float, value: float) -> None:
        values = self._values
        if len(values) >= 2 and values[-1] == value == values[-2]:
            self._times[-1] = time
        else:
            self._times.append(time)
            values.append(value)
        old = 0
        while old + 1 < len(values) and self._times[old + 1] < time - KEPT_SECONDS:
            old += 1
        if old:
            del self._times[:old], values[:old]

    def __len__(self) -> int:
        return len(self._values)

    @property
    def last(self) -> float:
        return self._values[-1] if self._values else 0.0

    def points(self, since: float = 0.0) -> list[Point]:
        """Return the points at ``since`` or later, and the one before them."""
        with self._lock:
            first = max(0, bisect_left(self._times, since) - 1)
            times, values = self._times[first:], self._values[first:]
        return [Point(*pair) for pair in zip(times, values, strict=True)]

    def rates(self, since: float = 0.0) -> list[Point]:
        """Return the growth per second between neighbouring points; a decrease counts as none.

        The first point has the rate of the time after it, so that a line begins there.
        """
        points = self.points(since)
        rates = [
            Point(after.time, max(0.0, after.value - before.value) / (after.time - before.time))
            for before, after in pairwise(points)
            if after.time > before.time
        ]
        return [Point(points[0].time, rates[0].value), *rates] if rates else []
