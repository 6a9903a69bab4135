"""The log of a bucket's owner in an object store, as its readers follow it.

The name of the next object is known, so a poll is one request for it, which returns the object or
"not found". Nothing is listed after the start. While a caller waits for records, the log is polled
continuously, and readers never wait for a request themselves: they are woken when an object has
arrived. After an object was found, the next ones are requested together, because an owner may store
several at a time. They are returned in order: an object after a free slot does not count.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from persisting.bucket import slot_files
from persisting.bucket.log_follower import DeadLogRows, LoggedRows, stored_rows
from persisting.bucket.log_index import LogIndex
from persisting.bucket.schema_state import EVOLVING
from persisting.concurrency import timer
from persisting.concurrency.coalesced import weak_callback
from persisting.concurrency.pool import request_pool
from persisting.records import RecordEncoder
from persisting.store.object_store import ObjectStore
from persisting.wal.lease import NOTHING_RELEASED, lease_register
from persisting.wal.slots import (
    MOST_UNDER_WAY,
    check_slot,
    first_free,
    is_claim,
    slot_key,
    slot_of,
    slots_prefix,
)

LOOK_SECONDS = 0.1
"""A reader that does not wait polls again if the last poll is older than this."""

FOLLOW_SECONDS = 3.0
"""For how long polling continues after the last wait of a reader."""

LONGEST_PAUSE = 0.25
"""The longest pause between two polls for a reader that waits."""

_BUSY_SECONDS = 1.0
"""For how long after an object there is no pause between two polls."""

_PAUSE_SHARE = 1 / 20
"""The pause after that, as a share of the time since the last object."""

_SPACING_SECONDS = 0.02
"""The least time between the starts of two polls for an object that does not exist yet."""

_SMALL_BYTES = 128 * 1024
"""While objects are at most this large, a poll starts halfway through the previous one: reading
such an object twice costs little."""

_LOOKS_AT_ONCE = 2
_EARLY_SECONDS = 0.002

_LEASE_SECONDS = 1.0
"""How often it checks whether objects were deleted before they were read."""

_MOST_AHEAD = 2 * MOST_UNDER_WAY
_PARALLEL_READS = 16


class LogReader(Protocol):
    """A reader of one bucket of a log."""

    def wake(self) -> None:
        """Take what the log has: there is more. Called from any thread, and must not block."""


class _Found(NamedTuple):
    """An object of the log: the records of a group commit, None for a claim."""

    records: LogIndex | None
    size: int


class SlotLog:
    """The objects of one log that some reader has not read yet. Thread-safe."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.name, self._store = name, store
        self._starting = threading.Lock()
        self._guard = threading.Condition()
        """Guards everything below; never held during a request."""
        self._indexes: deque[LogIndex] = deque()
        self._next = 0
        self._started = self._ended = self._dropped = False
        self._starts = 0
        self._taken: WeakKeyDictionary[LogReader, int] = WeakKeyDictionary()
        """By reader, the sequence up to which it has the records."""
        self._under_way: Counter[int] = Counter()
        """By slot, how many polls are under way."""
        self._began = 0.0
        """When the last poll started."""
        self._request_seconds = 0.0
        """How long a poll takes that finds nothing."""
        self._last_size = 0
        self._ahead: dict[int, _Found] = {}
        """Objects that arrived before the one in front of them."""
        self._in_a_row = 0
        """Objects since the last poll that found nothing: the more, the more are requested."""
        self._scheduled = False
        self._followed_until = 0.0
        self._found_at = time.monotonic()
        self._looked_at = self._look_began = self._expired_at = 0.0
        """Of the last poll that found nothing: its end, its start, and the earliest valid start."""
        self._callers = 0
        self._problem: Exception | None = None
        self._asking_lease = False
        self._lease_at = 0.0
        self.through = 0
        """The last sequence that was read."""
        self.gaps = 0
        """How many times objects were deleted before they were read: the tables have their
        records."""

    # Readers

    def join(self, view: LogReader) -> None:
        """Keep objects until this reader has read them."""
        with self._guard:
            self._taken[view] = 0
            if self._dropped:  # it may need what the others have read
                self._started = self._ended = False

    def leave(self, view: LogReader) -> None:
        """Keep nothing more for this reader; stop polling if it was the last."""
        with self._guard:
            self._taken.pop(view, None)
            if not self._taken:
                self._followed_until = 0.0

    def took(self, view: LogReader, sequence: int) -> None:
        """Drop what all readers have read."""
        with self._guard:
            if view not in self._taken:
                return
            self._taken[view] = sequence
            least = min(self._taken.values())
            while self._indexes and self._indexes[0].last_sequence <= least:
                self._indexes.popleft()
                self._dropped = True

    def rows(self, bucket: int, after: int, through: int) -> Iterator[LoggedRows | DeadLogRows]:
        """Yield the rows of a bucket above a sequence, up to one that :attr:`through` had."""
        with self._guard:
            indexes = [i for i in self._indexes if after < i.last_sequence <= through]
        encoder: RecordEncoder | None = None
        for index in indexes:
            for block in index.blocks(bucket, after):
                if encoder is None or encoder.schema is not block.schema:
                    encoder = RecordEncoder(block.schema, EVOLVING)
                yield from stored_rows(block, bucket, encoder, index.folder)

    # Polling

    @property
    def has_ended(self) -> bool:
        """Whether a claim ends the log: another process takes over from its owner."""
        return self._ended

    @property
    def is_followed(self) -> bool:
        """Whether the log is polled in the background, which wakes the readers when it has more."""
        return self._started and self._problem is None and time.monotonic() < self._followed_until

    @property
    def is_fresh(self) -> bool:
        """Whether the last poll is recent."""
        if not self._started or self._problem is not None:
            return False
        recently = time.monotonic() - self._looked_at < LOOK_SECONDS
        return self._ended or (recently and self._look_began >= self._expired_at)

    def expire(self) -> None:
        """Poll at the next :meth:`advance`, however recent the last poll was."""
        self._expired_at = time.monotonic()

    def follow(self, seconds: float = FOLLOW_SECONDS) -> None:
        """Keep polling for a while, in the background: a caller waits for records, or reads
        repeatedly."""
        with self._guard:
            self._followed_until = max(self._followed_until, time.monotonic() + seconds)
            if self._started and self._problem is None and not self._scheduled:
                self._go_on()

    def start(self) -> bool:
        """Read all objects that exist, unless that was done before; return whether it was done now.
        Blocking."""
        with self._starting:
            if self._started:
                return False
            self._start()
            return True

    def advance(self) -> int:
        """Read all there is, unless the last poll is recent; return the last sequence. Blocking."""
        if self.start():
            return self.through
        with self._guard:
            if self.is_fresh:
                return self.through
            called, self._problem = time.monotonic(), None
            self._callers += 1
            try:
                self._go_on()
                self._ask_lease()
                while not self._is_answered(called):
                    self._guard.wait()
            finally:
                self._callers -= 1
            if self._problem is not None:
                raise self._problem
            return self.through

    def _is_answered(self, called: float) -> bool:
        if self._problem is not None or self._ended:
            return True
        looked = self._looked_at >= called and self._look_began >= self._expired_at
        return looked and not self._asking_lease

    def _go_on(self) -> None:
        """Request the next object, unless that is under way."""
        if not self._under_way[self._next]:
            self._ask()

    def _ask(self) -> None:
        """Request the next object, and those after it that may exist."""
        if self._ended:
            return
        at_once = min(max(1, self._in_a_row), _MOST_AHEAD)
        for slot in range(self._next, self._next + at_once):
            if not self._under_way[slot] and slot not in self._ahead:
                self._begin_look(slot)
        if self._is_eager:
            self._ask_in(self._spacing)

    def _begin_look(self, slot: int) -> None:
        now = self._began = time.monotonic()
        try:
            request_pool().submit(self._look, slot, self._starts, now)
        except RuntimeError as exc:  # the interpreter is shutting down
            self._fail(exc)
        else:
            self._under_way[slot] += 1

    def _look(self, slot: int, start: int, began: float) -> None:
        found, problem = None, None
        try:
            found = self._read(slot)
        except Exception as exc:  # the next reader that asks gets it
            problem = exc
        with self._guard:
            if start != self._starts:
                return
            self._under_way[slot] -= 1
            if not self._under_way[slot]:
                del self._under_way[slot]
            if problem is not None:
                views = self._fail(problem)
            else:
                views = self._answered(slot, began, found)
        for view in views:
            view.wake()

    def _read(self, slot: int) -> _Found | None:
        """Read an object; None if there is none."""
        found = self._store.get(slot_key(self.name, slot))
        if found is None:
            return None
        if is_claim(found.data):
            return _Found(None, 0)
        place = str(self._store.address / slot_key(self.name, slot))
        check_slot(found.data, place)
        return _Found(slot_files.index_slots(place, [found.data]), len(found.data))

    def _answered(self, slot: int, began: float, found: _Found | None) -> list[LogReader]:
        """Use an answer; return the readers to wake."""
        if found is not None and slot >= self._next:
            self._ahead[slot] = found
        before = self._next
        while (found := self._ahead.pop(self._next, None)) is not None and self._add(found):
            pass
        if self._next > before or self._ended:
            self._found_at = time.monotonic()
            self._in_a_row += self._next - before
            if self.is_followed or self._callers:
                self._ask()
            self._guard.notify_all()
            return list(self._taken)
        if slot == self._next:
            now = time.monotonic()
            self._look_began, self._looked_at = max(self._look_began, began), now
            self._request_seconds = now - began
            self._in_a_row = 0
            self._guard.notify_all()
            if self._callers and began < self._expired_at:
                self._go_on()
            elif self.is_followed:
                self._ask_in(self._pause)
                self._ask_lease()
        return []

    def _add(self, found: _Found) -> bool:
        """Add the next object; return whether it has records."""
        if found.records is None:
            self._ended = True
            return False
        self._indexes.append(found.records)
        self.through = max(self.through, found.records.last_sequence)
        self._last_size = found.size
        self._next += 1
        return True

    @property
    def _is_busy(self) -> bool:
        return time.monotonic() - self._found_at < _BUSY_SECONDS

    @property
    def _is_eager(self) -> bool:
        """Whether to poll again before the last poll is answered."""
        return self._is_busy and self.is_followed and self._last_size <= _SMALL_BYTES

    @property
    def _spacing(self) -> float:
        return max(_SPACING_SECONDS, self._request_seconds / _LOOKS_AT_ONCE)

    @property
    def _pause(self) -> float:
        """Seconds until the poll after one that found nothing."""
        if self._is_busy:
            return self._began + self._spacing - time.monotonic()
        silent = time.monotonic() - self._found_at
        return min(silent * _PAUSE_SHARE, LONGEST_PAUSE)

    def _ask_in(self, seconds: float) -> None:
        if not self._scheduled:
            self._scheduled = True
            timer.after(max(0.0, seconds), weak_callback(self, SlotLog._ask_at_time))

    def _ask_at_time(self) -> None:
        with self._guard:
            self._scheduled = False
            if not self.is_followed:
                return
            early = self._began + self._spacing - time.monotonic()
            if not self._under_way[self._next]:
                self._ask()
            elif self._is_eager and early > _EARLY_SECONDS:
                self._ask_in(early)  # an object has arrived since, and the next was requested
            elif self._is_eager and self._under_way[self._next] < _LOOKS_AT_ONCE:
                self._begin_look(self._next)
                self._ask_in(self._spacing)

    def _fail(self, problem: Exception) -> list[LogReader]:
        """Stop polling, and return the readers to wake. The next call polls by itself, and raises
        the error if it persists."""
        self._problem = problem
        self._guard.notify_all()
        return list(self._taken)

    # What was deleted before it was read

    def _ask_lease(self) -> None:
        """Check whether the owner has deleted objects that this process has not read."""
        if self._asking_lease or time.monotonic() - self._lease_at < _LEASE_SECONDS:
            return
        self._asking_lease = True
        try:
            request_pool().submit(self._skip_released, self._starts)
        except RuntimeError:
            self._asking_lease = False

    def _skip_released(self, start: int) -> None:
        released, problem = NOTHING_RELEASED, None
        try:
            released = self._released()
        except Exception as exc:
            problem = exc
        with self._guard:
            self._asking_lease, self._lease_at = False, time.monotonic()
            self._guard.notify_all()
            if start != self._starts:
                return
            views = self._fail(problem) if problem is not None else self._skip_to(released + 1)
        for view in views:
            view.wake()

    def _skip_to(self, slot: int) -> list[LogReader]:
        """Go on at a slot if that is a later one; return the readers to wake."""
        if slot <= self._next:
            return []
        self._next = slot
        self._ahead = {number: found for number, found in self._ahead.items() if number >= slot}
        self.gaps += 1
        if self.is_followed or self._callers:
            self._go_on()
        return list(self._taken)

    def _released(self) -> int:
        lease = lease_register(self._store, self.name).read()
        return NOTHING_RELEASED if lease is None else lease.content.released

    # Starting

    def _start(self) -> None:
        """Read all objects that are there, many in parallel."""
        began = time.monotonic()
        released = self._released()
        after = slot_key(self.name, released) if released > NOTHING_RELEASED else None
        used = {slot_of(key) for key in self._store.list(slots_prefix(self.name), after=after)}
        if used and released + 1 not in used:  # released meanwhile, or not stored yet
            released = max(released, self._released())
        first = released + 1
        slots = range(first, first_free(used, first))
        answers: list[_Found | None] = []
        if slots:
            with ThreadPoolExecutor(_PARALLEL_READS) as threads:
                answers = list(threads.map(self._read, slots))
        with self._guard:
            self._starts += 1
            self._under_way, self._ahead = Counter(), {}
            self._indexes.clear()
            self._dropped = self._ended = False
            self._next, self._in_a_row = first, 0
            self._problem = None
            self.through = 0  # polls may have read on meanwhile, and are repeated
            for found in answers:
                if found is None or not self._add(found):
                    break
            self._started = True
            self._lease_at = time.monotonic()
            self._looked_at = self._look_began = began
            if self._callers or (self.is_followed and not self._scheduled):
                self._ask()
            self._guard.notify_all()


_logs: WeakKeyDictionary[ObjectStore, WeakValueDictionary[str, SlotLog]] = WeakKeyDictionary()
_logs_guard = threading.Lock()


def slot_log(store: ObjectStore, name: str) -> SlotLog:
    """Return the log, which all readers of a topic share: an object has records of several
    buckets."""
    with _logs_guard:
        logs = _logs.setdefault(store, WeakValueDictionary())
        log = logs.get(name)
        if log is None:
            log = logs[name] = SlotLog(store, name)
        return log
