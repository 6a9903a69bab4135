"""What a reader sees of a bucket in an object store: the table, then the log of the bucket's owner.

Every object of the log holds acknowledged records only, so a reader needs nothing from the owner,
and whether the owner is alive makes no difference. The readers of a topic share what they have read
of a log (:mod:`persisting.bucket.slot_log`).

Whether the bucket has another log, or the table a newer version, is checked in parallel. Records of
the log never wait for a check while a caller follows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from persisting.bucket.log_follower import DeadLogRows, LoggedRows
from persisting.bucket.log_view import LogView, OutOfStep
from persisting.bucket.slot_log import FOLLOW_SECONDS, SlotLog, slot_log
from persisting.bucket.store_ownership import FREE, owner_register
from persisting.concurrency.pool import request_pool
from persisting.errors import WALError
from persisting.records import RecordEncoder
from persisting.store.object_store import ObjectStore
from persisting.table.fenced_commit import NewerView
from persisting.table.store_table import StoreTable

_CHECK_SECONDS = 1.0
"""How often it checks whether the bucket has another log, and the table another version."""

_LIST_SECONDS = 30.0
"""How often it lists the versions of the table. Otherwise it requests the next one by its name,
which costs less, and does not find a later one if the next was already removed."""

_AGAIN_SECONDS = 1.0
"""A reader that reads again within this time follows the log, even if it does not wait."""

_SHORTEST_WAIT = 0.05
_ATTEMPTS = 6

_views: WeakKeyDictionary[ObjectStore, WeakSet[StoreLogView]] = WeakKeyDictionary()
_views_guard = threading.Lock()


class _Checked(NamedTuple):
    """What a check has found."""

    owner: tuple[int, str]
    slots: SlotLog | None
    newer: NewerView | None
    encoder: RecordEncoder | None
    """For the newer version."""


class StoreLogView(LogView):
    """Keeps the buffer of a reader at what the log of its bucket's owner holds."""

    _table: StoreTable

    def __init__(self, store: ObjectStore, number: int, *given: Any) -> None:
        """``store`` is that of the topic; ``given`` are the arguments of :class:`LogView`."""
        super().__init__(*given)
        self._store, self._number = store, number
        self._owner = owner_register(store, number)
        self._slots: SlotLog | None = None
        self._owner_seen = (0, FREE)
        """The term of the bucket's owner, and its log."""
        self._shown_through = 0
        self._watched_at = -FOLLOW_SECONDS
        self._read_at = 0.0
        self._is_valid = False
        """Whether the last refresh or check succeeded; otherwise the next refresh does it all."""
        self._check_guard = threading.Lock()
        self._check: Future[_Checked] | None = None
        """A check whose result is not shown yet."""
        self._checked_at = self._listed_at = 0.0
        self._events_seen = (0, False)
        with _views_guard:
            _views.setdefault(store, WeakSet()).add(self)

    def close(self) -> None:
        """Stop following the log."""
        with _views_guard:
            _views[self._store].discard(self)
        slots = self._slots
        if slots is not None:
            slots.leave(self)

    # Waiting

    @property
    def wait_seconds(self) -> float:
        left = self._checked_at + _CHECK_SECONDS - time.monotonic()
        return min(max(left, _SHORTEST_WAIT), _CHECK_SECONDS)

    def wake(self) -> None:
        """Wake the waiting readers: the log has more. From any thread."""
        self._waiters.wake()

    def watch(self) -> None:
        """Follow the log for a while: an object store does not report changes."""
        self._watched_at = time.monotonic()
        if self._slots is not None:
            self._slots.follow()

    @property
    def _is_followed(self) -> bool:
        """Whether new records wake the waiting readers, so that no reader here waits for
        requests."""
        return self._is_watched if self._slots is None else self._slots.is_followed

    @property
    def _is_watched(self) -> bool:
        """Whether a caller waits for records. A reader that reads repeatedly without waiting sees
        what was acknowledged shortly before, even when polls have become rare."""
        return time.monotonic() - self._watched_at < FOLLOW_SECONDS

    def _note_read(self) -> None:
        before, self._read_at = self._read_at, time.monotonic()
        if self._slots is not None and self._read_at - before < _AGAIN_SECONDS:
            self._slots.follow(_AGAIN_SECONDS)

    # Refreshing

    def expire(self) -> None:
        self._is_valid = False
        if self._slots is not None:
            self._slots.expire()

    def refresh(self) -> None:
        """Show everything that is acknowledged; for up to a second after a change of the owner,
        what was acknowledged before it.

        Blocking, unless a caller waits for records, or the last poll is recent: then it shows what
        has arrived.
        """
        problem: Exception | None = None
        if self._is_valid:
            try:
                self._note_read()
                self._show_beside()
                return
            except OutOfStep as exc:
                problem = exc
        for _ in range(_ATTEMPTS):
            try:
                self._show_all()
                return
            except OutOfStep as exc:
                problem = exc
        raise WALError(
            f"the table and the log of {self._owner.place} do not match ({problem}): a part "
            "of one of them is missing. Restore the missing objects from a copy"
        ) from problem

    def _show_all(self) -> None:
        """Read the owner, then the table, then the log; show them."""
        self._is_valid = False
        with self._check_guard:
            self._check = None  # what it finds may be older
            self._checked_at = self._listed_at = time.monotonic()
            self._events_seen = self._events
        owner, slots = self._owned_log()
        self._follow(owner, slots)
        before = self._table.view
        self._table.refresh()
        if self._table.view is not before or not self._encoder.defined:
            self._use_schema()
        self._show_through(0 if self._slots is None else self._slots.advance())
        self._is_valid = True

    def _show_beside(self) -> None:
        """Show the log; what is checked beside it is shown when it is there."""
        self._use(self._taken_check(wait=False))
        began = self._check_if_due()
        slots = self._slots
        if self._is_followed and (self._is_watched or slots is None or slots.is_fresh):
            if slots is not None and slots.through != self._shown_through:
                self._show_through(slots.through)
            return
        if began:
            with _views_guard:
                others = list(_views.get(self._store, ()))
            for view in others:  # a reader of one bucket reads the others next
                view._check_if_due()
        if self._slots is not None:
            through = self._slots.advance()
            if through != self._shown_through:
                self._show_through(through)
                return  # records need not wait for the check
        self._use(self._taken_check(wait=True))

    def _show_through(self, through: int) -> None:
        self._show(through)
        self._shown_through = through
        if self._slots is not None:
            self._slots.took(self, self._taken)

    def _follow(self, owner: tuple[int, str], slots: SlotLog | None) -> None:
        """Follow the log that the bucket's owner names; the table has the records of any other."""
        self._owner_seen = owner
        if slots is self._slots:
            return
        if self._slots is not None:
            self._slots.leave(self)
        self._slots = slots
        self._taken = 0  # another log may number its frames from the table's sequence on
        self._shown_through = 0

    def _rows(self, after: int, through: int) -> Iterator[LoggedRows | DeadLogRows]:
        if self._slots is not None:
            yield from self._slots.rows(self._number, after, through)

    # Checks

    @property
    def _events(self) -> tuple[int, bool]:
        """What has happened in the log that needs an immediate check."""
        slots = self._slots
        return (0, False) if slots is None else (slots.gaps, slots.has_ended)

    def _check_if_due(self) -> bool:
        """Begin a check unless the last one is recent; return whether it began. From any thread."""
        with self._check_guard:
            now, events = time.monotonic(), self._events
            is_urgent = events != self._events_seen
            if self._check is not None or not self._is_valid:
                return False
            if not is_urgent and now - self._checked_at < _CHECK_SECONDS:
                return False
            only_next = not is_urgent and now - self._listed_at < _LIST_SECONDS
            try:
                self._check = check = request_pool().submit(self._look, only_next)
            except RuntimeError:  # the interpreter is shutting down
                return False
            self._checked_at, self._events_seen = now, events
            if not only_next:
                self._listed_at = now
        check.add_done_callback(self._wake_after)
        return True

    def _look(self, only_next: bool) -> _Checked:
        """Read the owner, then the table. Changes nothing that is shown, so it needs no lock."""
        known = self._owner_seen
        owner, slots = self._owned_log()
        newer = self._table.load_newer(only_next=only_next and owner == known)
        encoder = None if newer is None else self._schema.encoder_for(newer.view)
        return _Checked(owner, slots, newer, encoder)

    def _owned_log(self) -> tuple[tuple[int, str], SlotLog | None]:
        """Read the owner; return its term and its log, with what the log has."""
        held = self._owner.read()
        owner = (0, FREE) if held is None else (held.content.term, held.content.log)
        slots, name = self._slots, owner[1]
        if name == (FREE if slots is None else slots.name):
            return owner, slots
        if name == FREE:
            return owner, None
        slots = slot_log(self._store, name)
        slots.join(self)
        slots.start()
        return owner, slots

    def _wake_after(self, check: Future[_Checked]) -> None:
        """Have the waiting readers show what a check has found."""
        failed = check.cancelled() or check.exception() is not None
        if failed or check.result().newer or check.result().owner != self._owner_seen:
            self._waiters.wake()

    def _taken_check(self, *, wait: bool) -> _Checked | None:
        """Return the result of a check that was not shown yet; with ``wait``, wait for it."""
        with self._check_guard:
            check = self._check
            if check is None or not (wait or check.done()):
                return None
            self._check = None
        try:
            return check.result()
        except Exception as exc:  # the refresh that follows finds the same problem, or none
            raise OutOfStep(str(exc)) from exc

    def _use(self, checked: _Checked | None) -> None:
        """Show what a check has found."""
        if checked is None:
            return
        before = self._slots
        self._follow(checked.owner, checked.slots)
        if checked.newer is not None:
            self._table.follow(checked.newer)
            if checked.encoder is not None and checked.encoder.defined:
                self._encoder = checked.encoder
        if checked.newer is not None or self._slots is not before:
            self._show_through(0 if self._slots is None else self._slots.through)

    # Durability

    def sync_through(self, offset: int) -> int:
        """Everything that a reader sees is durable. A caller that asks for more gets everything
        that is acknowledged now."""
        if offset > self._buffer.end:
            self.expire()
            self.refresh()
        return self._buffer.end
