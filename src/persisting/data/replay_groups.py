"""Forms groups of records that share a value, such as the rollouts of one prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from persisting.data.row_cache import RowCache
from persisting.data.slots import Slots
from persisting.errors import InvalidArgument


class Groups:
    """Complete groups: ``size`` records with one value, in the order in which they arrived.

    All records of a value are in one bucket, so their order never depends on who reads them. A
    value may have several groups. Records without a value belong to none.
    """

    def __init__(self, column: str, size: int, buckets: int) -> None:
        self._column, self._size = column, size
        self._ends = [0] * buckets
        self._open: list[dict[Any, list[int]]] = [{} for _ in range(buckets)]
        self._complete: list[list[list[int]]] = [[] for _ in range(buckets)]

    def update(self, cache: RowCache, slots: Slots) -> None:
        """Take in the records that were added, and forget groups of removed ones."""
        for bucket, region in enumerate(slots.regions):
            start = max(self._ends[bucket], region.start)
            values = cache.column(bucket, start, region.end, self._column)
            self._add(bucket, start, values)
            self._ends[bucket] = region.end
            complete = self._complete[bucket]
            if any(members[0] < region.start for members in complete):
                self._complete[bucket] = [m for m in complete if m[0] >= region.start]

    def _add(self, bucket: int, first: int, values: list[Any]) -> None:
        open_groups, complete = self._open[bucket], self._complete[bucket]
        for offset, value in enumerate(values, first):
            if value is None:
                continue
            try:
                members = open_groups.setdefault(value, [])
            except TypeError:
                raise InvalidArgument(
                    f"group_by={self._column!r}: {value!r} cannot be the value of a group; use a "
                    "field of numbers or texts"
                ) from None
            members.append(offset)
            if len(members) == self._size:
                complete.append(members)
                del open_groups[value]

    def keys(self) -> np.ndarray:
        """Return the keys of all complete groups, one group in each row."""
        buckets = len(self._complete)
        parts = [np.zeros((0, self._size), np.int64)]
        for bucket, complete in enumerate(self._complete):
            if complete:
                parts.append(np.array(complete, np.int64) * buckets + bucket)
        return np.concatenate(parts)
