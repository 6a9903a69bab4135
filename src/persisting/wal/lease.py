"""The lease of a log in an object store: who writes the log, and whether that process is alive.

The lease is advice. It keeps two processes from disturbing each other, but nothing durable depends
on time: what decides is which object was created first (:mod:`persisting.wal.slots`) and the fence
of the tables.

It also says up to which slot objects may be deleted (``released``). The owner announces this here
before it deletes them. A new owner first swaps the lease, so that nothing more can be
announced: every slot after ``released`` that was ever used is then still there, and the first free
one was never used. Only such a slot may hold the claim.

Other processes may *notify* the owner: they swap the lease and increment ``calls``. The owner's
next heartbeat then fails, so it reads the lease and learns that something waits for it. An owner
that is not notified makes no requests for this. A notification is not a heartbeat, and does not
show whether the owner is alive.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

import msgspec

from persisting.concurrency import loop_bridge, timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.errors import OwnershipLost
from persisting.store.object_store import ObjectChanged, ObjectStore, StoreError
from persisting.store.register import Held, Register
from persisting.wal.slots import Process, lease_key, this_process

log = logging.getLogger("persisting")

FORMAT = 1
LEASE_SECONDS = 5.0
_BEATS_PER_LEASE = 3
NOTHING_RELEASED = -1

_MOST_CALLS = 100
"""How many times others may change the lease during one heartbeat."""

CALLS = 1
"""The kind of notifications that this version handles; see :attr:`LeaseRecord.answers_calls`."""

_ended: set[str] = set()
"""Logs that this process has written to, and never will again."""

_held_here: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()
"""The leases of this process, by the names of their logs."""


def has_ended_here(name: str) -> bool:
    """Whether this process wrote a log and has stopped: nobody needs to wait for its lease."""
    return name in _ended


def is_held_here(name: str) -> bool:
    """Whether this process writes a log."""
    return name in _held_here


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the lease object."""

    owner: Process
    seconds: float
    """After this time without a heartbeat, others may take over."""
    beat: int = 0
    released: int = NOTHING_RELEASED
    """The objects of slots up to this one may be deleted; their records are in the tables."""
    released_through: int = 0
    """The last sequence in those slots."""
    taken_by: str = ""
    """The log of the process that has taken over; empty until then."""
    passing: bool = False
    """Whether the process owns buckets for one short change, so that others wait for it."""
    answers_calls: int = 0
    """The latest kind of notifications that the owner handles; 0 if it handles none."""
    calls: int = 0
    """How many times others have notified the owner."""
    format: int = FORMAT


def lease_register(store: ObjectStore, name: str) -> Register[LeaseRecord]:
    return Register(store, lease_key(name), LeaseRecord, FORMAT)


class Lease:
    """The owner's side: sends heartbeats, and announces what may be deleted."""

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        seconds: float = LEASE_SECONDS,
        *,
        passing: bool = False,
        listening_at: str = "",
    ) -> None:
        """Create the lease of a new log, which names the socket ``listening_at``. Blocking."""
        self.name, self.seconds, self._store = name, seconds, store
        self._register = lease_register(store, name)
        record = LeaseRecord(
            owner=this_process(listening_at),
            seconds=seconds,
            passing=passing,
            answers_calls=CALLS,
        )
        self._renewed_at = time.monotonic()
        self._held: Held[LeaseRecord] = self._register.create(record)
        self._guard = threading.Lock()
        self._on_beat: Callable[[], None] | None = None
        self.on_call: Callable[[], None] | None = None
        """Called after a heartbeat that found a notification; must be quick."""
        self.on_lost: Callable[[], None] | None = None
        """Called when this process has lost the log; must be quick."""
        self._calls = 0
        _held_here[name] = self
        self._beating = CoalescedTask(
            weak_callback(self, Lease._beat), submit=loop_bridge.submit_heartbeat
        )
        self._stopped = False
        self._failure = ""
        """Why the last heartbeat failed; empty if it did not."""
        self.lost = ""
        """Why this process no longer owns the log; empty while it does."""

    def start(self, on_beat: Callable[[], None]) -> None:
        """Send heartbeats from now on, in threads of their own, by calling ``on_beat``, which must
        not keep the lease alive."""
        self._on_beat = on_beat
        self._beat_later()

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._stopped = True

    def end(self) -> None:
        """Stop sending heartbeats: this process writes nothing more to the log."""
        self.stop()
        _ended.add(self.name)

    def give_up(self, reason: str) -> None:
        """Note that this process no longer owns the log."""
        is_new, self.lost = not self.lost, self.lost or reason
        _ended.add(self.name)
        if is_new and self.on_lost is not None:
            self.on_lost()

    @property
    def overdue(self) -> str:
        """Why another process may have taken over unnoticed; empty while that cannot be.

        Others take over only if they see no heartbeat for the length of the lease. So nobody has
        taken over until that time after the start of the last heartbeat.
        """
        late = time.monotonic() - self._renewed_at
        if late <= self.seconds:
            return ""
        # A heartbeat is retried for a long time before it fails.
        known = self._failure or self._store.trouble
        cause = f": {known}" if known else ""
        return f"the lease {self._register.place} has not been renewed for {late:.0f} s{cause}"

    def beat_soon(self) -> None:
        """Send a heartbeat now, in another thread."""
        if not self._stopped:
            self._beating.request()

    def _beat_later(self) -> None:
        if not self._stopped and not self.lost:
            timer.after(self.seconds / _BEATS_PER_LEASE, weak_callback(self, Lease._beat_at_time))

    def _beat_at_time(self) -> None:
        self.beat_soon()
        self._beat_later()

    def _beat(self) -> None:
        if self._stopped or self.lost or self._on_beat is None:
            return
        try:
            self._on_beat()
        except OwnershipLost as exc:
            log.error("%s", exc)
        except StoreError as exc:
            if not self._failure:
                log.warning("cannot renew the lease of the log %s: %s", self.name, exc)
            self._failure = str(exc)
        else:
            self._failure = ""

    def renew(self, released: int = NOTHING_RELEASED, through: int = 0) -> None:
        """Send a heartbeat, and announce that slots up to ``released`` may be deleted, whose last
        sequence is ``through``.

        Raises :class:`OwnershipLost` if another process has taken over. Blocking.
        """
        with self._guard:
            self.check()
            owner = self._held.content.owner
            for _ in range(_MOST_CALLS):
                began = time.monotonic()
                try:
                    record = _beaten(self._held.content, released, through)
                    self._held = self._register.swap(self._held, record)
                    break
                except ObjectChanged as exc:
                    found = None if exc.found is None else self._register.decode(exc.found)
                    if found is None or found.content.taken_by or found.content.owner != owner:
                        self._lose(exc)
                        self.check()
                    else:  # a notification, or an earlier heartbeat whose answer was lost
                        self._held = found
            else:
                raise StoreError(f"other processes keep changing the lease {self._register.place}")
            self._renewed_at = began
            called, self._calls = self._held.content.calls != self._calls, self._held.content.calls
        if called and self.on_call is not None:
            self.on_call()

    def _lose(self, exc: ObjectChanged) -> None:
        if exc.found is None:
            self.give_up("its lease was deleted")
            return
        record = self._register.decode(exc.found).content
        if record.taken_by == self.name:
            self.give_up("this process has ended it, to open a bucket again that it had lost")
        if record.taken_by:
            self.give_up(
                f"the log {record.taken_by} took over, since this process stopped renewing its "
                f"lease for longer than {self.seconds:g} s"
            )
        self.give_up("its lease was changed")

    def check(self) -> None:
        """Raise if another process is known to have taken over."""
        if self.lost:
            raise OwnershipLost(
                f"this process no longer owns the log {self._register.place}: {self.lost}",
                hint="open the topic again",
            )


def _beaten(record: LeaseRecord, released: int, through: int) -> LeaseRecord:
    return msgspec.structs.replace(
        record,
        beat=record.beat + 1,
        released=max(record.released, released),
        released_through=max(record.released_through, through),
    )


def call_owner(store: ObjectStore, name: str) -> bool:
    """Notify the owner of a log that something waits for it, which it notices with its next
    heartbeat; return whether it handles notifications. Blocking."""
    here = _held_here.get(name)
    if here is not None and here.on_call is not None and not here.lost:
        here.on_call()
        return True
    register = lease_register(store, name)
    held = register.read()
    while held is not None and held.content.answers_calls and not held.content.taken_by:
        called = msgspec.structs.replace(held.content, calls=held.content.calls + 1)
        try:
            register.swap(held, called)
            return True
        except ObjectChanged as exc:
            held = None if exc.found is None else register.decode(exc.found)
    return False


def is_beat(before: Held[LeaseRecord], now: Held[LeaseRecord]) -> bool:
    """Whether there was a heartbeat between two reads: notifications also change the lease."""
    return now.content.beat != before.content.beat


class LeaseWatch:
    """A claimant's side: whether the owner still sends heartbeats, by this process's own clock."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: Held[LeaseRecord] | None = None
        self._first_read = self._last_read_began = 0.0
        self._guard = threading.Lock()

    def look(self, store: ObjectStore) -> Held[LeaseRecord] | None:
        """Read the lease; return None if it does not exist."""
        began = time.monotonic()
        found = lease_register(store, self._name).read()
        with self._guard:
            if found is None or self._seen is None or is_beat(self._seen, found):
                self._first_read = time.monotonic()
            self._seen, self._last_read_began = found, began
        return found

    @property
    def unchanged_for(self) -> float:
        """For how many seconds there was certainly no heartbeat: from the end of the first read
        that returned the current one to the start of the last read. A pause of this process alone
        proves nothing."""
        with self._guard:
            return max(0.0, self._last_read_began - self._first_read)

    def expires_in(self, seconds: float) -> float:
        """In how many seconds a lease of ``seconds`` expires unless there is a heartbeat."""
        with self._guard:
            return max(0.0, self._first_read + seconds - time.monotonic())


def _reset_after_fork() -> None:
    """A forked process has no leases."""
    _held_here.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
