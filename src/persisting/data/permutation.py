"""A keyed permutation: a shuffle that is computed, not stored.

A Feistel network permutes the numbers of a square that is slightly larger than the domain. A number
that leaves the domain is permuted again until it is inside, which keeps the mapping one to one.
Results depend only on the key and the size, never on the version of NumPy: a stream that is resumed
after an upgrade must continue in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import isqrt

import numpy as np

_ROUNDS = 6
_STEP_1 = np.uint64(0xBF58476D1CE4E5B9)
_STEP_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)


def keys_of(*parts: int | str, count: int = _ROUNDS) -> list[np.uint64]:
    """Derive 64-bit keys from numbers and names."""
    text = "\0".join(map(str, parts)).encode()
    digest = hashlib.shake_128(text).digest(8 * count)
    return [np.uint64(n) for n in np.frombuffer(digest, "<u8")]


def mixed(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    """Hash numbers of 64 bits to numbers of 64 bits."""
    value = numbers ^ key
    value = (value ^ (value >> _SHIFT_30)) * _STEP_1
    value = (value ^ (value >> _SHIFT_27)) * _STEP_2
    return value ^ (value >> _SHIFT_31)


class KeyedPermutation:
    """A permutation of ``range(size)`` that is chosen by a key."""

    def __init__(self, size: int, *key: int | str) -> None:
        self.size = size
        self._side = np.uint64(isqrt(max(size, 1) - 1) + 1)
        self._keys = keys_of(*key)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers at these positions of the permuted sequence."""
        return self._walk(positions, self._forward)

    def positions_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return where these numbers are in the permuted sequence."""
        return self._walk(numbers, self._backward)

    def _walk(self, numbers: np.ndarray, permute: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        result = permute(numbers.astype(np.uint64))
        outside = np.flatnonzero(result >= self.size)
        while len(outside):
            result[outside] = permute(result[outside])
            outside = outside[result[outside] >= self.size]
        return result.astype(np.int64)

    def _forward(self, numbers: np.ndarray) -> np.ndarray:
        side = self._side
        left, right = numbers // side, numbers % side
        for key in self._keys:
            left, right = right, (left + mixed(right, key) % side) % side
        result: np.ndarray = left * side + right
        return result

    def _backward(self, numbers: np.ndarray) -> np.ndarray:
        side = self._side
        left, right = numbers // side, numbers % side
        for key in reversed(self._keys):
            left, right = (right + side - mixed(left, key) % side) % side, left
        result: np.ndarray = left * side + right
        return result
