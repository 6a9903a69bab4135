"""The numbers of a work group: what is in flight, and since when something waits."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from persisting.topic.work_status import WorkStatus
from persisting.work.state import GroupState


class GroupNumbers:
    """Counts for a keeper, which calls it under its lock."""

    def __init__(self, state: GroupState, spans: dict[int, tuple[int, int]]) -> None:
        """``spans`` has the first and the end offset of every bucket: what may be delivered."""
        self._state, self._spans = state, spans
        self.arrivals: dict[int, tuple[int, int]] = {}
        """By bucket, the offset of its oldest record, and when that arrived."""

    def status(
        self, now: int, *, members: int, breaker_open: bool, dead_letter_error: str | None
    ) -> WorkStatus:
        """Return the numbers of all buckets together."""
        in_flight = retrying = unacknowledged = 0
        oldest: int | None = None
        for number, (start, end) in self._spans.items():
            bucket = self._state.bucket(number)
            leased, again = bucket.records.counts(now)
            available = self._available_since(number, now)
            if available is not None:
                oldest = available if oldest is None else min(oldest, available)
            in_flight, retrying = in_flight + leased, retrying + again
            unacknowledged += len(bucket.records) + max(0, end - max(bucket.next, start))
        return WorkStatus(
            time=time.time(),
            members=members,
            in_flight=in_flight,
            retrying=retrying,
            dying=len(self._state.dying),
            unacknowledged=unacknowledged,
            oldest_available=None if oldest is None else oldest / 1e6,
            breaker_open=breaker_open,
            dead_letter_error=dead_letter_error,
            **msgspec.to_builtins(self._state.counts),
        )

    def stats(self, now: int, status: WorkStatus) -> dict[str, Any]:
        """Return the numbers of all buckets together, and of each of them."""
        buckets, size = {}, 0
        for number in sorted(self._spans):
            start, end = self._spans[number]
            bucket = self._state.bucket(number)
            leased, again = bucket.records.counts(now)
            size += bucket.records.size
            buckets[number] = {
                "floor": max(bucket.floor, start),
                "next_offset": max(bucket.next, start),
                "end_offset": end,
                "in_flight": leased,
                "retrying": again,
                "open": len(bucket.records),
            }
        return {
            "members": status.members,
            "in_flight": status.in_flight,
            "retrying": status.retrying,
            "dying": status.dying,
            "unacknowledged": status.unacknowledged,
            "oldest_unacknowledged_seconds": status.oldest_seconds,
            **msgspec.to_builtins(self._state.counts),
            "breaker": "open" if status.breaker_open else "closed",
            "dead_letter_error": status.dead_letter_error,
            "state_bytes": size,
            "buckets": buckets,
        }

    def oldest_offset(self, bucket: int, now: int) -> int | None:
        """Return the oldest offset of a bucket, None if no record was available on arrival."""
        if bucket not in self._spans:
            return None
        return self._state.oldest(bucket, now, self._spans[bucket])[0]

    def _available_since(self, bucket: int, now: int) -> int | None:
        """Return since when the oldest unacknowledged record of a bucket can be delivered.

        The arrival may be that of a record before it, which was the oldest a short time ago.
        """
        offset, since = self._state.oldest(bucket, now, self._spans[bucket])
        if offset is None:
            return since
        known, arrival = self.arrivals.get(bucket, (offset, 0))
        if known > offset or not arrival:  # not looked up yet, or damaged
            records = self._state.bucket(bucket).records
            row = records.find(offset)
            arrival = records.first[row] if row is not None else 0
        available = [time for time in (arrival, since) if time]
        return min(available, default=None)
