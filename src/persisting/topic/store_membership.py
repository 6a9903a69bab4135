"""Membership in a consumer group of a topic in an object store.

    groups/<group>/bucket_<i>.json        committed offset, generation, member      swapped
    groups/<group>/members/<member>       a heartbeat                               replaced

There are no locks: a member sends heartbeats, and the others take over its buckets if they see none
for the length of the lease, by their own clocks. A heartbeat is advice. What decides is the
compare-and-swap of the offset: a member that was taken for dead can no longer commit, and stops
reading.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid

import msgspec

from persisting.bucket.group_offsets import Committed
from persisting.bucket.store_groups import (
    GROUPS,
    NOBODY,
    StoredOffset,
    is_work_group,
    offset_register,
    read_committed,
)
from persisting.concurrency import timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.store.object_store import ObjectChanged, ObjectExists, ObjectStore, StoreError
from persisting.store.register import Held, Register
from persisting.topic.groups import Assignment, work_group_error
from persisting.topic.topic_names import check_name

log = logging.getLogger("persisting")

_FORMAT = 1
_BEATS_PER_LEASE = 3
_LOOKS_PER_LEASE = 5


def check_offset_mode(store: ObjectStore, group: str) -> None:
    """Raise if a group is a work group, which has no offsets to commit. Blocking."""
    if is_work_group(store, group):
        raise work_group_error(group)


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a member's object."""

    beat: int = 0
    format: int = _FORMAT


class StoreMembership:
    """One member of a group; it joins with the first :meth:`rebalance`.

    Blocking and thread-safe. A member that is garbage-collected sends no more heartbeats, so
    that the others take over its buckets once the lease expires.
    """

    def __init__(self, store: ObjectStore, group: str, buckets: list[int], seconds: float) -> None:
        """``store`` is that of the topic, ``seconds`` the length of the lease."""
        self.group, self.member = check_name("group", group), uuid.uuid4().hex
        self._store, self._buckets, self._seconds = store, buckets, seconds
        self._members = f"{GROUPS}/{self.group}/members"
        self._register = Register(store, f"{self._members}/{self.member}", Beat, _FORMAT)
        self._guard, self._beat_guard = threading.Lock(), threading.Lock()
        self._held: dict[int, Held[StoredOffset]] = {}
        self._last_beat: Held[Beat] | None = None
        self._beaten_at = 0.0
        self._was_removed = False
        """Whether another member has taken this one for dead since the buckets were checked."""
        self._seen: dict[str, tuple[object, float]] = {}
        """By member: its last heartbeat, and when this member first saw it."""
        self._looked_at: float | None = None
        self._beating = CoalescedTask(weak_callback(self, StoreMembership._beat))
        self._left = False

    @property
    def held(self) -> dict[int, Assignment]:
        """The buckets assigned to this member now."""
        return {
            bucket: Assignment(held.content.generation, held.content.offset, held.content.epoch)
            for bucket, held in self._held.copy().items()
        }

    def rebalance(self) -> None:
        """Take and release buckets, so that the live members share them evenly.

        A bucket is taken only after its former member has released it or is taken for dead. Polls
        the store a few times per lease, however often it is called.
        """
        with self._guard:
            if self._left:
                return
            self._join()
            now = time.monotonic()
            if self._looked_at is not None:
                if now - self._looked_at < self._seconds / _LOOKS_PER_LEASE:
                    return
            self._drop_lost()
            members = self._living()
            share = {b for b in self._buckets if members[b % len(members)] == self.member}
            for bucket in [b for b in self._held if b not in share]:
                self._release(bucket)
            for bucket in sorted(share - set(self._held)):
                self._try_take(bucket, members)
            self._looked_at = now

    def commit(self, offsets: dict[int, tuple[int, int, int]]) -> dict[int, int]:
        """Make offsets durable; ``offsets`` has generation, offset and epoch by bucket.

        Buckets that are no longer assigned to this member are skipped. Returns what was committed.
        """
        with self._guard:
            committed = {}
            for bucket, (generation, offset, epoch) in offsets.items():
                held = self._held.get(bucket)
                if held is None or held.content.generation != generation:
                    continue
                content = msgspec.structs.replace(held.content, offset=offset, epoch=epoch)
                if content == held.content or self._swap(bucket, content):
                    committed[bucket] = offset
            return committed

    def committed(self) -> dict[int, Committed]:
        """Return the committed offset of every bucket."""
        return {b: read_committed(self._store, self.group, b) for b in self._buckets}

    def leave(self) -> None:
        """Release all buckets immediately, and never take one again."""
        with self._guard:
            self._left = True
            try:
                for bucket in list(self._held):
                    self._release(bucket)
                with self._beat_guard:
                    if self._last_beat is not None:
                        self._store.delete([f"{self._members}/{self.member}"])
            except StoreError as exc:
                log.warning(
                    "cannot leave group %r: %s; the other members take over after %g s",
                    self.group,
                    exc,
                    self._seconds,
                )
            self._held.clear()

    # Heartbeats

    def _join(self) -> None:
        if self._last_beat is None:
            self._beat()
            self._beat_later()

    def _beat_later(self) -> None:
        if not self._left:
            call = weak_callback(self, StoreMembership._beat_at_time)
            timer.after(self._seconds / _BEATS_PER_LEASE, call)

    def _beat_at_time(self) -> None:
        if not self._left:
            self._beating.request()
            self._beat_later()

    def _beat(self) -> None:
        """Send a heartbeat. If its object was deleted, it was taken for dead: join again."""
        with self._beat_guard:
            if self._left:
                return
            began, last = time.monotonic(), self._last_beat
            try:
                if last is None:
                    self._last_beat = self._register.create(Beat())
                else:
                    self._last_beat = self._register.swap(last, Beat(beat=last.content.beat + 1))
            except (ObjectExists, ObjectChanged) as exc:
                self._was_removed = True
                if exc.found is None:
                    self._last_beat = self._register.create(Beat())
                else:  # an earlier heartbeat of this member arrived late
                    self._last_beat = self._register.decode(exc.found)
            if began - self._beaten_at > self._seconds:
                self._was_removed = True
            self._beaten_at = began

    # Buckets

    def _living(self) -> list[str]:
        """Return the live members, in a fixed order; remove the objects of dead ones."""
        began = time.monotonic()
        entries = self._store.entries(self._members)
        now, living, dead = time.monotonic(), [self.member], []
        for key, entry in entries.items():
            member = key.rpartition("/")[2]
            if member == self.member:
                continue
            beat, since = self._seen.get(member, (None, now))
            if beat != entry:
                self._seen[member] = entry, now
            elif began - since > self._seconds:
                dead.append(key)
                continue
            living.append(member)
        self._store.delete(dead)
        return sorted(living)

    def _drop_lost(self) -> None:
        """Drop the buckets that others have taken, if this member may have been taken for dead."""
        if time.monotonic() - self._beaten_at > self._seconds:
            self._was_removed = True
        if not self._was_removed:
            return
        self._was_removed = False  # a heartbeat may set it again meanwhile
        try:
            for bucket, held in list(self._held.items()):
                stored = offset_register(self._store, self.group, bucket).read()
                if stored is None or stored.version != held.version:
                    del self._held[bucket]
        except BaseException:
            self._was_removed = True
            raise

    def _try_take(self, bucket: int, members: list[str]) -> None:
        register = offset_register(self._store, self.group, bucket)
        stored = register.read()
        try:
            if stored is None:
                self._held[bucket] = register.create(StoredOffset(generation=1, member=self.member))
                return
            last = stored.content
            if last.member not in (NOBODY, self.member) and last.member in members:
                return
            taken = msgspec.structs.replace(
                last, generation=last.generation + 1, member=self.member
            )
            self._held[bucket] = register.swap(stored, taken)
        except (ObjectExists, ObjectChanged):
            pass  # another member was faster

    def _release(self, bucket: int) -> None:
        content = msgspec.structs.replace(self._held[bucket].content, member=NOBODY)
        if self._swap(bucket, content):
            del self._held[bucket]

    def _swap(self, bucket: int, content: StoredOffset) -> bool:
        """Replace what this member wrote last; drop the bucket and return False if another member
        has it."""
        try:
            register = offset_register(self._store, self.group, bucket)
            self._held[bucket] = register.swap(self._held[bucket], content)
            return True
        except ObjectChanged:
            del self._held[bucket]
            return False
