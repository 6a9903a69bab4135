"""A work group in an object store: who keeps it is a swap, its journal is a log of slots.

    groups/<group>/work/keeper.json     who keeps the group, and which log holds its journal
    groups/<group>/work/status.json     its numbers, for tools
    groups/<group>/bucket_<i>.json      the floors of its buckets
    log/<name>/                         the journal: see :mod:`persisting.wal.slots`

A keeper takes over a group as an owner takes over a bucket:

1. wait until the lease of the last keeper expires, and create a claim in the first free slot of its
   log;
2. swap ``keeper.json``: it names the new keeper, and still the old log;
3. replay the old log, and begin a new one with the whole state;
4. swap ``keeper.json`` again: it names the new log, and the old one as left over;
5. raise the generation of the floors, check that the group is still kept here, serve;
6. delete what is left over.

A keeper that was paused can no longer make anything durable, and so answers nothing. Clocks of two
machines are never compared: leases of members continue with the time that they had left when the
previous keeper last wrote something. Blocking.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from persisting.bucket.group_offsets import Committed
from persisting.bucket.store_groups import (
    NOBODY,
    KeeperRecord,
    StoredOffset,
    keeper_register,
    offset_register,
    read_journal,
)
from persisting.concurrency.coalesced import weak_callback
from persisting.errors import BucketLocked, StorageError, WALError
from persisting.lock import described
from persisting.store.object_store import ObjectChanged, ObjectExists, ObjectStore, StoreError
from persisting.store.register import Held
from persisting.topic.store_work_status import StatusWriter
from persisting.topic.work_status import WorkStatus
from persisting.wal import sealing
from persisting.wal.frame import Frame
from persisting.wal.lease import Lease, LeaseRecord
from persisting.wal.log import Payload
from persisting.wal.object_log import ObjectLog
from persisting.wal.sealing import SealedLog
from persisting.wal.slots import lease_key, new_log_name, slot_frames, slots_prefix
from persisting.work.clock import Clock
from persisting.work.group_storage import KeptElsewhere
from persisting.work.journal import (
    JournalEntry,
    operations_payload,
    replayed,
    replayed_until,
    segment_limit,
    snapshot_payload,
    start_payload,
)
from persisting.work.state import GroupState

log = logging.getLogger("persisting")

_SNAPSHOT_WRITES = 256
"""The state is written whole after this many writes: the next keeper reads all slots since then."""

_PARALLEL = 16


class StoreGroup:
    """A group in an object store, kept by this process."""

    note_seconds = 10.0  # each note is a request

    def __init__(
        self,
        store: ObjectStore,
        group: str,
        num_buckets: int,
        lease_seconds: float,
        *,
        socket: str = "",
    ) -> None:
        """Take the group over, and replay its journal; ``store`` is that of the topic.

        Raises :class:`KeptElsewhere` while the lease of another process has not ended.
        """
        self.group, self.place, self._store = group, str(store.address), store
        self._register = keeper_register(store, group)
        self._writes = self._bytes = self._limit = 0
        held = self._register.read()
        last = KeeperRecord() if held is None else held.content
        if last.deleted:
            last = KeeperRecord(left=last.left)
        name = new_log_name()
        sealed = self._seal(held, last, name)
        self._lease = Lease(store, name, lease_seconds)
        self._log = ObjectLog(store, self._lease)
        self._lease.start(weak_callback(self._log, ObjectLog.beat))
        self._held = self._take(held, msgspec.structs.replace(last, owner=name, socket=socket))
        try:
            self.state = self._replay(last, sealed)
            self._begin_journal()
            left = [*last.left, *{last.log, last.owner}]
            self._swap(log=name, closed=False, left=sorted({*left} - {NOBODY, name}))
            self._floors = self._fence_floors(num_buckets)
            self._check_kept()  # otherwise the floors of the next keeper were just raised
        except WALError:
            self._give_up(name)
            self._check_kept()  # otherwise the next keeper has deleted the journal meanwhile
            raise
        except BaseException:
            self._give_up(name)
            raise
        self._status = StatusWriter(store, group)
        self._remove_left(last)

    def _seal(
        self, held: Held[KeeperRecord] | None, last: KeeperRecord, name: str
    ) -> SealedLog | None:
        """End the journal of the last keeper, unless it has closed it; raise if it is alive."""
        try:
            owner = None
            if last.owner != NOBODY:
                owner = sealing.look_at_owner(self._store, last.owner)
            if owner is not None:
                raise self._kept_by(owner_note(owner), last)
            if last.log == NOBODY or last.closed:
                return None
            return sealing.seal(self._store, last.log, name)
        except KeptElsewhere:
            raise
        except BucketLocked as exc:
            raise self._kept_by(exc.owner, last) from exc
        except WALError:  # another process may have been faster, and have deleted the journal
            now = self._register.read()
            if now is None or held is None or now.version == held.version:
                raise
            raise self._taken() from None

    def _kept_by(self, owner: dict[str, object], last: KeeperRecord) -> KeptElsewhere:
        return KeptElsewhere(
            f"work group {self.group!r} of {self.place} is kept by {described(owner)}, whose lease "
            "has not ended",
            owner={**owner, "socket": last.socket},
        )

    def _taken(self) -> KeptElsewhere:
        return KeptElsewhere(
            f"another process has just taken over work group {self.group!r} of {self.place}"
        )

    def _take(self, held: Held[KeeperRecord] | None, record: KeeperRecord) -> Held[KeeperRecord]:
        """Become the keeper; raise if another process was faster."""
        try:
            if held is None:
                return self._register.create(record)
            return self._register.swap(held, record)
        except BaseException as exc:
            self._log.close()
            if not isinstance(exc, (ObjectExists, ObjectChanged)):
                raise
        self._delete([lease_key(self._log.name)])
        raise self._taken()

    def _swap(self, **changes: object) -> None:
        """Change what ``keeper.json`` says; raise if another process keeps the group now."""
        record = msgspec.structs.replace(self._held.content, **changes)
        try:
            self._held = self._register.swap(self._held, record)
        except ObjectChanged:
            raise self._taken() from None

    def _replay(self, last: KeeperRecord, sealed: SealedLog | None) -> GroupState:
        """Return the state in the journal of the last keeper."""
        place = str(self._store.address / slots_prefix(last.log))
        contents: list[bytes] | None = []
        if sealed is not None:
            contents = sealing.read_slots(self._store, sealed)
        elif last.log != NOBODY:
            contents = sealing.present_slots(self._store, last.log)
        if contents is None or (last.log != NOBODY and not contents):
            raise WALError(
                f"the journal {place} of work group {self.group!r} is missing; restore it from a "
                "copy or from older versions of its objects"
            )
        state, latest = replayed_until(_frames(contents, place), place)
        state.resume_leases(latest, Clock(latest).now())
        state.take_operations()  # the first slot holds the whole state
        return state

    def _begin_journal(self) -> None:
        """Begin the log with the whole state."""
        state = self.state.dump()
        self._limit = segment_limit(len(state))
        self._log.append([[snapshot_payload(state)]], self._start, self.state.time)

    def _start(self) -> list[Payload]:
        return [start_payload(self._log.last_written)]

    def _give_up(self, name: str) -> None:
        """Let others keep the group after a failed opening; its journal is here or where it was."""
        self._log.close()
        record = self._held.content
        try:
            left = [] if record.log == name else [name]
            self._swap(owner=NOBODY, socket="", left=sorted({*record.left, *left}))
        except StorageError as exc:
            log.warning("%s; the next keeper waits for the lease", exc)

    def _fence_floors(self, num_buckets: int) -> dict[int, Held[StoredOffset]]:
        """Raise the generation of all floors: a former keeper that resumes cannot change one."""
        with ThreadPoolExecutor(min(num_buckets, _PARALLEL)) as threads:
            return dict(enumerate(threads.map(self._fence, range(num_buckets))))

    def _fence(self, bucket: int) -> Held[StoredOffset]:
        register = offset_register(self._store, self.group, bucket)
        held = register.read()
        while True:
            try:
                if held is None:
                    return register.create(StoredOffset(generation=1))
                generation = held.content.generation + 1
                return register.swap(
                    held, msgspec.structs.replace(held.content, generation=generation)
                )
            except (ObjectExists, ObjectChanged) as exc:
                held = None if exc.found is None else register.decode(exc.found)

    def _remove_left(self, last: KeeperRecord) -> None:
        """Delete the logs of former keepers. Their claims stay, unless they were closed: a late
        write must still be refused."""
        try:
            for name in self._held.content.left:
                if last.closed and name == last.log:
                    slots = self._store.list(slots_prefix(name))
                    self._store.delete([*slots, lease_key(name)])
                elif sealing.has_lease(self._store, name):
                    sealing.remove(self._store, sealing.seal(self._store, name, self._log.name))
        except (StoreError, WALError) as exc:
            log.warning("cannot delete the journal of a former keeper: %s", exc)
            return
        content = msgspec.structs.replace(self._held.content, left=[])
        self._held = Held(content, self._held.version)  # written with the next change

    def _delete(self, keys: list[str]) -> None:
        try:
            self._store.delete(keys)
        except StoreError as exc:
            log.warning("cannot delete unused objects of a work group: %s", exc)

    # The journal

    @property
    def size(self) -> int:
        return self._log.size

    def write(self, entry: JournalEntry) -> None:
        entries = [[operations_payload(entry)]]
        before, size = self._log.last_sequence, self._log.size
        begins = self._writes >= _SNAPSHOT_WRITES or self._bytes > self._limit
        if begins:
            state = entry.snapshot()
            entries.insert(0, [snapshot_payload(state)])
        self._log.append(entries, self._start, entry.now)
        if begins:
            self._log.release(before)
            self._writes = self._bytes = 0
            self._limit = segment_limit(len(state))
        else:
            self._writes += 1
            self._bytes += self._log.size - size

    @property
    def lost(self) -> str:
        """Why another process keeps the group now; empty while none is known to."""
        return self._lease.lost

    def close_journal(self) -> None:
        self._log.close()

    def release(self, *, clean: bool) -> None:
        """Let the next keeper take over immediately, even after a failure: this process writes
        nothing more to the journal. Without one, nothing can arrive late either."""
        try:
            self._swap(owner=NOBODY, socket="", closed=clean)
        except KeptElsewhere:
            return
        except StoreError as exc:
            log.warning("%s; nothing is lost, the next keeper waits for the lease", exc)

    # Floors and status

    def read_floor(self, bucket: int) -> Committed:
        return self._floors[bucket].content.committed

    def write_floor(self, bucket: int, offset: int, epoch: int) -> None:
        register = offset_register(self._store, self.group, bucket)
        while True:
            held = self._floors[bucket]
            floor = msgspec.structs.replace(held.content, offset=offset, epoch=epoch)
            try:
                self._floors[bucket] = register.swap(held, floor)
                return
            except ObjectChanged:  # a former keeper may have raised the generation very late
                self._floors[bucket] = self._fence(bucket)
                self._check_kept()

    def _check_kept(self) -> None:
        now = self._register.read()
        if now is None or now.version != self._held.version:
            raise self._taken()

    def write_status(self, status: WorkStatus) -> None:
        self._status.write(status)


def owner_note(lease: LeaseRecord) -> dict[str, Any]:
    """Return what is known of the process that has a lease."""
    known: dict[str, Any] = msgspec.to_builtins(lease.owner)
    return {name: value for name, value in known.items() if value}


def read_state(store: ObjectStore, group: str) -> GroupState:
    """Return the state that a journal holds; its keeper may be writing. Nothing is changed."""
    contents, place = read_journal(store, group)
    return replayed(_frames(contents, place), place)


def _frames(contents: Sequence[bytes], place: str) -> Iterator[Frame]:
    for data in contents:
        yield from slot_frames(data, place)
