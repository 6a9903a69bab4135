"""Numbers of dead letters, as ranges: those that were re-driven are mostly consecutive."""

from __future__ import annotations

from collections.abc import Iterable


def has_number(ranges: list[tuple[int, int]], number: int) -> bool:
    """Whether a number is in one of the sorted ranges."""
    low, high = 0, len(ranges)
    while low < high:
        middle = (low + high) // 2
        if ranges[middle][1] <= number:
            low = middle + 1
        else:
            high = middle
    return low < len(ranges) and ranges[low][0] <= number


def with_numbers(ranges: list[tuple[int, int]], numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ranges that also hold some numbers."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted([*ranges, *((n, n + 1) for n in numbers)]):
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return merged
