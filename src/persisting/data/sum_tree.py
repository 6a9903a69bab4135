"""Weights that can be changed one by one and sampled in proportion, all in logarithmic time."""

from __future__ import annotations

import numpy as np

_TOP = 4096
"""From this many nodes on, a running sum is faster than more tree levels."""


class SumTree:
    """A binary tree over ``capacity`` weights (a power of two); each node is the sum below it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._top = min(_TOP, capacity)
        """The nodes of the highest level begin here; there are as many."""
        self._levels = (capacity // self._top).bit_length() - 1
        self._sums = np.zeros(2 * capacity)
        self._running = np.zeros(self._top + 1)
        self._is_running = False
        """Whether ``_running`` has the present sums."""

    def _running_sums(self) -> np.ndarray:
        """Return the sums before each node of the highest level, and the total."""
        if not self._is_running:
            np.cumsum(self._sums[self._top : 2 * self._top], out=self._running[1:])
            self._is_running = True
        return self._running

    @property
    def total(self) -> float:
        return float(self._running_sums()[-1])

    @property
    def weights(self) -> np.ndarray:
        """All weights, to be read only."""
        return self._sums[self.capacity :]

    def set(self, slots: np.ndarray, weights: np.ndarray | float) -> None:
        """Set the weights of some slots; if a slot occurs twice, its last weight counts."""
        self._is_running = False
        nodes = slots + self.capacity
        self._sums[nodes] = weights
        if len(nodes) * 4 > self.capacity:
            self._rebuild()
            return
        for _ in range(self._levels):
            other = nodes ^ 1
            sums = self._sums.take(nodes)
            sums += self._sums.take(other)
            nodes = nodes >> 1
            self._sums[nodes] = sums

    def fill(self, weights: np.ndarray) -> None:
        """Set the weights of all slots."""
        self._sums[self.capacity :] = weights
        self._rebuild()

    def _rebuild(self) -> None:
        self._is_running = False
        size = self.capacity
        while size > self._top:
            below = self._sums[size : 2 * size]
            size //= 2
            np.add(below[0::2], below[1::2], out=self._sums[size : 2 * size])

    def find(self, places: np.ndarray) -> np.ndarray:
        """Return the slots in whose weights these places of the running sum lie."""
        running = self._running_sums()
        tops = np.searchsorted(running[1:-1], places, side="right")
        left_over = places - running[tops]
        nodes = tops + self._top
        for _ in range(self._levels):
            nodes <<= 1
            left = self._sums.take(nodes)
            goes_right = left_over >= left
            left *= goes_right
            left_over -= left
            nodes += goes_right
        return nodes - self.capacity
