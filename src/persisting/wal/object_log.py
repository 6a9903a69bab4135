"""The log in append mode, in an object store: one object for each group commit.

It has the calls of :class:`persisting.wal.log.Log`, so that group commit does not know which of the
two it writes to. Differences: an append is durable when it returns, so there is nothing to sync or
to take back; and after a failure it may be unknown whether the object was stored.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.errors import WALError
from persisting.store.object_store import ObjectExists, ObjectStore, OutcomeUnknown, StoreError
from persisting.wal.frame import SegmentHeader, encode_segment_header
from persisting.wal.lease import NOTHING_RELEASED, Lease
from persisting.wal.log import Payload, Preamble, encode_entries
from persisting.wal.slots import is_claim, slot_key, slots_prefix

log = logging.getLogger("persisting")

_RELEASED_BYTES = 8 * 1024 * 1024
"""Released bytes that are deleted immediately; fewer wait for the next heartbeat, which is free."""


class _Slot(NamedTuple):
    number: int
    last_sequence: int
    size: int


class BegunSlot(NamedTuple):
    """A group commit that has its slot and its sequences, and is not known to be stored yet."""

    number: int
    data: bytes
    lasts: list[int]
    """The last sequence of each entry."""


class ObjectLog:
    """Appends group commits, and releases those whose records the tables hold. Thread-safe.

    Several slots may be under way at the same time (:meth:`begin`, :meth:`store`), up to
    :data:`~persisting.wal.slots.MOST_UNDER_WAY`. The caller finishes them in the order of their
    numbers (:meth:`finish`), and acknowledges none if an earlier one failed: whoever takes over
    puts its claim into the first free slot, and what comes after it does not count.
    """

    def __init__(self, store: ObjectStore, lease: Lease) -> None:
        """``lease`` is that of a new log, which has no slots yet."""
        self._store, self._lease, self.name = store, lease, lease.name
        self._next_sequence = 1
        self._last_written = self._last_finished = 0
        self._next_slot = 0
        self._slots: list[_Slot] = []
        self._released = self._released_through = 0
        self._size = self._released_bytes = 0
        self._released_slot = self._announced_slot = NOTHING_RELEASED
        self._deleted_slot = NOTHING_RELEASED
        self._deletion_failed = False
        self._failure: str | None = None
        self._closed = False
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._deleting = threading.Lock()
        self._cleaning = CoalescedTask(weak_callback(self, ObjectLog._clean))

    @property
    def folder(self) -> PurePosixPath:
        """The place of the log, for messages."""
        return PurePosixPath(str(self._store.address / slots_prefix(self.name)))

    @property
    def place(self) -> str:
        return str(self._store.address / slots_prefix(self.name))

    @property
    def last_sequence(self) -> int:
        return self._next_sequence - 1

    @property
    def last_written(self) -> int:
        """The last sequence in a slot; the slot may still be under way."""
        return self._last_written

    @property
    def synced_sequence(self) -> int:
        """The last sequence that is durable, and before which all are."""
        return max(self._last_finished, self._released)

    @property
    def failed(self) -> str | None:
        return self._failure or self._lease.lost or None

    @property
    def lost(self) -> bool:
        """Whether another process has taken over: this log is over for good."""
        return bool(self._lease.lost)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def size(self) -> int:
        """Bytes of the slots that are not released."""
        return self._size

    @property
    def oldest_end(self) -> int:
        slots = self._slots
        return slots[0].last_sequence if slots else self.last_sequence

    def skip_to(self, sequence: int) -> None:
        """Give the next frame at least this sequence: a bucket's table holds all lower ones."""
        with self._guard:
            self._next_sequence = max(self._next_sequence, sequence)

    def append(
        self, entries: Sequence[Sequence[Payload]], preamble: Preamble, arrival: int
    ) -> list[int]:
        """Store entries as the next slot; return the last sequence of each.

        When this returns they are durable. If it raises :class:`OwnershipLost`, nothing was stored;
        otherwise the slot may have been stored, and nothing is appended until :meth:`reset`.
        """
        begun = self.begin(entries, preamble, arrival)
        self.store(begun)
        self.finish(begun)
        return begun.lasts

    def begin(
        self, entries: Sequence[Sequence[Payload]], preamble: Preamble, arrival: int
    ) -> BegunSlot:
        """Give entries the next slot and its sequences; :meth:`store` and :meth:`finish` follow."""
        with self._guard:
            self._refuse_after_failure()
            first, salt = self._next_sequence, secrets.randbits(32)
            header = encode_segment_header(SegmentHeader(first, salt))
            all_entries = [preamble(), *entries]
            # Frames note what is durable, which shows whether a slot that is missing counted.
            chunks, lasts = encode_entries(all_entries, salt, first, self._last_finished, arrival)
            begun = BegunSlot(self._next_slot, b"".join([header, *chunks]), lasts[1:])
            self._last_written = lasts[-1]
            self._next_sequence = lasts[-1] + 1
            self._next_slot += 1
            return begun

    def finish(self, begun: BegunSlot) -> None:
        """Count a slot that is stored, as are all before it."""
        with self._guard:
            self._last_finished = begun.lasts[-1]
            self._slots.append(_Slot(begun.number, begun.lasts[-1], len(begun.data)))
            self._size += len(begun.data)

    def store(self, begun: BegunSlot) -> None:
        """Store a slot; the errors are those of :meth:`append`. Blocking, from any thread."""
        key, data = slot_key(self.name, begun.number), begun.data
        with self._guard:
            self._refuse_after_failure()
        try:
            self._store.create(key, data)
        except ObjectExists as exc:
            if is_claim(exc.found.data):
                # Not only the lease ends: slots after a claim are free, and do not count.
                self._failure = f"{key} holds the claim of another process"
                self._lease.give_up("another process claimed it")
                self._lease.check()
            self._failure = f"{key} holds an object that this process did not write"
            raise WALError(f"cannot write to the log {self.place}: {self._failure}") from None
        except OutcomeUnknown as exc:
            # Readers of other processes may have seen the slot, so its records must keep their
            # offsets if it is there. Only the next owner can tell, after a claim.
            self._failure = str(exc)
            self._lease.give_up(f"it is unknown whether {key} was stored ({exc})")
            raise WALError(
                f"cannot write to the log {self.place}: {exc}. The put may be stored; with a "
                "writer_id it can be repeated safely"
            ) from exc
        except BaseException as exc:
            self._failure = str(exc) or type(exc).__name__
            if not isinstance(exc, StoreError):
                raise
            raise WALError(
                f"cannot write to the log {self.place}: {exc}; nothing of this put was stored"
            ) from exc

    def break_off(self, reason: BaseException) -> None:
        """Begin nothing until :meth:`reset`: a slot that was begun is not stored."""
        if self.failed is None:
            self._failure = str(reason) or type(reason).__name__

    def retract(self) -> None:
        """Nothing can be rolled back: the object is stored, is not stored, or this is unknown."""

    def sync(self) -> None:
        """Every append is durable when it returns."""

    def seal(self) -> int:
        """Every append begins a new object anyway."""
        return self.last_sequence

    def release(self, sequence: int) -> None:
        """Release slots whose records are all at or below ``sequence``, which the tables hold.

        The next heartbeat announces them, and they are deleted; the announcement costs no request.
        """
        with self._guard:
            self._released = max(self._released, min(sequence, self._next_sequence - 1))
            while self._slots and self._slots[0].last_sequence <= sequence:
                slot = self._slots.pop(0)
                self._released_slot = slot.number
                self._released_through = slot.last_sequence
                self._size -= slot.size
                self._released_bytes += slot.size
            is_large = self._released_bytes > _RELEASED_BYTES
        if is_large:
            self._lease.beat_soon()

    def beat(self) -> None:
        """Renew the lease, and announce the slots that were released; have them deleted. Blocking.

        Only announced slots are deleted: see :mod:`persisting.wal.lease`. The next heartbeat does
        not wait for that, since a store may refuse deletions, and nothing else, for a long time.
        """
        with self._guard:
            target, self._released_bytes = self._released_slot, 0
            through = self._released_through
        self._lease.renew(target, through)
        self._announced_slot = max(self._announced_slot, target)
        if self._announced_slot > self._deleted_slot:
            self._cleaning.request()

    def delete_released(self) -> None:
        """Delete the slots that were announced. Blocking."""
        with self._deleting:
            self._delete(self._announced_slot)

    def _clean(self) -> None:
        if self._closed:
            return
        try:
            self.delete_released()
        except StoreError as exc:
            if not self._deletion_failed:
                log.warning("cannot delete released objects of the log %s: %s", self.place, exc)
            self._deletion_failed = True
        else:
            self._deletion_failed = False

    def _delete(self, last: int) -> None:
        """Delete the slots up to one that was announced."""
        numbers = range(self._deleted_slot + 1, last + 1)
        self._store.delete(slot_key(self.name, number) for number in numbers)
        self._deleted_slot = max(self._deleted_slot, last)

    def reset(self) -> None:
        """After a failure that stored nothing, drop the whole log; the tables hold everything that
        was acknowledged. No slot is under way."""
        with self._deleting, self._guard:
            last = self._next_sequence - 1
            self._lease.renew(self._next_slot, last)
            self._delete(self._next_slot)
            self._released_slot, self._released_through = self._next_slot, last
            self._next_slot += 1
            self._slots = []
            self._size = self._released_bytes = 0
            self._last_written = self._last_finished = self._released = last
            self._failure = None

    def delete_all(self) -> None:
        """Delete all slots: the tables hold everything, and no bucket names the log."""
        with self._deleting:
            self._store.delete(self._store.list(slots_prefix(self.name)))

    def close(self) -> None:
        """Write nothing more; what is not released is kept for the next owner."""
        self._closed = True
        self._lease.end()

    def _refuse_after_failure(self) -> None:
        if self._closed or os.getpid() != self._process:
            raise WALError(
                f"the log {self.place} is closed, or belongs to the process that this one was "
                "forked from; nothing of this put was stored"
            )
        self._lease.check()
        if self._failure is not None:
            raise WALError(
                f"the log {self.place} failed earlier ({self._failure}) and accepts nothing until "
                "a flush has written all acknowledged records to the table; call flush()"
            )
