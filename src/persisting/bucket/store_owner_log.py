"""The log of one topic in one process, in an object store; shared by all buckets that it owns."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from persisting.bucket import slot_files
from persisting.bucket.group_commit import GroupCommit
from persisting.bucket.lanes import Grouping
from persisting.bucket.log_index import LogIndex
from persisting.bucket.log_recovery import Replay
from persisting.bucket.schema_state import SchemaState
from persisting.bucket.store_bucket import StoreBucket
from persisting.bucket.store_notes import StoreHandovers
from persisting.bucket.store_ownership import (
    PATIENCE_SECONDS,
    Ownership,
    do_nothing,
    owner_register,
)
from persisting.bucket.store_schema import StoreSchema
from persisting.concurrency.coalesced import weak_callback
from persisting.concurrency.pool import begin_request
from persisting.errors import BucketLocked, StorageError, WALError
from persisting.options import PersistingOptions
from persisting.records import Rules
from persisting.store.object_store import ObjectStore
from persisting.store.probe import probe
from persisting.wal import sealing
from persisting.wal.lease import Lease
from persisting.wal.object_log import ObjectLog
from persisting.wal.sealing import SealedLog
from persisting.wal.slots import lease_key, new_log_name, slots_prefix

log = logging.getLogger("persisting")

_MOST_INDEXES = 4
"""How many indexes of former owners' logs are kept while buckets are being opened; afterwards
one is."""


class StoreOwnerLog:
    """An open log. Buckets of the topic attach to it; all of them share its group commit."""

    def __init__(
        self,
        store: ObjectStore,
        num_buckets: int,
        options: PersistingOptions,
        rules: Rules,
        *,
        passing: bool = False,
        patience: float = PATIENCE_SECONDS,
        takes_notes: bool = True,
        listening_at: str = "",
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """``store`` is that of the topic. Blocking.

        ``passing``: buckets are owned only for one short change, so that others wait for it, up to
        their ``patience`` in seconds. ``takes_notes``: files that are handed over are adopted.
        ``listening_at`` is the socket where other processes of this machine reach the buckets.
        ``on_lost`` is called when another process has taken the log over; it must be quick.
        """
        self._patience = patience
        probe(store)
        self.store, self.options, self._num_buckets = store, options, num_buckets
        self.process = os.getpid()
        self.name = new_log_name()
        self.schema_state = SchemaState(rules, StoreSchema(store))
        self._lease = Lease(
            store, self.name, options.lease, passing=passing, listening_at=listening_at
        )
        self._lease.on_lost = on_lost
        self.log = ObjectLog(store, self._lease)
        self.handovers = StoreHandovers(store) if takes_notes else None
        if self.handovers is not None:
            self._lease.on_call = weak_callback(self.handovers, StoreHandovers.called)
        self._lease.start(weak_callback(self.log, ObjectLog.beat))
        self.group_commit = GroupCommit(
            self.log,
            self.schema_state,
            options,
            _publish_nothing,
            Grouping(options.linger, options.linger_bytes),
        )
        self._attached: set[int] = set()
        self._opening: set[int] = set()
        """Buckets that name this log as their owner and are not attached yet."""
        self._is_noted = False
        """Whether an owner object may still name this log after its bucket was closed."""
        self._retired = False
        self._indexes: dict[SealedLog, LogIndex] = {}
        """Of logs of former owners, the most recently used last."""
        self._readings: dict[SealedLog, Callable[[], list[bytes]]] = {}
        """How to wait for logs of former owners that are being read."""
        self._removing: list[Callable[[], None]] = []
        """How to wait for the removal of logs of former owners."""
        self._guard = threading.Lock()
        self._indexing = threading.Lock()

    @property
    def lost(self) -> str:
        """Why this process no longer owns the log; empty while it does."""
        return self._lease.lost

    @property
    def overdue(self) -> str:
        """Why another process may have taken over unnoticed; empty while that cannot be."""
        return self._lease.overdue

    def own(self, bucket: int, on_free: Callable[[], None] = do_nothing) -> Ownership:
        """Take a bucket over for this process. Blocking.

        ``on_free`` is called once no other process owns it; see :class:`Ownership`.
        """
        with self._guard:
            self._check_not_retired()
            self._opening.add(bucket)
        try:
            return Ownership(
                self.store,
                bucket,
                self.name,
                self._patience,
                on_free=on_free,
                on_sealed=self._begin_reading,
            )
        except BaseException as exc:
            if not isinstance(exc, BucketLocked):
                self._is_noted = True  # the answer may have been lost
            self._not_opened(bucket)
            raise

    def disown(self, ownership: Ownership) -> None:
        """Give a bucket back that could not be opened. Blocking."""
        if not ownership.give_up():
            self._is_noted = True
        self._not_opened(ownership.bucket)

    def _not_opened(self, bucket: int) -> None:
        self._opening_ends(bucket)
        self._close_if_unused()

    def _opening_ends(self, bucket: int) -> None:
        with self._guard:
            self._opening.discard(bucket)
            if not self._opening:
                self._readings.clear()  # nobody needs them, and they may have failed
                self._keep_indexes(1)

    def _check_not_retired(self) -> None:
        if self._retired:
            raise StorageError(f"the log {self.log.place} is closed; open the bucket again")

    def attach(self, bucket: StoreBucket) -> None:
        """Recover what a former owner logged for a bucket, and log its records from now on."""
        with self._guard:
            self._check_not_retired()
            self._attached.add(bucket.number)
        try:
            left = bucket.ownership.left_log
            if left is not None:
                self._recover(bucket, left)
            bucket.ownership.use_own_log()
        except BaseException:
            # It still counts as being opened: until it is disowned, its owner object may name this
            # log, whose lease must not be deleted.
            self._detached(bucket.number)
            raise
        self._opening_ends(bucket.number)
        if left is not None and left.slots:
            try:
                self._removing.append(begin_request(self._remove_if_unused, left))
            except RuntimeError as exc:  # no thread: the interpreter exits
                log.warning("cannot delete the unused log of a former owner: %s", exc)
        bucket.lifecycle.log_ownership = self
        bucket.attach(self.group_commit, lambda: self._forget(bucket))

    def _recover(self, bucket: StoreBucket, left: SealedLog) -> None:
        """Bring the records of a former owner's log into the table."""
        index = self._index_of(left)
        after = bucket.table.sequence
        index.check(bucket.number, after)
        replay = Replay(bucket, index.folder, after)
        replay.add_blocks(index.blocks(bucket.number, after))
        replay.finish()
        bucket.flush_job.commit_buffer()

    def _begin_reading(self, left: SealedLog) -> None:
        """Read a log while its bucket is taken over, unless that was done for another bucket."""
        with self._guard:
            if left not in self._indexes and left not in self._readings:
                self._readings[left] = sealing.begin_reading(self.store, left)

    def _index_of(self, left: SealedLog) -> LogIndex:
        """Return the index of a log, which is read once for all its buckets."""
        with self._indexing:
            index = self._indexes.get(left)
            if index is not None:
                self._note_index(left, index)
                return index
            self._begin_reading(left)
            read = self._readings[left]
            place = str(self.store.address / slots_prefix(left.name))
            try:
                index = slot_files.index_slots(place, read())
                self._note_index(left, index)
            finally:
                with self._guard:
                    self._readings.pop(left, None)
            return index

    def _note_index(self, left: SealedLog, index: LogIndex) -> None:
        """Note the index that was used last. An index is as large as its log: few are kept."""
        with self._guard:
            self._indexes.pop(left, None)
            self._indexes[left] = index
            self._keep_indexes(_MOST_INDEXES)

    def _keep_indexes(self, count: int) -> None:
        for left in list(self._indexes)[:-count]:
            del self._indexes[left]

    def _remove_if_unused(self, left: SealedLog) -> None:
        """Delete the group commits of a former owner's log if no bucket needs them."""
        try:
            for number in range(self._num_buckets):
                held = owner_register(self.store, number).read()
                if held is not None and held.content.log == left.name:
                    return
            sealing.remove(self.store, left)
            with self._guard:
                self._indexes.pop(left, None)
        except StorageError as exc:
            log.warning("cannot delete the unused log of a former owner: %s", exc)

    def _forget(self, bucket: StoreBucket) -> None:
        """Detach a bucket, and give it back unless its log holds records that its table lacks, or
        may hold some. Then the log ends, as opening the bucket again would end it: it could never
        be released, nor start over after a failure."""
        if bucket.buffer.first_sequence is not None and not self.log.lost:
            self._lease.give_up(f"bucket {bucket.number} was closed without a flush")
        if self.log.lost or not bucket.ownership.give_back():
            self._is_noted = True
        with suppress(WALError):
            self.group_commit.release()
        self._detached(bucket.number)

    def retire(self, *, wait: bool = True) -> None:
        """Close and remove the log once no bucket is attached to it. With ``wait`` the logs of
        former owners are removed when this returns."""
        with self._guard:
            self._retired = True
        if wait:
            self.wait_for_removals()
        self._close_if_unused()

    def wait_for_removals(self) -> None:
        """Wait until the logs of former owners that no bucket needs are removed."""
        if os.getpid() == self.process:  # a fork has none of the threads that remove them
            for wait in self._removing:
                wait()

    def abandon(self) -> None:
        """Stop the heartbeats: others take over the buckets once the lease expires."""
        self._lease.stop()

    def give_up(self, reason: str) -> None:
        """Own the log no longer: its buckets are lost, and the next owner of each replays it."""
        self._lease.give_up(reason)

    def _detached(self, bucket: int) -> None:
        with self._guard:
            self._attached.discard(bucket)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._guard:
            if not self._retired or self._attached or self._opening or self.log.closed:
                return
            self.group_commit.close()
        if self._is_noted or self.log.lost:
            return  # a late put must find the claim
        try:
            self.log.delete_all()
            self.store.delete([lease_key(self.name)])
        except StorageError as exc:
            log.warning("cannot delete the unused log %s: %s", self.log.place, exc)


def _publish_nothing(acknowledged: int, synced: int) -> None:
    """Readers in other processes poll the store."""
