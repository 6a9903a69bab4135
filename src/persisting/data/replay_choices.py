"""How records are drawn: all alike or by weights, with or without replacement."""

from __future__ import annotations

import numpy as np

from persisting.data.random_numbers import RandomNumbers
from persisting.data.sample_slots import Slots
from persisting.data.sum_tree import SumTree

_MOST_ROUNDS = 16


class ArrayChoice:
    """Draws from an array of weights."""

    def __init__(self, weights: np.ndarray) -> None:
        self._weights = weights
        self.count = int(np.count_nonzero(weights))
        """How many places have a chance."""

    def slots(self, places: np.ndarray) -> np.ndarray:
        return places

    def draw(
        self, n: int, random: RandomNumbers, *, replacement: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return places and the chance that each had in a single draw."""
        if not self.count:
            return np.zeros(0, np.int64), np.zeros(0)
        total = self._weights.sum()
        weights = self._weights
        places = _drawn(weights, n, random)
        if not replacement:
            n = min(n, self.count)
            places = _distinct(places)
            while len(places) < n:
                weights = weights.copy() if weights is self._weights else weights
                weights[places] = 0.0
                more = _distinct(_drawn(weights, n - len(places), random))
                places = np.concatenate([places, more])
        return places, self._weights[places] / total


class GroupChoice(ArrayChoice):
    """Draws groups; each stands for several slots."""

    def __init__(self, weights: np.ndarray, members: np.ndarray) -> None:
        super().__init__(weights)
        self._members = members

    def slots(self, places: np.ndarray) -> np.ndarray:
        result: np.ndarray = self._members[places].ravel()
        return result


class TreeChoice:
    """Draws from all records by priority, without looking at each of them."""

    def __init__(self, tree: SumTree, count: int) -> None:
        self._tree, self.count = tree, count

    def slots(self, places: np.ndarray) -> np.ndarray:
        return places

    def draw(
        self, n: int, random: RandomNumbers, *, replacement: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        tree = self._tree
        if not self.count:
            return np.zeros(0, np.int64), np.zeros(0)
        if not replacement and n * 4 > self.count:
            return ArrayChoice(tree.weights).draw(n, random, replacement=False)
        places = np.zeros(0, np.int64)
        for _ in range(_MOST_ROUNDS):
            found = tree.find(random.draw(n - len(places)) * tree.total)
            weights = tree.weights.take(found)
            if weights.min() <= 0.0:  # rounding may lead to an empty slot
                found = found[weights > 0.0]
            places = np.concatenate([places, found]) if len(places) else found
            places = places if replacement else _distinct(places)
            if len(places) == n:
                if len(found) != n:
                    weights = tree.weights.take(places)
                return places, weights / tree.total
        # A few records have nearly all the weight.
        return ArrayChoice(tree.weights).draw(n, random, replacement=replacement)


class UniformChoice:
    """Draws from all records, without looking at each of them."""

    def __init__(self, slots: Slots) -> None:
        self._slots, self.count = slots, slots.live

    def slots(self, places: np.ndarray) -> np.ndarray:
        return self._slots.live_slots_at(places)

    def draw(
        self, n: int, random: RandomNumbers, *, replacement: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        count = self.count
        if not replacement and n * 4 > count:
            places = np.argsort(random.draw(count), kind="stable")[:n]
        else:
            places = np.zeros(0, np.int64)
            while len(places) < n and count:
                found = (random.draw(n - len(places)) * count).astype(np.int64)
                places = np.concatenate([places, found])
                places = places if replacement else _distinct(places)
        return places, np.full(len(places), 1 / max(1, count))


Choice = ArrayChoice | TreeChoice | UniformChoice


def _drawn(weights: np.ndarray, n: int, random: RandomNumbers) -> np.ndarray:
    sums = np.cumsum(weights)
    places = np.searchsorted(sums, random.draw(n) * sums[-1], side="right")
    last = int(np.flatnonzero(weights)[-1])  # rounding may lead beyond the end
    return np.minimum(places, last)


def _distinct(places: np.ndarray) -> np.ndarray:
    """Return each place once, in the order in which it occurs first."""
    _, first = np.unique(places, return_index=True)
    return places[np.sort(first)]
