"""The rows of a bucket that match a condition, as one bit for each row."""

from __future__ import annotations

import numpy as np

_BLOCK = 4096


class Selection:
    """Finds the offset of the n-th row that matches."""

    def __init__(self, first: int, size: int) -> None:
        """All offsets from ``first`` to ``first + size``, none of them selected yet."""
        self._first = first
        self._bits = np.zeros(-(-size // _BLOCK) * (_BLOCK // 8), np.uint8)
        self._before: np.ndarray | None = None

    def add(self, offsets: np.ndarray) -> None:
        """Select rows by their offsets."""
        places = offsets - self._first
        bits = np.left_shift(1, 7 - (places & 7)).astype(np.uint8)
        np.bitwise_or.at(self._bits, places >> 3, bits)
        self._before = None

    @property
    def count(self) -> int:
        return int(self._starts[-1])

    @property
    def _starts(self) -> np.ndarray:
        """How many rows are selected before each block, and in total."""
        if self._before is None:
            ones = np.unpackbits(self._bits.reshape(-1, _BLOCK // 8), axis=1).sum(
                axis=1, dtype=np.int64
            )
            self._before = np.concatenate([[0], np.cumsum(ones)])
        return self._before

    def offsets(self, numbers: np.ndarray) -> np.ndarray:
        """Return the offsets of the selected rows with these numbers, in ascending order."""
        starts = self._starts
        blocks = np.searchsorted(starts, numbers, side="right") - 1
        result = np.empty(len(numbers), np.int64)
        for block in np.unique(blocks):
            low, high = np.searchsorted(blocks, (block, block + 1))
            bits = self._bits[block * (_BLOCK // 8) : (block + 1) * (_BLOCK // 8)]
            inside = np.flatnonzero(np.unpackbits(bits))
            chosen = numbers[low:high] - starts[block]
            result[low:high] = self._first + block * _BLOCK + inside[chosen]
        return result
