"""Numbers the live records of all buckets, so that arrays can hold something for each of them."""

from __future__ import annotations

import msgspec
import numpy as np

_LEAST_ROOM = 1024


class Region(msgspec.Struct):
    """The slots of one bucket: offset ``base`` has the first one."""

    base: int = 0
    start: int = 0
    """The first offset that is left."""
    end: int = 0
    """The offset after the last record."""
    room: int = _LEAST_ROOM
    """How many slots there are; a power of two."""


class Slots:
    """Maps buckets and offsets to slots. Every change of the layout needs new arrays."""

    def __init__(self, regions: list[Region]) -> None:
        self.regions = regions
        self._firsts = np.zeros(0, np.int64)
        self.arrange()

    def arrange(self) -> None:
        rooms = [region.room for region in self.regions]
        self._firsts = np.concatenate([[0], np.cumsum(rooms)])
        self._bases = np.array([region.base for region in self.regions])
        self._shifts = self._firsts[:-1] - self._bases
        self._note_ends()

    def _note_ends(self) -> None:
        """Take over the ends of the regions after a change."""
        self._starts = np.array([region.start for region in self.regions])
        self._ends = np.array([region.end for region in self.regions])

    @property
    def size(self) -> int:
        """The number of slots: a power of two that holds all regions."""
        return 1 << max(1, int(self._firsts[-1]) - 1).bit_length()

    @property
    def live(self) -> int:
        return sum(region.end - region.start for region in self.regions)

    def of(self, keys: np.ndarray) -> np.ndarray:
        """Return the slots of records, given by their keys."""
        return self.at(*self.places(keys))

    def at(self, buckets: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the slots of records, given by their places."""
        result: np.ndarray = self._shifts[buckets] + offsets
        return result

    def located(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bucket and the offset of each slot."""
        buckets = np.searchsorted(self._firsts, slots, side="right") - 1
        return buckets, slots - self._shifts[buckets]

    def keys(self, buckets: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the keys of records, given by their places."""
        result: np.ndarray = offsets * len(self.regions) + buckets
        return result

    def places(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bucket and the offset of each key."""
        offsets, buckets = np.divmod(keys, len(self.regions))
        return buckets, offsets

    def is_live(self, buckets: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return which of these records are left."""
        return (offsets >= self._starts[buckets]) & self.is_known(buckets, offsets)

    def is_known(self, buckets: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return which of these records have been seen; they may have been removed."""
        result: np.ndarray = offsets < self._ends[buckets]
        return result

    def span(self, bucket: int, start: int, end: int) -> slice:
        """Return the slots of a range of offsets."""
        first = int(self._firsts[bucket]) - self.regions[bucket].base
        return slice(first + start, first + end)

    def live_slots(self) -> np.ndarray:
        """Return the slots of all live records, in order."""
        spans = [
            self.span(bucket, region.start, region.end)
            for bucket, region in enumerate(self.regions)
        ]
        return np.concatenate([np.arange(s.start, s.stop) for s in spans])

    def live_slots_at(self, numbers: np.ndarray) -> np.ndarray:
        """Return some of :meth:`live_slots` without listing all of them."""
        counts = [region.end - region.start for region in self.regions]
        before = np.concatenate([[0], np.cumsum(counts)])
        buckets = np.searchsorted(before, numbers, side="right") - 1
        starts = np.array(
            [self.span(bucket, r.start, r.end).start for bucket, r in enumerate(self.regions)]
        )
        result: np.ndarray = starts[buckets] + numbers - before[buckets]
        return result

    def grow(self, bucket: int, start: int, end: int) -> bool:
        """Extend a bucket to offsets ``start`` to ``end``; return whether the layout changed.

        Slots of removed records are used again once they are more than half of a region.
        """
        region = self.regions[bucket]
        if start >= region.end:
            moved = region.base != start
            region.base, region.end = start, max(start, end)
        else:
            moved = False
        region.start, region.end = start, max(end, region.end)
        self._note_ends()
        if region.end - region.base <= region.room:
            return moved
        live = region.end - region.start
        if live * 2 <= region.room:
            region.base = region.start
        else:
            region.room = 1 << (region.end - region.base - 1).bit_length()
        return True
