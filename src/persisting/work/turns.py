"""Which bucket the claims of a member begin with."""

from __future__ import annotations

STAY_MICROSECONDS = 250_000
STAY_RECORDS = 1024
"""A member takes new records from one bucket for this long, or until it has claimed this many."""

_MOST_MEMBERS = 1024
"""Members that are remembered: those that died are never heard of again."""


class Turns:
    """Lets members take turns at the buckets.

    A member stays with a bucket for a short time, and others begin with other buckets meanwhile:
    then it needs most of the records that it reads ahead. A member that asks rarely begins with
    another bucket each time. No part of the journal: any order is right.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._members: dict[str, tuple[int, int, int]] = {}
        """By member its turn, when that ends, and how many more records it may claim before."""

    def order(self, now: int, member: str, count: int, buckets: list[int]) -> list[int]:
        """Return the buckets in the order in which a claim of ``count`` records uses them."""
        if not buckets:
            return []
        turn, until, left = self._members.get(member, (0, 0, 0))
        if now >= until or left <= 0:
            self._turn += 1
            turn, until, left = self._turn, now + STAY_MICROSECONDS, STAY_RECORDS
            if len(self._members) >= _MOST_MEMBERS:
                self._members.clear()
        self._members[member] = turn, until, left - count
        first = turn % len(buckets)
        return buckets[first:] + buckets[:first]
