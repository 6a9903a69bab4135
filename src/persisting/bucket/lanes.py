"""Groups of puts under way to an object store, where a write takes as long as a request.

Several groups may be under way at the same time, each in a lane of its own. They get their
sequences, offsets and slots in order, and are settled in order: acknowledged, or failed if one
before them failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from persisting.bucket.pending_puts import LogEntry, LoggedBucket, QueuedPut
from persisting.wal.object_log import BegunSlot
from persisting.wal.slots import MOST_UNDER_WAY

log = logging.getLogger("persisting")

_LANE_PUTS = 128
_LANE_BYTES = 128 * 1024
"""This many puts, or bytes of records, do not wait for a group that is under way: they become an
object of their own. Fewer wait and share an object with later puts, since requests cost money."""


_GATHER_SHARE = 0.1
"""The part of a request's time for which a group waits for producers that the last one has just
acknowledged: without it they would form two groups that wait for each other."""

_TURN_SHARE = 0.25
"""The part of a request's time for which puts wait for others of the same turn of an event loop:
a turn that takes longer is not worth it."""

_COHORTS = 3
"""Into how many groups many producers are divided: while the objects of some are under way, the
event loop resumes the others. With 512 producers and 25 ms per request, three groups store about
a tenth more than two, with a fifth more requests."""


class Grouping(NamedTuple):
    """When a group of puts is written."""

    linger: float
    """Seconds that a put may wait for others to share its write."""
    nbytes: int
    """Bytes of records that are written without waiting, and at which a group ends."""

    def count_of(self, queue: Sequence[QueuedPut]) -> int:
        """Return how many of the first puts form a group."""
        nbytes = 0
        for count, put in enumerate(queue, 1):
            nbytes += put.nbytes
            if nbytes >= self.nbytes:
                return count
        return len(queue)


class Lane:
    """A group that is under way to an object store."""

    def __init__(self, puts: list[QueuedPut], entries: list[LogEntry], arrival: int) -> None:
        self.puts, self.entries, self.arrival = puts, entries, arrival
        self.begun: BegunSlot | None = None
        self.rows: dict[LoggedBucket, int] = {}
        for entry in entries:
            for piece in entry.pieces:
                for bucket, chunk in piece.sections:
                    self.rows[bucket] = self.rows.get(bucket, 0) + chunk.count
        self.is_done = self.is_settled = False
        self.failure: BaseException | None = None
        self.followers: list[Future[None]] = []
        """Done when this group is acknowledged or has failed."""

    def last_of(self) -> dict[int, int]:
        """Return the last sequence of each bucket in the group, if it has its sequences."""
        lasts = [] if self.begun is None else self.begun.lasts
        return {
            bucket.number: last
            for entry, last in zip(self.entries, lasts, strict=False)
            for piece in entry.pieces
            for bucket, _ in piece.sections
        }


class Lanes:
    """The groups that are under way, in the order of their slots."""

    def __init__(self) -> None:
        self._lanes: deque[Lane] = deque()
        self._changed = threading.Condition()
        """Taken before the lock of the schema state, never inside it."""
        self._is_wanted = self._settling = False
        self._last_puts, self._request_seconds = 0, 0.0
        """How many puts the last group had, and how long it took to store."""
        self._returning = 0
        """Puts that were acknowledged, and whose callers may be about to put again."""
        self._outstanding = 0
        """How many puts wait or are under way at most; peaks are forgotten gradually."""
        self._rows: dict[LoggedBucket, int] = {}
        """Rows of each bucket that are under way; under the lock of the schema state."""

    # Beginning

    def is_ripe(self, puts: int, nbytes: int, age: float) -> bool:
        """Whether to begin a group now, although more callers may be about to put. ``age`` is how
        long the first put has waited, in seconds."""
        if nbytes >= _LANE_BYTES or self.count_of(puts) < puts:
            return True
        return age > _TURN_SHARE * self._request_seconds

    def count_of(self, puts: int) -> int:
        """Return how many of the first puts form a group: all, if a small rest would have to wait
        for the groups before it."""
        share = self._share
        return share if share and puts >= share + _LANE_PUTS else puts

    @property
    def _share(self) -> int:
        """The puts of one of several groups that take turns; 0 if one group takes all."""
        if self._outstanding < _COHORTS * _LANE_PUTS:
            return 0
        return -(-self._outstanding // _COHORTS)

    def queue_has_grown(self, puts: int, nbytes: int) -> None:
        """Wake the thread in :meth:`wait_for_one` if this many puts need not wait any longer."""
        if self._is_wanted and (_fill_a_lane(puts, nbytes) or puts >= self._last_puts):
            with self._changed:
                self._changed.notify_all()

    def turn_is_over(self) -> None:
        """Note that all callers that could put again have done so."""
        if self._is_wanted:
            with self._changed:
                self._returning = 0
                self._changed.notify_all()
        else:
            self._returning = 0

    def wait_for_one(self, queued: Callable[[], tuple[int, int]]) -> None:
        """Wait until a group may be begun: none is under way, or this one is worth a request.

        ``queued`` returns how many puts wait, and their bytes.
        """
        with self._changed:
            self._is_wanted = True
            while self._lanes and (
                len(self._lanes) >= MOST_UNDER_WAY or not _fill_a_lane(*queued())
            ):
                self._changed.wait()
            self._is_wanted = False
            is_alone = not self._lanes
        if is_alone:
            self._gather(queued)

    def _gather(self, queued: Callable[[], tuple[int, int]]) -> None:
        """Wait a moment for as many puts as the last group had, or until all callers that were
        acknowledged had their turn."""
        end = time.monotonic() + _GATHER_SHARE * self._request_seconds
        with self._changed:
            self._is_wanted = True
            while self._returning and queued()[0] < self._last_puts:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._is_wanted = False
            self._returning = 0

    def add(self, lane: Lane, queued: int) -> None:
        """Take a group as the last one; ``queued`` puts wait after it. It need not have a slot
        yet: if another group fails meanwhile, this one fails with it."""
        with self._changed:
            self._lanes.append(lane)
            now = queued + sum(len(lane.puts) for lane in self._lanes)
            self._outstanding = max(now, self._outstanding - self._outstanding // 8)

    # Ending

    def store(
        self,
        lane: Lane,
        store: Callable[[BegunSlot], None],
        settle: Callable[[Lane], None],
    ) -> None:
        """Store a group that has a slot, in this thread; then :meth:`done`."""
        assert lane.begun is not None
        began = time.monotonic()
        try:
            store(lane.begun)
        except BaseException as exc:
            lane.failure = exc
        else:
            self._last_puts, self._request_seconds = len(lane.puts), time.monotonic() - began
        self.done(lane, settle)

    def done(self, lane: Lane, settle: Callable[[Lane], None]) -> None:
        """Note that a group is stored, or has failed; settle all groups that can be settled.

        ``settle`` acknowledges the puts of a group or fails them; one thread at a time calls it,
        with no lock held.
        """
        with self._changed:
            lane.is_done = True
            if self._settling:
                return  # the thread that settles checks again
            self._settling = True
        while True:
            with self._changed:
                if not self._lanes or not self._lanes[0].is_done:
                    self._settling = False
                    return
                first = self._lanes[0]
                self._returning += len(first.puts)
            try:
                settle(first)
            except BaseException:
                log.exception("the acknowledgement of a put failed")
            with self._changed:
                self._lanes.popleft()
                first.is_settled = True
                followers = first.followers
                if first.failure is not None:
                    for later in self._lanes:
                        later.failure = first.failure
                self._changed.notify_all()
            for follower in followers:
                follower.set_result(None)

    def wait_settled(self) -> None:
        """Wait until all groups that are under way now are acknowledged or have failed."""
        with self._changed:
            last = self._lanes[-1] if self._lanes else None
            while last is not None and not last.is_settled:
                self._changed.wait()

    def follow(self, settled: Future[None]) -> None:
        """Resolve a future when all groups that are under way now are settled."""
        with self._changed:
            if self._lanes:
                self._lanes[-1].followers.append(settled)
                return
        settled.set_result(None)

    # What is under way

    def last_sequences(self) -> list[dict[int, int]]:
        """Return, for each group, the last sequence of each of its buckets."""
        with self._changed:
            return [lane.last_of() for lane in self._lanes]

    def rows_of(self, bucket: LoggedBucket) -> int:
        """Return how many rows of a bucket are under way. Call with the state's lock held."""
        return self._rows.get(bucket, 0)

    def count_rows(self, lane: Lane) -> None:
        """Count the rows of a group as under way. Call with the state's lock held."""
        for bucket, rows in lane.rows.items():
            self._rows[bucket] = self._rows.get(bucket, 0) + rows

    def uncount_rows(self, lane: Lane) -> None:
        """Count the rows of a group no longer as under way. Call with the state's lock held."""
        for bucket, rows in lane.rows.items():
            left = self._rows.pop(bucket) - rows
            if left:
                self._rows[bucket] = left


def _fill_a_lane(puts: int, nbytes: int) -> bool:
    """Whether this many queued puts become an object of their own."""
    return puts >= _LANE_PUTS or nbytes >= _LANE_BYTES
