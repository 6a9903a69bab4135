"""Retention: decides how many fragments to drop, whole ones, the oldest first."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from persisting.errors import InvalidArgument
from persisting.table.view import TableView


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What must be kept; a fragment beyond any of the limits may be dropped."""

    rows: int | None = None
    nbytes: int | None = None
    seconds: float | None = None

    def check(self) -> None:
        for name, value in (("rows", self.rows), ("bytes", self.nbytes), ("seconds", self.seconds)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise InvalidArgument(
                    f"retention by {name} must be a number of 0 or more, got {value!r}"
                )

    @property
    def any(self) -> bool:
        return (self.rows, self.nbytes, self.seconds) != (None, None, None)


def droppable(view: TableView, limits: Limits, floor: int | None = None) -> int:
    """How many of the first fragments may be dropped.

    Rows at or above the offset ``floor`` are always kept.
    """
    by_rows = _count(view, lambda rows, nbytes: limits.rows is not None and rows >= limits.rows)
    by_bytes = _count(
        view, lambda rows, nbytes: limits.nbytes is not None and nbytes >= limits.nbytes
    )
    count = max(by_rows, by_bytes, _aged(view, limits.seconds))
    if floor is not None:
        while count and view.start + sum(s.rows for s in view.sizes[:count]) > floor:
            count -= 1
    return count


def _count(view: TableView, enough: Callable[[int, int], bool]) -> int:
    """How many fragments can be dropped while the remaining (rows, bytes) are still ``enough``."""
    rows, nbytes = view.rows, sum(size.nbytes for size in view.sizes)
    for count, size in enumerate(view.sizes):
        rows, nbytes = rows - size.rows, nbytes - size.nbytes
        if not enough(rows, nbytes):
            return count
    return len(view.sizes)


def _aged(view: TableView, seconds: float | None) -> int:
    """How many of the first fragments hold only rows that arrived more than ``seconds`` ago."""
    if seconds is None:
        return 0
    before = (time.time() - seconds) * 1e6
    end, count = view.start, 0
    for size in view.sizes:
        end += size.rows
        if not size.rows or view.arrival(end - 1) < before:
            count += 1
        else:
            break
    return count
