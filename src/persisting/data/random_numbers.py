"""Random numbers that depend on a seed and a count only, so that two numbers restore them."""

from __future__ import annotations

import numpy as np

from persisting.data.permutation import keys_of, mixed

_SHIFT = np.uint64(11)


class RandomNumbers:
    """Numbers from 0 to 1, the same for the same seed in every version."""

    def __init__(self, seed: int, drawn: int = 0) -> None:
        self.seed, self.drawn = seed, drawn
        self._keys = keys_of(seed, "replay", count=2)

    def draw(self, count: int) -> np.ndarray:
        numbers = np.arange(self.drawn, self.drawn + count, dtype=np.uint64)
        self.drawn += count
        bits = mixed(mixed(numbers, self._keys[0]), self._keys[1])
        result: np.ndarray = (bits >> _SHIFT).astype(np.float64) * 2.0**-53
        return result
