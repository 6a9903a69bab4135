"""A hand-over in the object store of a topic: see :mod:`~persisting.bucket.store_notes`. Blocking.

Owners are notified through their lease (:func:`~persisting.wal.lease.call_owner`). This process
sends heartbeats to the state of the hand-over, and decides by a swap of it. Until the hand-over
ends, it owns the buckets that nobody else owns, with one lease for all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from persisting.bucket import store_notes
from persisting.bucket.handover_notes import ADOPT, DONE, FAILING, Answer, Note
from persisting.bucket.producer_sequences import WRITERS, ProducerSequences
from persisting.bucket.store_notes import DECIDED, SENT, VOID, HandoverState
from persisting.bucket.store_ownership import FREE, check_free, owner_register
from persisting.concurrency import loop_bridge, timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.errors import BucketLocked, StorageError
from persisting.store.object_store import ObjectChanged, ObjectStore, StoreError
from persisting.store.register import Held
from persisting.table.store_bulk_files import StoreBulkFiles
from persisting.table.store_table import StoreTable
from persisting.table.table import FOLDER as TABLE
from persisting.topic.spec import TopicConfig, bucket_name
from persisting.topic.store_owner import StoreOwner
from persisting.wal.lease import LEASE_SECONDS, call_owner, lease_register

log = logging.getLogger("persisting")

_BEATS_PER_LEASE = 3
_TRIES = 3
"""Attempts to decide if no answer arrives; each is retried for a long time."""


def owned_buckets(store: ObjectStore, buckets: Iterable[int]) -> list[int]:
    """Return the buckets that a process has open for writing, or had open when it was killed;
    not those that are only owned for one short change.

    One request for each bucket, and one for each of their logs.
    """
    passing: dict[str, bool] = {}
    found = []
    for bucket in buckets:
        held = owner_register(store, bucket).read()
        if held is None or (held.content.owner, held.content.log) == (FREE, FREE):
            continue
        name = held.content.owner
        if name != FREE and held.content.log in (FREE, name):
            if name not in passing:
                lease = lease_register(store, name).read()
                passing[name] = lease is None or lease.content.passing
            if passing[name]:
                continue
        found.append(bucket)
    return found


class StoreExchange:
    """One hand-over in an object store. Its methods are those of
    :class:`~persisting.topic.handover.Exchange`."""

    shortest, longest = 0.02, 0.25
    probe_seconds = 0.5

    def __init__(self, store: ObjectStore, config: TopicConfig) -> None:
        """``store`` is that of the topic."""
        self._store, self._config = store, config
        self._lease = float(config.options.get("lease", LEASE_SECONDS))
        self._notes: Mapping[int, Note] = {}
        self._name = ""
        self._state: _StateKeeper | None = None
        self._owner = self._new_owner()
        self._called: dict[str, float] = {}
        """By log, when this process has last notified its owner."""
        self._looked: dict[str, float] = {}
        """By log, when it has last seen that the owner may be alive."""

    def _new_owner(self) -> StoreOwner:
        return StoreOwner(self._store, self._config, seconds=0.0)

    # Notes and answers

    def send(self, notes: Mapping[int, Note]) -> None:
        self._name = store_notes.new_name(self._store)
        self._notes = notes
        self._state = _StateKeeper(self._store, self._name, self._lease)
        for bucket, note in notes.items():
            store_notes.write_note(self._store, self._name, bucket, note)

    def answer(self, bucket: int) -> Answer | None:
        assert self._state is not None
        if self._state.is_gone_after_decision and self._is_stored(bucket):
            return Answer(state=DONE, rows=self._notes[bucket].rows)
        self._state.check()
        try:
            held = store_notes.answer_register(self._store, self._name, bucket).read()
            if held is None:
                return None
            answer = held.content.answer
            is_adopted = answer.state == DONE and self._notes[bucket].kind == ADOPT
            if is_adopted or answer.state == FAILING or self._is_owner(bucket, held.content.term):
                return answer
            return None
        except StoreError as exc:
            if not self._state.is_unsettled:
                raise
            raise StorageError(
                f"it is unknown whether the rows of this write are stored: {exc}. Repeat it only "
                "with the same writeId, which stores them once"
            ) from exc

    def _is_stored(self, bucket: int) -> bool:
        """Whether the table has the rows of a note. For a process that was paused after its
        decision: the owners have removed their answers meanwhile."""
        note = self._notes[bucket]
        table = StoreTable(self._store.address / bucket_name(bucket), self._store.options)
        table.refresh()
        known = ProducerSequences(table.properties.get(WRITERS))
        return note.kind == ADOPT and known.has((note.writer, note.number))

    def _is_owner(self, bucket: int, term: int) -> bool:
        """Whether the owner of that term is the last one: the next one finds the note."""
        held = owner_register(self._store, bucket).read()
        return held is not None and held.content.term == term

    def remove(self, buckets: Iterable[int]) -> None:
        if self._state is None:
            return
        numbers = list(buckets)
        if self._state.is_void:
            self._remove_files(numbers)
        store_notes.remove_notes(self._store, self._name, numbers)

    def _remove_files(self, buckets: Iterable[int]) -> None:
        """Remove files that nobody will ever commit."""
        for bucket in buckets:
            if names := self._notes[bucket].files:
                root = self._store.address / bucket_name(bucket) / TABLE
                StoreBulkFiles(root, self._store.options).remove(names)

    # The decision

    def decide(self) -> None:
        assert self._state is not None
        decide(self._state)
        self._owner.look_for_notes()

    def is_decided(self) -> bool:
        return self._state is not None and self._state.is_decided

    def may_be_decided(self) -> bool:
        return self._state is not None and not self._state.make_void()

    # Owners

    def live_owner(self, bucket: int) -> dict[str, Any] | None:
        with suppress(StoreError):  # it is for messages
            held = owner_register(self._store, bucket).read()
            if held is not None and held.content.owner not in (FREE, self._owner.log_name):
                lease = lease_register(self._store, held.content.owner).read()
                if lease is not None and not lease.content.taken_by:
                    owner = lease.content.owner
                    node = {"node": owner.node} if owner.node else {}
                    return {"pid": owner.pid, "host": owner.host, **node}
        return None

    def own_if_free(self, bucket: int) -> None:
        if self._owner.lost:
            self._give_back()
            self._owner = self._new_owner()
        held = owner_register(self._store, bucket).read()
        name = FREE if held is None else held.content.owner
        if name in (FREE, self._owner.log_name) or self._is_dead(bucket, name):
            self._owner.own(bucket)  # opens it once; its inbox has the note
        else:
            self._call(name)

    def _is_dead(self, bucket: int, name: str) -> bool:
        """Whether the lease of a log has expired, by the clock of this process."""
        now = time.monotonic()
        if now - self._looked.get(name, -self.probe_seconds) < self.probe_seconds / 2:
            return False  # checked for another bucket
        try:
            check_free(self._store, bucket, self._owner.log_name)
        except BucketLocked:
            self._looked[name] = now
            return False
        return True

    def _call(self, name: str) -> None:
        """Notify an owner; again if it has not answered for the length of a lease."""
        now = time.monotonic()
        if now - self._called.get(name, -self._lease) >= self._lease:
            call_owner(self._store, name)
            self._called[name] = now

    def place(self, bucket: int) -> str:
        return str(self._store.address / bucket_name(bucket))

    # The end

    def close(self, *, finished: bool) -> None:
        try:
            if self._state is not None:
                self._state.stop()
                if finished:
                    store_notes.forget(self._store, self._name)
        except StorageError as exc:
            log.warning("cannot remove what is left of a finished hand-over: %s", exc)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Release the buckets. What was handed over is durable: after a failure the next owner
        waits until the lease expires."""
        try:
            self._owner.close()
        except StorageError as exc:
            log.warning("cannot release the buckets of %s: %s", self._store.address, exc)


def decide(state: _StateKeeper) -> None:
    """Make the files of all notes part of the topic."""
    state.decide()


class _StateKeeper:
    """The state of a hand-over: the heartbeats and the decision of the process that hands over."""

    def __init__(self, store: ObjectStore, name: str, seconds: float) -> None:
        self._register = store_notes.state_register(store, name)
        self._held: Held[HandoverState] = self._register.create(
            HandoverState(state=SENT, seconds=seconds)
        )
        self._seconds = seconds
        self._guard = threading.Lock()
        self._stopped = self._is_gone = False
        self._has_tried = False
        """Whether this process has tried to decide: the attempt may have succeeded unseen."""
        self._beating = CoalescedTask(
            weak_callback(self, _StateKeeper._beat), submit=loop_bridge.submit_heartbeat
        )
        self._beat_later()

    def _beat_later(self) -> None:
        if not self._stopped:
            timer.after(self._seconds / _BEATS_PER_LEASE, weak_callback(self, _StateKeeper._tick))

    def _tick(self) -> None:
        if not self._stopped:
            self._beating.request()
            self._beat_later()

    def _beat(self) -> None:
        with self._guard:
            if not self._stopped and not self._is_over:
                with suppress(StoreError):  # the next heartbeat tries again
                    self._change(self._held.content.state)

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._stopped = True
        with self._guard:
            pass  # a heartbeat under way must not bring the state back

    @property
    def is_decided(self) -> bool:
        return self._held.content.state == DECIDED

    @property
    def is_void(self) -> bool:
        """Whether nothing of this hand-over is, or ever will be, adopted."""
        return self._held.content.state == VOID or (self._is_gone and not self._has_tried)

    @property
    def is_gone_after_decision(self) -> bool:
        """Whether all notes are answered and removed, if this process has decided."""
        return self._is_gone and self._has_tried

    @property
    def is_unsettled(self) -> bool:
        """Whether it is unknown if this process has decided."""
        return self._has_tried and self._held.content.state == SENT

    @property
    def _is_over(self) -> bool:
        return self._is_gone or self._held.content.state == VOID

    def _change(self, state: str) -> None:
        """Swap the state, unless it is over; one that is decided stays so. Call with the guard."""
        while not self._is_over:
            held = self._held.content
            wanted = DECIDED if held.state == DECIDED else state
            changed = msgspec.structs.replace(held, state=wanted, beat=held.beat + 1)
            try:
                self._held = self._register.swap(self._held, changed)
                return
            except ObjectChanged as exc:
                # A swap by this process whose answer was lost, or an owner has made it void.
                if exc.found is None:
                    self._is_gone = True
                else:
                    self._held = self._register.decode(exc.found)

    def decide(self) -> None:
        with self._guard:
            self._has_tried = True
            for attempt in range(_TRIES):
                try:
                    self._change(DECIDED)
                    break
                except StoreError:
                    if attempt == _TRIES - 1:
                        raise
        self.check()

    def make_void(self) -> bool:
        """Give up; return whether it is certain that nothing is, or ever will be, decided."""
        with self._guard:
            try:
                self._change(VOID)
            except StoreError as exc:
                if self._has_tried:
                    return False
                log.warning("cannot withdraw a hand-over, which its owners will do: %s", exc)
                return True  # nobody else can decide, and this process will not
            return self.is_void

    def check(self) -> None:
        """Raise if the hand-over is over without this process."""
        if self._held.content.state == VOID:
            raise StorageError(
                "the owners have discarded what was handed over to them, because this process sent "
                f"no heartbeat for {self._seconds:g} s; nothing was stored, run the write again"
            )
        if self.is_gone_after_decision:
            raise StorageError(
                f"{self._register.place} no longer exists: this process sent no heartbeat for "
                f"{self._seconds:g} s, and the owners have stored the rows or discarded them; or "
                "the topic was deleted. Repeat the write only with the same writeId, which stores "
                "what is missing"
            )
        if self._is_gone:
            raise StorageError(
                f"{self._register.place} no longer exists: the topic was deleted, or this process "
                f"sent no heartbeat for {self._seconds:g} s; nothing was stored, run the write "
                "again"
            )
