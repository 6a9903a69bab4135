"""What a work group knows about one bucket."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from persisting.work.group_values import Settings
from persisting.work.open_records import NEVER, OpenRecords

_SCAN_ROWS = 4096
_FULL_PAUSE = 1_000_000
"""While no more dead letters are accepted: microseconds until such records are checked again."""


class BucketState:
    """The part of one bucket."""

    __slots__ = (
        "cuts",
        "delays",
        "dirty",
        "epoch",
        "generation",
        "more",
        "next",
        "next_due",
        "ready",
        "records",
    )

    def __init__(self) -> None:
        self.next = 0
        """The first offset that was neither delivered nor read ahead."""
        self.epoch = 0
        self.generation = 0
        """How many times the end went back: the offsets from there on hold other records."""
        self.cuts: list[tuple[int, int]] = []
        """Generations with the end that they began with, both rising."""
        self.delays: list[tuple[int, int, int]] = []
        """First offset, end and time of delayed records, sorted. The bucket stores them: they are
        not part of the state, which they enter when ``next`` reaches them."""
        self.records = OpenRecords()
        self.ready: deque[int] = deque()
        """Offsets that could be delivered when the rows were last scanned."""
        self.more = False
        """Whether the last scan has left out offsets that could be delivered."""
        self.dirty = False
        """Whether a change since the last scan may have made a record deliverable."""
        self.next_due = NEVER

    @property
    def floor(self) -> int:
        """The offset below which everything is finished."""
        first = self.records.first_open()
        return self.next if first is None else first

    def still_has(self, offset: int, generation: int) -> bool:
        """Whether an offset still holds the record that it held in an earlier generation."""
        return all(offset < end for began, end in self.cuts if began > generation)

    def next_ready(self, now: int, settings: Settings, *, dying_full: bool) -> int | None:
        """Return an offset that may be delivered again or for the first time, or whose record goes
        to the dead letters: not if ``dying_full``, when no further one is sent there."""
        changed = self.dirty or self.next_due <= now
        if changed and settings.priority is not None:
            self.ready.clear()  # a record with a higher priority may have become deliverable
        while True:
            if not self.ready:
                if not (self.dirty or self.more or self.next_due <= now):
                    return None
                by_key = settings.ordered_by is not None
                below = settings.max_deliveries if dying_full else None
                found = self.records.due_offsets(now, _SCAN_ROWS, by_key=by_key, below=below)
                offsets, self.more, self.next_due = found
                if dying_full:
                    self.next_due = min(self.next_due, now + _FULL_PAUSE)
                self.ready.extend(offsets)
                self.dirty = False
                if not offsets:
                    return None
            offset = self.ready.popleft()
            row = self.records.find(offset)
            if row is None or self.records.due[row] > now:
                continue
            if dying_full and self.records.attempts[row] >= settings.max_deliveries:
                self.next_due = min(self.next_due, now + _FULL_PAUSE)
                continue
            return offset


def delay_run(delays: list[tuple[int, int, int]], first: int, end: int) -> tuple[int, int | None]:
    """Return how many offsets from ``first`` on have the same delay, and when it ends, if any."""
    place = bisect_right(delays, (first, NEVER, NEVER)) - 1
    if place >= 0 and first < delays[place][1]:
        return min(end, delays[place][1]) - first, delays[place][2]
    following = delays[place + 1][0] if place + 1 < len(delays) else end
    return min(end, following) - first, None
