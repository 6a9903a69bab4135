"""Weights that can be changed one by one and sampled in proportion, all in logarithmic time."""

from __future__ import annotations

import numpy as np


class SumTree:
    """A binary tree over ``capacity`` weights (a power of two); each node is the sum below it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._levels = capacity.bit_length() - 1
        self._sums = np.zeros(2 * capacity)

    @property
    def total(self) -> float:
        return float(self._sums[1])

    @property
    def weights(self) -> np.ndarray:
        """All weights, to be read only."""
        return self._sums[self.capacity :]

    def set(self, slots: np.ndarray, weights: np.ndarray | float) -> None:
        """Set the weights of some slots; of a slot that occurs twice, the last one counts."""
        nodes = slots + self.capacity
        self._sums[nodes] = weights
        if len(nodes) * 4 > self.capacity:
            self._rebuild()
            return
        for _ in range(self._levels):
            nodes = nodes >> 1
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def fill(self, weights: np.ndarray) -> None:
        """Set the weights of all slots."""
        self._sums[self.capacity :] = weights
        self._rebuild()

    def _rebuild(self) -> None:
        size = self.capacity
        while size > 1:
            below = self._sums[size : 2 * size]
            size //= 2
            np.add(below[0::2], below[1::2], out=self._sums[size : 2 * size])

    def find(self, places: np.ndarray) -> np.ndarray:
        """Return the slots in whose weights these places of the running sum lie."""
        nodes = np.ones(len(places), np.int64)
        left_over = places.copy()
        for _ in range(self._levels):
            nodes <<= 1
            left = self._sums[nodes]
            goes_right = left_over >= left
            left_over -= left * goes_right
            nodes += goes_right
        return nodes - self.capacity
