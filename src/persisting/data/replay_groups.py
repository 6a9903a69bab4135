"""Forms groups of records that share a value, such as the rollouts of one prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from persisting.data.row_cache import RowCache
from persisting.data.slots import Slots
from persisting.errors import InvalidArgument

_GONE = -1
"""The offset of a member that retention has removed."""
_NO_PLACES = np.zeros(0, np.uint32)


class Groups:
    """Complete groups: ``size`` records with one value, in the order in which they arrived.

    All records of a value are in one bucket, so their order never depends on who reads them. A
    value may have several groups. Records without a value belong to none.

    Where groups begin depends on the first record that was there when they were formed, which
    retention removes at some time. So a checkpoint has the place of each record in its group.
    """

    def __init__(self, column: str, size: int, buckets: int) -> None:
        self._column, self._size = column, size
        self._ends = [0] * buckets
        self._open: list[dict[Any, list[int]]] = [{} for _ in range(buckets)]
        self._complete: list[list[list[int]]] = [[] for _ in range(buckets)]
        self._arrays: list[np.ndarray | None] = [None] * buckets
        """By bucket: the complete groups as rows of a matrix; None after a change."""
        self._restored: list[tuple[int, np.ndarray]] = [(0, _NO_PLACES)] * buckets
        """By bucket, from a checkpoint: an offset, and the places of the records from there on."""

    def update(self, cache: RowCache, slots: Slots) -> None:
        """Take in the records that were added, and forget groups of removed ones."""
        for bucket, region in enumerate(slots.regions):
            start = max(self._ends[bucket], region.start)
            if start < region.end:
                values = cache.column(bucket, start, region.end, self._column)
                self._add(bucket, start, values)
            self._ends[bucket] = region.end
            # A group that has records left is kept, so that its records never join another.
            complete = self._complete[bucket]
            if any(members[-1] < region.start for members in complete):
                self._complete[bucket] = [m for m in complete if m[-1] >= region.start]
                self._arrays[bucket] = None

    def _add(self, bucket: int, first: int, values: list[Any]) -> None:
        open_groups, complete = self._open[bucket], self._complete[bucket]
        for offset, value in enumerate(values, first):
            if value is None:
                continue
            try:
                members = open_groups.get(value)
                if members is None:
                    members = open_groups[value] = [_GONE] * self._place_of(bucket, offset)
            except TypeError:
                raise InvalidArgument(
                    f"group_by={self._column!r}: {value!r} cannot be the value of a group; use a "
                    "field of numbers or texts"
                ) from None
            members.append(offset)
            if len(members) == self._size:
                complete.append(members)
                self._arrays[bucket] = None
                del open_groups[value]

    def _place_of(self, bucket: int, offset: int) -> int:
        """Return how many records of its group come before the first record of a value."""
        first, places = self._restored[bucket]
        index = offset - first
        return max(0, int(places[index]) - 1) if 0 <= index < len(places) else 0

    def places(self, slots: Slots) -> np.ndarray:
        """Return, by slot, the place of each record in its group from 1 on, 0 for none."""
        result = np.zeros(slots.size, np.uint32)
        for bucket, region in enumerate(slots.regions):
            groups = [*self._complete[bucket], *self._open[bucket].values()]
            lengths = np.array([len(members) for members in groups], np.int64)
            offsets = np.array([offset for members in groups for offset in members], np.int64)
            places = np.arange(len(offsets)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
            live = (offsets >= region.start) & (offsets < region.end)
            span = slots.span(bucket, region.start, region.end)
            result[span.start + offsets[live] - region.start] = places[live]
        return result

    def restore(self, places: np.ndarray, slots: Slots) -> None:
        """Form the groups as they were when :meth:`places` returned this."""
        self._restored = [
            (region.start, places[slots.span(bucket, region.start, region.end)].copy())
            for bucket, region in enumerate(slots.regions)
        ]

    def keys(self) -> np.ndarray:
        """Return the keys of all complete groups, one group in each row.

        Some of their records may have been removed.
        """
        buckets = len(self._complete)
        parts = [np.zeros((0, self._size), np.int64)]
        for bucket, complete in enumerate(self._complete):
            if complete:
                array = self._arrays[bucket]
                if array is None:
                    array = self._arrays[bucket] = np.array(complete, np.int64) * buckets + bucket
                parts.append(array)
        return np.concatenate(parts)
