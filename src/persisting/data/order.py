"""The order in which a stream reads its rows: a sequence that every rank and worker can compute.

Rows are numbered from 0. A shuffled order has two levels, so that the disk is read in blocks:

1. The rows are cut into blocks of consecutive rows, and the blocks are permuted.
2. Some blocks that follow each other in this order form a window, and all rows of a window are
   permuted together.

A reader needs the blocks of one window in memory, and none of the order: each position is computed
from the seed, the epoch and the position itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from persisting.data.permutation import KeyedPermutation


@dataclass(frozen=True)
class Blocks:
    """The granularity of an order."""

    block_rows: int
    window_blocks: int

    @property
    def window_rows(self) -> int:
        return self.block_rows * self.window_blocks


class SequentialOrder:
    """Rows as they are stored. Its windows only say how much is read at once."""

    def __init__(self, size: int, blocks: Blocks) -> None:
        self.size, self._step = size, blocks.window_rows

    def window_end(self, position: int) -> int:
        """Return where the window of a position ends."""
        return min(self.size, (position // self._step + 1) * self._step)

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows at these positions."""
        return positions


class ShuffledOrder:
    """A permutation of all rows that is chosen by the seed and the epoch."""

    def __init__(self, size: int, blocks: Blocks, seed: int, epoch: int) -> None:
        self.size, self._blocks = size, blocks
        self._key = (seed, epoch)
        self._count = -(-size // blocks.block_rows)
        """The number of blocks."""
        self._permuted = KeyedPermutation(self._count, *self._key, "blocks")
        missing = self._count * blocks.block_rows - size
        self._missing = missing
        """How many rows the last block is short of a full one."""
        self._short_slot = self._count
        if missing:
            last = np.array([self._count - 1])
            self._short_slot = int(self._permuted.positions_of(last)[0])
        """The place of the short block among the permuted ones."""
        self._layout = lru_cache(maxsize=4)(self._new_layout)

    def window_end(self, position: int) -> int:
        """Return where the window of a position ends."""
        return self._window_start(self._window_of(position) + 1)

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows at these positions."""
        result = np.empty(len(positions), np.int64)
        if not len(positions):
            return result
        first, last = self._window_of(int(positions.min())), self._window_of(int(positions.max()))
        for window in range(first, last + 1):
            start, end = self._window_start(window), self._window_start(window + 1)
            inside = (positions >= start) & (positions < end)
            if inside.any():
                result[inside] = self._rows_in(window, end - start, positions[inside] - start)
        return result

    def _rows_in(self, window: int, size: int, places: np.ndarray) -> np.ndarray:
        first_rows, starts = self._layout(window)
        shuffled = KeyedPermutation(size, *self._key, "window", window).at(places)
        slots = np.searchsorted(starts, shuffled, side="right") - 1
        return first_rows[slots] + (shuffled - starts[slots])

    def _new_layout(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each block of a window, its first row and its start in the window."""
        first = window * self._blocks.window_blocks
        slots = np.arange(first, min(first + self._blocks.window_blocks, self._count))
        lengths = np.full(len(slots), self._blocks.block_rows, np.int64)
        lengths[slots == self._short_slot] -= self._missing
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        return self._permuted.at(slots) * self._blocks.block_rows, starts

    def _window_start(self, window: int) -> int:
        slot = window * self._blocks.window_blocks
        start = slot * self._blocks.block_rows
        if slot > self._short_slot:
            start -= self._missing
        return min(self.size, start)

    def _window_of(self, position: int) -> int:
        window = position // self._blocks.window_rows
        return window + 1 if self._window_start(window + 1) <= position else window


Order = SequentialOrder | ShuffledOrder


def order_of(size: int, blocks: Blocks, seed: int | None, epoch: int) -> Order:
    """Return the order of an epoch; without a seed, rows are read as they are stored."""
    if seed is None:
        return SequentialOrder(size, blocks)
    return ShuffledOrder(size, blocks, seed, epoch)
