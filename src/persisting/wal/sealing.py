"""Takes over a log in an object store from an owner that is dead, or taken for dead.

Afterwards that owner can acknowledge nothing more, however late its requests arrive, and the
content of its log never changes again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from persisting.concurrency.pool import request_pool
from persisting.errors import BucketLocked, WALError
from persisting.store.object_store import ObjectChanged, ObjectExists, ObjectStore
from persisting.store.register import Held
from persisting.wal.lease import (
    LeaseRecord,
    LeaseWatch,
    has_ended_here,
    is_beat,
    lease_register,
)
from persisting.wal.slots import (
    MOST_UNDER_WAY,
    check_slot,
    first_free,
    is_claim,
    new_claim,
    slot_key,
    slot_of,
    slots_prefix,
)

_LOOKS_PER_LEASE = 10
_PARALLEL_READS = 16
_MOST_WATCHES = 1024


class SealedLog(NamedTuple):
    """A log that is no longer written to."""

    name: str
    slots: range
    """The slots with group commits; all before them were released."""


def wait_for_owner(
    store: ObjectStore, name: str, wait: Callable[[float], None] = time.sleep
) -> Held[LeaseRecord] | None:
    """Return the lease of a log when it has expired, by the clock of this process; None if this
    process has ended the log itself.

    Raises :class:`BucketLocked` at the first heartbeat of the owner.
    """
    if has_ended_here(name):
        return None
    watch = _watch_of(store, name)
    last = _present(watch.look(store), store, name)
    while not last.content.taken_by and watch.unchanged_for < last.content.seconds:
        step = last.content.seconds / _LOOKS_PER_LEASE
        wait(min(step, watch.expires_in(last.content.seconds)))
        now = _present(watch.look(store), store, name)
        if is_beat(last, now) and not now.content.taken_by:
            raise _locked(now.content)
        last = now
    return last


def look_at_owner(store: ObjectStore, name: str) -> LeaseRecord | None:
    """Read the lease of a log once; return it if its owner may be alive, None if it has expired.

    A process remembers what it has seen: repeated calls come to the same result as
    :func:`wait_for_owner`.
    """
    if has_ended_here(name):
        return None
    watch = _watch_of(store, name)
    found = _present(watch.look(store), store, name).content
    return None if found.taken_by or watch.unchanged_for >= found.seconds else found


def check_owner(store: ObjectStore, name: str) -> None:
    """Raise :class:`BucketLocked` if the owner of a log may be alive; see :func:`look_at_owner`."""
    found = look_at_owner(store, name)
    if found is not None:
        raise BucketLocked(
            f"{found.owner} owns the bucket, and its lease of {found.seconds:g} s has not ended",
            msgspec.to_builtins(found.owner),
        )


_watches: dict[tuple[str, str], LeaseWatch] = {}
_watches_guard = threading.Lock()


def _watch_of(store: ObjectStore, name: str) -> LeaseWatch:
    """Return what this process has seen of a lease."""
    key = str(store.address), name
    with _watches_guard:
        while len(_watches) > _MOST_WATCHES:
            del _watches[next(iter(_watches))]
        return _watches.setdefault(key, LeaseWatch(name))


def seal(
    store: ObjectStore, name: str, claimant: str, seen: Held[LeaseRecord] | None = None
) -> SealedLog:
    """End a log whose owner is taken for dead; ``claimant`` is the log of this process.

    ``seen`` is the lease as it was read last: if the owner has not changed it since, it is not read
    once more. Several processes may end a log at the same time, for different buckets: one claim
    serves all.
    """
    held = seen or _present(lease_register(store, name).read(), store, name)
    # The listing is only a hint where to begin: what decides is which object can be created. So it
    # need not wait until the lease is taken.
    listing = request_pool().submit(_slots_behind, store, name, held.content.released)
    lease = _take_lease(store, name, claimant, held)
    used = listing.result()
    has_gap = any(slot > first_free(used, lease.released + 1) for slot in used)
    if lease.taken_by != claimant or has_gap:
        # Whoever ended the log, before or since, may remove it now. Its claim stays after the gap
        # then. Deletions are announced in the lease, so one that is read after the listing names
        # all slots that the listing lacks for that reason.
        lease = _present(lease_register(store, name).read(), store, name).content
    released = lease.released
    end = first_free(used, released + 1)
    # Slots that the owner was storing may come after a claim; they were never acknowledged.
    before = lease.released_through
    last = range(max(released + 1, end - MOST_UNDER_WAY), end)
    objects = request_pool().map(lambda slot: store.get(slot_key(name, slot)), last)
    for slot, found in zip(last, objects, strict=True):
        if found is not None and is_claim(found.data):
            return SealedLog(name, range(released + 1, slot))
        if found is not None and slot == end - 1:
            before = check_slot(found.data, str(store.address / slot_key(name, slot))).last
    check_nothing_is_missing(store, name, end, before, sorted(s for s in used if s > end))
    claim = new_claim()
    while True:
        try:
            store.create(slot_key(name, end), claim)
        except ObjectExists as exc:
            if not is_claim(exc.found.data):
                end += 1  # the owner was faster; its put is acknowledged, or may be, and counts
                continue
        return SealedLog(name, range(released + 1, end))


def _slots_behind(store: ObjectStore, name: str, released: int) -> set[int]:
    """Return the slots in use after those that were released."""
    after = slot_key(name, released) if released >= 0 else None
    return {slot_of(key) for key in store.list(slots_prefix(name), after=after)}


def check_nothing_is_missing(
    store: ObjectStore, name: str, free: int, before: int, behind: list[int]
) -> None:
    """Raise if a slot after a free one shows that the free one was acknowledged and lost.

    ``before`` is the last sequence before the free slot, ``behind`` are the slots after it. They do
    not count otherwise: the owner was storing several at a time.
    """
    for slot in behind:
        key = slot_key(name, slot)
        found = store.get(key)
        if found is None or is_claim(found.data):
            continue
        durable = check_slot(found.data, str(store.address / key)).durable
        if durable > before and store.get(slot_key(name, free)) is None:
            raise _missing(store, slot_key(name, free))


def _take_lease(
    store: ObjectStore, name: str, claimant: str, held: Held[LeaseRecord]
) -> LeaseRecord:
    """Have the owner announce nothing more; return what it has announced."""
    register = lease_register(store, name)
    while not held.content.taken_by:
        taken = msgspec.structs.replace(held.content, taken_by=claimant)
        try:
            held = register.swap(held, taken)
        except ObjectChanged as exc:
            found = None if exc.found is None else register.decode(exc.found)
            now = _present(found, store, name)
            if not now.content.taken_by and is_beat(held, now):
                raise _locked(now.content) from None
            held = now
    return held.content


def begin_reading(store: ObjectStore, sealed: SealedLog) -> Callable[[], list[bytes]]:
    """Begin to read the group commits of a sealed log, many in parallel; the returned function
    waits for them, and returns them in order and checked. Nothing is read after the first
    failure."""
    has_failed = threading.Event()

    def read(slot: int) -> bytes:
        if has_failed.is_set():
            return b""  # whoever waits gets the error of another slot
        key = slot_key(sealed.name, slot)
        try:
            found = store.get(key)
            if found is None:
                raise _missing(store, key)
            check_slot(found.data, str(store.address / key))
        except BaseException:
            has_failed.set()
            raise
        return found.data

    threads = ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="persisting-slots")
    reading = [threads.submit(read, slot) for slot in sealed.slots]
    threads.shutdown(wait=False)
    return lambda: [one.result() for one in reading]


def read_slots(store: ObjectStore, sealed: SealedLog) -> list[bytes]:
    """Return the group commits of a sealed log, in order and checked."""
    return begin_reading(store, sealed)()


def has_lease(store: ObjectStore, name: str) -> bool:
    """Whether a log was begun and not deleted as a whole."""
    return lease_register(store, name).read() is not None


def present_slots(store: ObjectStore, name: str) -> list[bytes] | None:
    """Return the group commits that a log holds now, in order; its owner may be writing.

    None if some were released meanwhile, or the log no longer exists.
    """
    lease = lease_register(store, name).read()
    if lease is None:
        return None
    released = lease.content.released
    used = _slots_behind(store, name, released)
    slots = range(released + 1, first_free(used, released + 1))
    with ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="persisting-slots") as threads:
        found = list(threads.map(lambda slot: store.get(slot_key(name, slot)), slots))
    now = lease_register(store, name).read()
    if now is None or now.content.released != released:
        return None
    contents = []
    for slot, one in zip(slots, found, strict=True):
        if one is None:
            raise _missing(store, slot_key(name, slot))
        if is_claim(one.data):
            break
        check_slot(one.data, str(store.address / slot_key(name, slot)))
        contents.append(one.data)
    return contents


def _missing(store: ObjectStore, key: str) -> WALError:
    return WALError(
        f"the log object {store.address / key} is missing: it holds records that were acknowledged "
        "and are not in the tables yet. Restore it from a copy or from an older version"
    )


def remove(store: ObjectStore, sealed: SealedLog) -> None:
    """Delete the group commits of a log that no bucket needs.

    The lease and the claim stay for good: a put of the old owner that arrives later must still be
    refused. An old owner that has not noticed its end may also name this log for another bucket,
    whose next owner then seals it once more: so the lease announces each deletion beforehand.
    """
    if sealed.slots:
        _announce_removal(store, sealed)
    claim = sealed.slots.stop
    behind = range(claim + 1, claim + MOST_UNDER_WAY)  # never acknowledged
    store.delete(slot_key(sealed.name, slot) for slot in (*sealed.slots, *behind))


def _announce_removal(store: ObjectStore, sealed: SealedLog) -> None:
    """Announce in the lease that all group commits may be deleted."""
    register = lease_register(store, sealed.name)
    last = sealed.slots[-1]
    found = store.get(slot_key(sealed.name, last))
    held = _present(register.read(), store, sealed.name)
    while held.content.released < last:
        if found is None:  # requested before the lease was read
            raise _missing(store, slot_key(sealed.name, last))
        through = check_slot(found.data, str(store.address / slot_key(sealed.name, last))).last
        announced = msgspec.structs.replace(held.content, released=last, released_through=through)
        try:
            held = register.swap(held, announced)
        except ObjectChanged as exc:
            now = None if exc.found is None else register.decode(exc.found)
            held = _present(now, store, sealed.name)


def _present(held: Held[LeaseRecord] | None, store: ObjectStore, name: str) -> Held[LeaseRecord]:
    if held is None:
        raise WALError(
            f"the lease of the log {store.address / slots_prefix(name)} is missing, and the log "
            "may hold acknowledged records. Restore it from a copy or from an older version"
        )
    return held


def _locked(record: LeaseRecord) -> BucketLocked:
    return BucketLocked(
        f"{record.owner} owns the bucket and is alive",
        msgspec.to_builtins(record.owner) | ({"passing": True} if record.passing else {}),
        hint="write through that process, or close the topic there",
    )
