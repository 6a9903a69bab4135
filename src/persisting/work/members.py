"""What a keeper remembers of the members of its group."""

from __future__ import annotations

from collections.abc import Iterable

_MEMBER_MICROSECONDS = 60_000_000
"""A member that has not asked for records for this long does not count."""

_FAILURES_OF_DEATH = 5
"""The leases of a member that has died count as this many failures at most."""

_MOST_DEATHS = 1024


class Members:
    """Who has asked for records, and who seems to have died. Times are the keeper's."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, int]] = {}
        """By member, when it last asked for records, and for how many readers."""
        self._deaths: dict[str, int] = {}
        """By member that seems to have died, how many of its leases counted as failures."""

    def asked(self, member: str, now: int, readers: int) -> None:
        """Note that a member has asked for records."""
        self._asked[member] = now, readers
        self._deaths.pop(member, None)

    def left(self, member: str) -> None:
        """Forget a member."""
        self._asked.pop(member, None)

    def count(self, now: int) -> int:
        """Return for how many readers members have asked lately."""
        since = now - _MEMBER_MICROSECONDS
        self._asked = {m: asked for m, asked in self._asked.items() if asked[0] > since}
        return sum(readers for _, readers in self._asked.values())

    def failures(self, expired: Iterable[tuple[str, int]]) -> int:
        """Return how many failures leases are that have ended: each has its member, and when it
        began.

        Those of a member that has not asked since then count a few times only: it has died. Its
        records must come again soon, but one of them may have killed it.
        """
        count = 0
        for member, began in expired:
            asked, _ = self._asked.get(member, (0, 0))
            if asked <= began:
                deaths = self._deaths.get(member, 0)
                if deaths == _FAILURES_OF_DEATH:
                    continue
                self._deaths[member] = deaths + 1
            count += 1
        if len(self._deaths) > _MOST_DEATHS:
            self._deaths.clear()
        return count
