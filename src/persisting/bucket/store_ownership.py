"""Who owns a bucket in an object store: ``bucket_<i>/owner.json``, changed by compare-and-swap.

Every new owner raises the term. The object also names the log that may hold records which the
bucket's table lacks. It keeps naming the log of a former owner until the new one has brought its
records into the table.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from persisting.errors import BucketLocked, NoSuchTopic, OwnershipLost, StorageError, WALError
from persisting.store.object_store import ObjectChanged, ObjectExists, ObjectStore, StoreError
from persisting.store.register import Held, Register
from persisting.wal import sealing
from persisting.wal.sealing import SealedLog

log = logging.getLogger("persisting")

FORMAT = 1
FREE = ""
_DEFINITION = "topic.json"
REMOVED = "removed"
"""The backend in the definition of a topic that was deleted. The object stays, because a DELETE
takes no condition: one that arrives late could remove a new topic of the same name."""

PATIENCE_SECONDS = 60.0
"""How long to wait for a process that owns a bucket only briefly."""

_PAUSE_SECONDS = 0.2


class _Definition(msgspec.Struct):
    """What this module reads of the definition of a topic."""

    backend: str = ""


def is_removed(definition: bytes) -> bool:
    """Whether the content of ``topic.json`` says that the topic was deleted."""
    try:
        return msgspec.json.decode(definition, type=_Definition).backend == REMOVED
    except msgspec.DecodeError:
        return False


class OwnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the object."""

    term: int
    owner: str
    """The log of the owning process; empty if the last one closed the bucket."""
    log: str = FREE
    """The log that may hold records which the table lacks; empty if there is none."""
    deleted: bool = False
    """Whether the topic was deleted: then the bucket can be owned only if there is a new one."""
    format: int = FORMAT


def owner_register(store: ObjectStore, bucket: int) -> Register[OwnerRecord]:
    """``store`` is that of the topic."""
    return Register(store, f"bucket_{bucket}/owner.json", OwnerRecord, FORMAT)


def check_free(store: ObjectStore, bucket: int, name: str) -> None:
    """Raise :class:`BucketLocked` unless this process may take over a bucket now. Blocking.

    ``store`` is that of the topic, ``name`` the log of this process. Does not wait: after repeated
    calls, this process may take over once the lease has expired.
    """
    register = owner_register(store, bucket)
    held = register.read()
    while held is not None and held.content.owner not in (FREE, name):
        try:
            return sealing.check_owner(store, held.content.owner)
        except WALError:  # the owner may have closed the bucket, and deleted its log, meanwhile
            now = register.read()
            if now is not None and now.version == held.version:
                raise
            held = now


def look_at_an_owner(store: ObjectStore) -> None:
    """Read the lease of the process that owns the first bucket, and often all others, too: if that
    process is dead, the time until its lease expires counts from now."""
    with suppress(StorageError):  # who opens a bucket reports it
        held = owner_register(store, 0).read()
        if held is not None and held.content.owner != FREE:
            sealing.look_at_owner(store, held.content.owner)


def do_nothing(*_: object) -> None:
    """Return immediately, whatever is passed."""


class Ownership:
    """The ownership of one bucket by this process."""

    def __init__(
        self,
        store: ObjectStore,
        bucket: int,
        name: str,
        patience: float = PATIENCE_SECONDS,
        *,
        on_free: Callable[[], None] = do_nothing,
        on_sealed: Callable[[SealedLog], None] = do_nothing,
    ) -> None:
        """Take over the bucket; ``name`` is the log of this process. Blocking.

        Waits until the lease of the owner expires, and raises :class:`BucketLocked` if the owner
        sends a heartbeat. If the owner needs the bucket only briefly, this waits up to ``patience``
        seconds for it.

        ``on_free`` is called once no other process owns the bucket, and ``on_sealed`` when the
        log of a former owner is final: what follows can begin while this takes the bucket over.
        They must be quick, and may be called more than once.
        """
        self._store, self._name, self._patience = store, name, patience
        self._on_free, self._on_sealed = on_free, on_sealed
        self.bucket = bucket
        self._register = owner_register(store, bucket)
        self.left_log: SealedLog | None = None
        """The log of a former owner, whose records are to be brought into the table."""
        self._held = self._take()

    @property
    def term(self) -> int:
        return self._held.content.term

    def _take(self) -> Held[OwnerRecord]:
        held, end = self._register.read(), time.monotonic() + self._patience
        while True:
            try:
                if held is None:
                    self._on_free()
                    return self._register.create(OwnerRecord(term=1, owner=self._name))
                return self._take_from(held)
            except (ObjectExists, ObjectChanged) as exc:
                held = None if exc.found is None else self._register.decode(exc.found)
            except BucketLocked as exc:
                if not exc.owner.get("passing") or time.monotonic() > end:
                    raise
                time.sleep(_PAUSE_SECONDS)
                held = self._register.read()
            except WALError:  # the owner may have closed the bucket, and deleted its log, meanwhile
                now = self._register.read()
                if now is None or held is None or now.version == held.version:
                    raise
                held = now

    def _take_from(self, held: Held[OwnerRecord]) -> Held[OwnerRecord]:
        record = held.content
        if record.deleted and not self._has_definition():
            raise NoSuchTopic(f"the topic at {self._store.address} was deleted")
        lease = None
        if record.owner not in (FREE, self._name):  # an attempt of this process may have failed
            lease = sealing.wait_for_owner(self._store, record.owner)
        self._on_free()
        # Before the swap: after it the log of the former owner is known to be final.
        sealed = None
        if record.log != FREE:
            seen = lease if record.log == record.owner else None
            sealed = sealing.seal(self._store, record.log, self._name, seen)
            self._on_sealed(sealed)
        taken = self._register.swap(
            held, OwnerRecord(term=record.term + 1, owner=self._name, log=record.log)
        )
        self.left_log = sealed
        return taken

    def _has_definition(self) -> bool:
        found = self._store.get(_DEFINITION)
        return found is not None and not is_removed(found.data)

    def use_own_log(self) -> None:
        """Note that records of the bucket are in this process's log from now on; the table holds
        all others."""
        self._swap(OwnerRecord(term=self.term, owner=self._name, log=self._name))
        self.left_log = None

    def note_deletion(self) -> None:
        """Prevent others from owning the bucket from now on, unless there is a new topic."""
        self._swap(msgspec.structs.replace(self._held.content, deleted=True))

    def give_back(self) -> bool:
        """Let others own the bucket, whose table holds everything; return whether that is noted.

        If another process has taken the bucket over, its note may still name this one's log, whose
        lease and claim it needs then.
        """
        try:
            deleted = self._held.content.deleted
            self._swap(OwnerRecord(term=self.term, owner=FREE, deleted=deleted))
        except OwnershipLost:
            return False
        except StoreError as exc:
            log.warning("%s; nothing is lost, the next owner waits for the lease", exc)
            return False
        return True

    def give_up(self) -> bool:
        """Let others own the bucket after a failed opening; return whether that is noted.

        What a former owner's log holds stays there. This process's log holds nothing yet.
        """
        left = self._held.content.log
        record = OwnerRecord(term=self.term, owner=FREE, log=FREE if left == self._name else left)
        try:
            self._swap(record)
        except (OwnershipLost, StoreError) as exc:
            log.warning("%s; nothing is lost, the next owner waits for the lease", exc)
            return False
        return True

    def _swap(self, record: OwnerRecord) -> None:
        try:
            self._held = self._register.swap(self._held, record)
        except ObjectChanged:
            raise OwnershipLost(
                f"another process has taken over the bucket ({self._register.place})",
                hint="open the topic again",
            ) from None
