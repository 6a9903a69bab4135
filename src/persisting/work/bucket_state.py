"""What a work group knows about one bucket."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from persisting.work.group_values import Settings
from persisting.work.open_records import NEVER, OpenRecords

_SCAN_ROWS = 4096


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
        """How often the end went back: the offsets from there on hold other records."""
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

    def next_ready(self, now: int, settings: Settings) -> int | None:
        """Return an offset that may be delivered again or for the first time."""
        changed = self.dirty or self.next_due <= now
        if changed and settings.priority is not None:
            self.ready.clear()  # a record with a higher priority may have become deliverable
        while True:
            if not self.ready:
                if not (self.dirty or self.more or self.next_due <= now):
                    return None
                by_key = settings.ordered_by is not None
                found = self.records.due_offsets(now, _SCAN_ROWS, by_key=by_key)
                offsets, self.more, self.next_due = found
                self.ready.extend(offsets)
                self.dirty = False
                if not offsets:
                    return None
            offset = self.ready.popleft()
            row = self.records.find(offset)
            if row is not None and self.records.due[row] <= now:
                return offset


def delay_run(delays: list[tuple[int, int, int]], first: int, end: int) -> tuple[int, int | None]:
    """Return how many offsets from ``first`` on have the same delay, and when it ends, if any."""
    place = bisect_right(delays, (first, NEVER, NEVER)) - 1
    if place >= 0 and first < delays[place][1]:
        return min(end, delays[place][1]) - first, delays[place][2]
    following = delays[place + 1][0] if place + 1 < len(delays) else end
    return min(end, following) - first, None
