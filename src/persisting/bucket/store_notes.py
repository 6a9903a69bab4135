"""The objects of a hand-over in an object store: see :mod:`~persisting.bucket.handover_notes` for
what is handed over, and for the two steps.

    handover/<id>/state.json            sent, decided or void; heartbeats of the driver
    handover/<id>/bucket_<i>.note       what the owner of the bucket is asked for       created once
    handover/<id>/bucket_<i>.answer     what the owner has done; its term

There are no locks. The state is changed by compare-and-swap, so that it changes from ``sent`` only
once: the process that hands over decides, or any process that sees no heartbeat for the length of
the lease, by its own clock, makes the hand-over void. A process that was paused can then no longer
decide.

The state is created before the notes, and deleted after all of them. So a note without a state is
left over. Ids begin with a number that is higher than those of all existing hand-overs, so that
owners keep their order without comparing clocks.

An answer carries the term of the owner. An answer that files were adopted is accepted from a former
owner too, since no commit passes the fence of the next owner. All other answers count only if their
owner still owns the bucket afterwards. A later owner finds the note, because it looks for notes
when it has taken over the bucket.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from persisting.bucket.handover_notes import ADOPT, DONE, FAILED, Answer, Note, Status, Wakeable
from persisting.bucket.store_ownership import owner_register
from persisting.concurrency import timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.concurrency.loop_bridge import NoThread
from persisting.errors import OwnershipLost, StorageError
from persisting.json_files import check_format, decode
from persisting.store.object_store import ObjectChanged, ObjectExists, ObjectStore
from persisting.store.register import Held, Register

log = logging.getLogger("persisting")

FOLDER = "handover"
FORMAT = 1

SENT = "sent"
DECIDED = "decided"
"""State of a hand-over: the files of all its notes belong to the topic."""
VOID = "void"
"""State of a hand-over: nothing of it will ever be adopted."""

_STATE = "state.json"
_SHORTEST, _LONGEST = 0.05, 1.0
"""Seconds between two polls of the hand-overs that an owner knows: doubled while nothing changes.
An owner that knows none does not poll."""


class HandoverState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``state.json``."""

    state: str
    seconds: float
    """After this time without a heartbeat the process that hands over counts as dead."""
    beat: int = 0
    format: int = FORMAT


class StoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the object of an answer."""

    answer: Answer
    term: int
    """The number of the ownership that answers; see :mod:`~persisting.bucket.store_ownership`."""
    format: int = FORMAT


def state_register(store: ObjectStore, name: str) -> Register[HandoverState]:
    """``store`` is that of the topic."""
    return Register(store, f"{FOLDER}/{name}/{_STATE}", HandoverState, FORMAT)


def answer_register(store: ObjectStore, name: str, bucket: int) -> Register[StoredAnswer]:
    key = f"{FOLDER}/{name}/bucket_{bucket}.answer"
    return Register(store, key, StoredAnswer, FORMAT)


def note_key(name: str, bucket: int) -> str:
    return f"{FOLDER}/{name}/bucket_{bucket}.note"


def new_name(store: ObjectStore) -> str:
    """Return an id for a hand-over that sorts after all existing ones."""
    numbers = [int(name.partition("-")[0]) for name in list_all(store)]
    return f"{max(numbers, default=0) + 1:020d}-{secrets.token_hex(8)}"


def write_note(store: ObjectStore, name: str, bucket: int, note: Note) -> None:
    """Write a note; it is durable when this returns."""
    with suppress(ObjectExists):  # no other process writes it: an earlier attempt did
        store.create(note_key(name, bucket), msgspec.json.encode(note))


def read_note(store: ObjectStore, name: str, bucket: int) -> Note | None:
    """Return a note, None if it was removed."""
    key = note_key(name, bucket)
    found = store.get(key)
    if found is None:
        return None
    place = str(store.address / key)
    check_format(found.data, place, FORMAT)
    try:
        return decode(found.data, Note)
    except msgspec.DecodeError as exc:
        raise StorageError(f"{place} cannot be read: {exc}") from exc


def remove_notes(store: ObjectStore, name: str, buckets: Iterable[int]) -> None:
    """Remove notes and their answers. The answers go last: a note that remains because this
    process dies must not seem unanswered."""
    numbers = list(buckets)
    store.delete([note_key(name, bucket) for bucket in numbers])
    store.delete([f"{FOLDER}/{name}/bucket_{bucket}.answer" for bucket in numbers])


def forget(store: ObjectStore, name: str) -> None:
    """Remove the state of a hand-over that has no notes left."""
    store.delete([f"{FOLDER}/{name}/{_STATE}"])


class Listed(NamedTuple):
    """The objects of a hand-over in a listing."""

    has_state: bool
    notes: set[int]
    keys: list[str]


def list_all(store: ObjectStore) -> dict[str, Listed]:
    """Return all hand-overs of a topic, oldest first. One request."""
    found: dict[str, Listed] = {}
    for key in store.list(FOLDER):
        parts = key.split("/")
        number = parts[1].partition("-")[0]
        if len(parts) != 3 or not number.isdigit():
            continue
        listed = found.setdefault(parts[1], Listed(False, set(), []))
        listed.keys.append(key)
        name, _, kind = parts[2].partition(".")
        if parts[2] == _STATE:
            found[parts[1]] = listed._replace(has_state=True)
        elif kind == "note" and name.removeprefix("bucket_").isdigit():
            listed.notes.add(int(name.removeprefix("bucket_")))
    return found


def decided_buckets(store: ObjectStore) -> set[int]:
    """Return the buckets with notes that are decided. One request if nothing is handed over."""
    buckets: set[int] = set()
    for name, listed in list_all(store).items():
        if listed.notes and listed.has_state:
            held = state_register(store, name).read()
            if held is not None and held.content.state == DECIDED:
                buckets |= listed.notes
    return buckets


# The owner


class _Seen:
    """What this process has seen of a hand-over."""

    def __init__(self) -> None:
        self.held: Held[HandoverState] | None = None
        self.notes: set[int] = set()
        """The buckets whose notes are not known to be removed."""
        self.status = Status(alive=True, decided=False)
        self._first_read = 0.0

    @property
    def state(self) -> str:
        return "" if self.held is None else self.held.content.state

    def read(self, register: Register[HandoverState]) -> bool:
        """Read the state; return whether it has changed, apart from heartbeats."""
        before, held, began = self.state, self.held, time.monotonic()
        self.held = register.read()
        if held is None or self.held is None or held.version != self.held.version:
            self._first_read = time.monotonic()
        # From the end of the first read that returned it: a pause of this process proves nothing.
        unchanged = began - self._first_read
        is_dead = self.held is None or unchanged >= self.held.content.seconds
        if is_dead and self.state == SENT:
            self._make_void(register)
        self.status = Status(
            alive=self.state == SENT or (self.state == DECIDED and not is_dead),
            decided=self.state == DECIDED,
        )
        return before != self.state

    def _make_void(self, register: Register[HandoverState]) -> None:
        """Prevent further decisions. If a heartbeat or a decision comes first, the next poll
        continues from there."""
        assert self.held is not None
        void = msgspec.structs.replace(self.held.content, state=VOID)
        try:
            self.held = register.swap(self.held, void)
        except ObjectChanged as exc:
            self.held = None if exc.found is None else register.decode(exc.found)
            self._first_read = time.monotonic()


class StoreHandovers:
    """The hand-overs to the buckets of one topic that this process owns. Thread-safe.

    Makes no requests until another process notifies this one
    (:func:`persisting.wal.lease.call_owner`), or a bucket that is opened has found notes.
    """

    def __init__(self, store: ObjectStore) -> None:
        """``store`` is that of the topic."""
        self.store = store
        self._seen: dict[str, _Seen] = {}
        self._left_over: dict[str, list[str]] = {}
        """Objects of hand-overs without a state, in the last listing."""
        self._buckets: weakref.WeakSet[StoreNotes] = weakref.WeakSet()
        self._owners: weakref.WeakSet[Wakeable] = weakref.WeakSet()
        self._guard = threading.Lock()
        """Never held during a request: the heartbeats of the lease take it."""
        self._reading = threading.Lock()
        self._job = CoalescedTask(weak_callback(self, StoreHandovers._look))
        self._must_list = False
        self._is_ticking = False
        self._pause = _SHORTEST
        self._reported = ""

    def attend(self, notes: StoreNotes) -> None:
        """Look for the notes of a bucket that this process has just taken over. Blocking."""
        with self._guard:
            self._buckets.add(notes)
        self.find()

    def add(self, owner: Wakeable) -> None:
        """Wake an owner from now on; it is not kept alive."""
        with self._guard:
            self._owners.add(owner)
        self._tick_later()

    def discard(self, owner: Wakeable, notes: StoreNotes) -> None:
        """Stop waking an owner."""
        with self._guard:
            self._owners.discard(owner)
            self._buckets.discard(notes)

    def called(self) -> None:
        """Look for new hand-overs, in the background."""
        with self._guard:
            self._must_list = True
            self._pause = _SHORTEST
        with suppress(NoThread):  # the process ends; the next owner finds the notes
            self._job.trigger()

    def find(self) -> None:
        """Look for new hand-overs. Blocking."""
        with self._reading:  # an older listing must not replace a newer one
            listed = list_all(self.store)
            with self._guard:
                self._left_over = {
                    name: found.keys for name, found in listed.items() if not found.has_state
                }
                for name in listed.keys() - self._left_over.keys():
                    self._seen.setdefault(name, _Seen()).notes = listed[name].notes
            self._read_states()  # forgets those that were removed

    def _read_states(self) -> bool:
        """Read the states of the known hand-overs; return whether one has changed."""
        changed = False
        with self._guard:
            known = dict(self._seen)
        for name, seen in known.items():
            changed |= seen.read(state_register(self.store, name))
            if seen.held is None:
                with self._guard:
                    self._seen.pop(name, None)
        return changed

    def _look(self) -> None:
        """Read what may have changed, and wake the owners. Never raise."""
        with self._guard:
            must_list, self._must_list = self._must_list, False
        try:
            if must_list:
                self.find()
                changed = True
            else:
                with self._reading:
                    changed = self._read_states()
            self._reported = ""
        except StorageError as exc:
            changed = False
            with self._guard:
                self._must_list |= must_list
            if self._reported != str(exc):
                self._reported = str(exc)
                log.warning(
                    "cannot look for what is handed over to %s: %s", self.store.address, exc
                )
        with self._guard:
            self._pause = _SHORTEST if changed else min(2 * self._pause, _LONGEST)
            owners = list(self._owners)
        for owner in owners:
            owner.wake(always=True)
        self._tick_later()

    def _tick_later(self) -> None:
        """Poll again after a pause, as long as there is something to poll."""
        with self._guard:
            wanted = bool(self._owners) and bool(self._seen or self._must_list)
            if self._is_ticking or not wanted:
                return
            self._is_ticking = True
            timer.after(self._pause, weak_callback(self, StoreHandovers._tick))

    def _tick(self) -> None:
        with self._guard:
            self._is_ticking = False
        with suppress(NoThread):
            self._job.trigger()

    def names(self, bucket: int) -> list[str]:
        """Return the known hand-overs with a note for a bucket, oldest first."""
        with self._guard:
            return sorted(name for name, seen in self._seen.items() if bucket in seen.notes)

    @property
    def is_empty(self) -> bool:
        with self._guard:
            return not self._seen and not self._left_over

    def status(self, name: str) -> Status:
        """Return how far a hand-over is; nothing can be said of one that has just been removed."""
        with self._guard:
            seen = self._seen.get(name)
            return Status(alive=True, decided=False) if seen is None else seen.status

    def is_known(self, name: str) -> bool:
        """Whether a hand-over has not been removed, as far as this process knows."""
        with self._guard:
            return name in self._seen

    def note_gone(self, name: str, bucket: int) -> None:
        with self._guard:
            if name in self._seen:
                self._seen[name].notes.discard(bucket)

    def clear(self) -> None:
        """Remove what hand-overs of dead processes left. Others own other buckets, and the last of
        them to remove its note removes the rest."""
        with self._guard:
            own = {notes.bucket for notes in self._buckets}
            ended = [
                name
                for name, seen in self._seen.items()
                if not seen.status.alive and seen.notes.isdisjoint(own)
            ]
            left_over, self._left_over = self._left_over, {}
        for name, keys in left_over.items():
            if state_register(self.store, name).read() is None:  # more certain than a listing
                self.store.delete(keys)
        for name in ended:
            listed = self.store.list(f"{FOLDER}/{name}")
            if not any(key.endswith(".note") for key in listed):
                self.store.delete([key for key in listed if key.endswith(".answer")])
                forget(self.store, name)
            with self._guard:
                self._seen.pop(name, None)


class StoreNotes:
    """The notes of a bucket in an object store that this process owns."""

    def __init__(self, handovers: StoreHandovers, bucket: int, term: int) -> None:
        self._handovers, self.bucket, self._term = handovers, bucket, term
        self._store = handovers.store
        self._notes: dict[str, Note] = {}
        self._answers: dict[str, Answer] = {}
        self.place = str(self._store.address / f"bucket_{bucket}")

    def find(self) -> None:
        """Look for notes. Blocking; for an owner that has just taken the bucket over."""
        self._handovers.attend(self)

    def look(self) -> None:
        """Look for notes, in the background."""
        self._handovers.called()

    def names(self) -> list[str]:
        names = self._handovers.names(self.bucket)
        for remembered in (self._notes, self._answers):
            for gone in set(remembered).difference(names):
                remembered.pop(gone, None)
        return names

    @property
    def has_decided(self) -> bool:
        """Whether a note is decided, adopted or not, as far as this process knows."""
        return any(
            self._handovers.status(name).decided for name in self._handovers.names(self.bucket)
        )

    def may_have_left_overs(self) -> bool:
        return not self._handovers.is_empty

    def note_place(self, name: str) -> str:
        return str(self._store.address / note_key(name, self.bucket))

    def status(self, name: str) -> Status:
        return self._handovers.status(name)

    def read(self, name: str) -> Note | None:
        if not self._handovers.is_known(name):
            return None  # its files may be in the table
        note = self._notes.get(name)
        if note is None:
            note = read_note(self._store, name, self.bucket)
            if note is None:
                self._handovers.note_gone(name, self.bucket)
                return None
            self._notes[name] = note
        return note

    def read_answer(self, name: str) -> Answer | None:
        """Return the answer to a note; None if it is that of a former owner and not final: this
        owner has to check the note itself."""
        if name not in self._answers:
            held = answer_register(self._store, name, self.bucket).read()
            if held is None:
                return None
            is_own = held.content.term == self._term
            if not is_own and held.content.answer.state not in (DONE, FAILED):
                return None
            self._answers[name] = held.content.answer
        return self._answers[name]

    def write_answer(self, name: str, answer: Answer) -> None:
        """Answer a note, unless it has the answer of a later owner, or one that is final."""
        if answer.state == FAILED:
            self._check_owner()  # a former owner may miss files that the next one has adopted
        mine = StoredAnswer(answer=answer, term=self._term)

        def change(stored: StoredAnswer | None) -> StoredAnswer:
            return mine if stored is None or _replaces(mine, stored) else stored

        answered = answer_register(self._store, name, self.bucket).update(change)
        if answered == mine:
            self._answers[name] = answer

    def _check_owner(self) -> None:
        held = owner_register(self._store, self.bucket).read()
        if held is None or held.content.term != self._term:
            raise OwnershipLost(
                f"another process has taken over the bucket {self.place}", hint="open it again"
            )

    def confirm_decision(self) -> None:
        """A state that was read is durable."""

    def remove(self, name: str) -> None:
        """Remove a note and its answer."""
        remove_notes(self._store, name, [self.bucket])
        self._handovers.note_gone(name, self.bucket)

    def clear(self) -> None:
        """Remove what finished hand-overs left behind."""
        self._handovers.clear()

    def writers(self) -> set[str]:
        """Return the writers that the notes name; damaged notes are left out."""
        found = set()
        for name in self.names():
            with suppress(StorageError):  # the inbox reports it
                note = self.read(name)
                if note is not None and note.kind == ADOPT:
                    found.add(note.writer)
        return found

    def handed_files(self) -> set[str]:
        """Return the data files that notes name, of whatever state."""
        files: set[str] = set()
        for name in self.names():
            note = self.read(name)
            files |= set() if note is None else note.files
        return files

    def start(self, owner: Wakeable) -> None:
        """Wake an owner from now on when there may be something to do."""
        self._handovers.add(owner)

    def stop(self, owner: Wakeable) -> None:
        self._handovers.discard(owner, self)


def _replaces(new: StoredAnswer, stored: StoredAnswer) -> bool:
    """Whether an answer replaces another one. A note that was adopted stays adopted. Otherwise the
    owner with the highest term is right."""
    if stored.answer.state == DONE or stored.term > new.term:
        return False
    return stored.answer.state != FAILED or new.answer.state == DONE or new.term > stored.term
