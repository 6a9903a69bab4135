"""The keeper of a work group: answers its members, and journals every change before it answers.

The state is changed immediately, under a lock. The operations wait for the next write of the
journal, which one thread does for all calls that wait. After a failed write the keeper ends: the
state in memory is ahead of the disk, and the next keeper replays what is durable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from persisting.concurrency import loop_bridge
from persisting.concurrency.loop_bridge import LoopWaiter
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, OwnershipLost, StorageError, WALError
from persisting.topic.work_status import WorkStatus
from persisting.work.breaker import Breaker
from persisting.work.clock import Clock
from persisting.work.group_numbers import GroupNumbers
from persisting.work.group_storage import GroupStorage
from persisting.work.group_values import (
    Letter,
    Position,
    RecordLease,
    agreed_settings,
    lost_lease,
)
from persisting.work.journal import JournalEntry
from persisting.work.members import Members
from persisting.work.open_records import NEVER
from persisting.work.state import MOST_DYING, Operation

log = logging.getLogger("persisting")

MOST_CLAIMED = 10_000
"""The most records that one claim returns."""

WINDOW = 4096
"""Records of a bucket that are read ahead: the priority is compared among these."""

_MOST_WINDOWS = 16
"""With ``ordered_by``, this many windows are read while all keys in them are blocked."""

MOST_AHEAD = 1_000_000
"""While a bucket has this many unfinished records, those that wait for their time included, no
further ones are read ahead."""

_FLOOR_WAIT_SECONDS = 30.0
_LOOK_SECONDS = 5.0


class KeeperEnded(BucketClosed):
    """The keeper has ended; the next call finds or becomes another one."""


class DyingRecord(NamedTuple):
    """A record whose dead letter is about to be put."""

    position: Position
    reason: str
    time: int
    attempts: int
    first: int
    last: int
    letter: int
    """Offset of the dead letter from its previous failure, -1 if there is none."""
    number: int
    """The number of its dead letter."""
    generation: int
    """The generation of its bucket, as in :class:`~persisting.work.state.BucketState`."""


class Keeper:
    """Keeps one group. Calls may come from any event loop of this process."""

    def __init__(self, storage: GroupStorage) -> None:
        self._storage = storage
        self.group, self.place = storage.group, storage.place
        self.state, self.note_seconds = storage.state, storage.note_seconds
        self.clock = Clock(self.state.time)
        self.breaker = Breaker()
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._queue: list[Operation] = []
        self._written = self.state.operations
        """How many operations were given to the journal."""
        self._durable_operations = self.state.operations
        self._waiting: list[LoopWaiter] = []
        """Calls whose operations are in the queue."""
        self._writing = self._closed = False
        self._idle = threading.Condition(self._guard)
        self._spans: dict[int, tuple[int, int]] = {}
        self._members_waiting: set[LoopWaiter] = set()
        self._stopped: set[tuple[str, int]] = set()
        """Claims whose wait was cancelled, by member and number."""
        self._not_repeated: set[tuple[str, int]] = set()
        """Numbered claims under way that have leases. A repeat removes its claim: the leases are
        now the repeat's too, and the first call must not give them back."""
        self._members = Members()
        self._numbers = GroupNumbers(self.state, self._spans)
        self._rejecting: dict[Position, list[LoopWaiter]] = {}
        self._floors: dict[int, tuple[int, int]] = {}
        self._floors_guard = threading.Lock()
        self.failure: StorageError | None = None
        self.dead_letter_error: str | None = None
        self.on_dying: Callable[[], None] = lambda: None
        """Called whenever records may be on their way to the dead letters."""
        self._looks: list[LoopWaiter] = []
        self.on_look: Callable[[], None] = lambda: None
        """Called when a member wants records that were put just now."""

    @property
    def identity(self) -> str:
        """What tells the group from an earlier one of its name."""
        return self.state.settings.identity

    # The journal

    def _snapshot(self) -> bytes:
        with self._guard:
            return self.state.dump()

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise KeeperEnded("the keeper belongs to the process that this one was forked from")
        if self.failure is not None:
            raise self.failure
        if self._closed:  # nothing may be queued for the journal after close() has emptied it
            raise KeeperEnded(f"the keeper of work group {self.group!r} is about to end")

    def _enqueue(self, waiter: LoopWaiter | None = None) -> LoopWaiter | None:
        """Queue the operations of a call for the journal; the caller holds the guard.

        Returns what to wait for, None if the call has changed nothing. A caller outside of an event
        loop brings the waiter.
        """
        operations = self.state.take_operations()
        if not operations:
            return None
        waiter = waiter or LoopWaiter()
        self._queue += operations
        self._waiting.append(waiter)
        if not self._writing:
            self._writing = True
            try:
                loop_bridge.submit(self._write)
            except loop_bridge.NoThread as exc:
                self._writing = False
                self._fail(StorageError(f"no thread can be started for the journal: {exc}"))
        return waiter

    def _write(self) -> None:
        """Write the queue until it is empty; in a thread of its own."""
        while True:
            with self._guard:
                operations, self._queue = self._queue, []
                waiting, self._waiting = self._waiting, []
                first = self._written
                if not operations or self.failure is not None:
                    self._writing = False
                    self._idle.notify_all()
                    _deliver(waiting, self.failure)
                    return
                self._written += len(operations)
            error: StorageError | None = None
            try:
                entry = JournalEntry(first, operations, self.clock.now(), self._snapshot)
                self._storage.write(entry)
            except WALError as exc:
                error = exc
            except OwnershipLost as exc:  # nothing was stored: the next keeper may be asked instead
                error = KeeperEnded(f"another process keeps work group {self.group!r} now: {exc}")
            except BaseException as exc:
                error = WALError(f"the journal of work group {self.group!r} failed: {exc}")
            with self._guard:
                if error is not None:
                    self._fail(error)
                else:
                    self._durable_operations = first + len(operations)
                self._idle.notify_all()
            _deliver(waiting, error)

    def _fail(self, error: StorageError) -> None:
        """End the keeper; the caller holds the guard."""
        if self.failure is None:
            log.error("work group %r of %s: %s", self.group, self.place, error)
            self.failure = error
        waiting, self._waiting = self._waiting, []
        rejecting = [waiter for waiters in self._rejecting.values() for waiter in waiters]
        self._rejecting.clear()
        looks, self._looks = self._looks, []
        _deliver([*waiting, *rejecting, *looks], error)
        self._idle.notify_all()
        self._wake()

    async def _durable(self, waiter: LoopWaiter | None) -> None:
        if waiter is not None:
            await waiter.future

    # Calls of members

    async def claim(
        self,
        member: str,
        count: int,
        lease: float,
        wait: float,
        number: int = 0,
        answered: int = 0,
        readers: int = 1,
        without: Sequence[int] = (),
    ) -> tuple[list[RecordLease], float]:
        """Lease up to ``count`` records; wait for the first one up to ``wait`` seconds.

        Returns the leases, and how many seconds after the call they began. A claim with a number
        above 0 may be repeated after its answer was lost, even to the next keeper: it gets the same
        records. ``answered`` says that the member has the answers to all claims with lower numbers,
        ``readers`` for how many readers it asks, ``without`` which buckets it cannot read now.
        """
        count = min(count, MOST_CLAIMED)
        began = time.monotonic()
        deadline = began + wait
        self._forget_stopped(member, answered)
        while True:
            with self._guard:
                self._check()
                stopped = (member, number) in self._stopped
                self._stopped.discard((member, number))
                waited = time.monotonic() - began
                now = self.clock.now()
                self._members.asked(member, now, readers)
                duration = round(lease * 1e6)
                # A stopped claim, too: its caller gives back what the first call got.
                leases = self._repeat(now, member, duration, number)
                if not leases and not stopped:
                    spans = {b: span for b, span in self._spans.items() if b not in without}
                    leases = self._claim(now, member, count, duration, number, answered, spans)
                written = self._enqueue()
                wake = None
                if not leases and wait > 0 and not stopped:
                    wake = LoopWaiter()
                    self._members_waiting.add(wake)
                    due = self.state.next_due(self._spans)
                    if self.state.settings.breaker and self.breaker.retry_at() > now:
                        due = self.breaker.retry_at()  # then there may be records, new ones too
            try:
                await self._durable(written)
                if wake is None:
                    return leases, waited
                left = deadline - time.monotonic()
                if left <= 0:
                    return [], 0.0
                pause = max(0.001, (due - now) / 1e6) if due < NEVER else left
                await asyncio.wait([wake.future], timeout=min(left, pause))
            except asyncio.CancelledError:
                if leases:
                    self._give_back(leases, member, number)
                raise
            finally:
                with self._guard:
                    if leases:
                        self._not_repeated.discard((member, number))
                    if wake is not None:
                        self._members_waiting.discard(wake)

    def _repeat(self, now: int, member: str, lease: int, number: int) -> list[RecordLease]:
        """Return what a claim got before, if this is a repeat; the caller holds the guard."""
        repeated = self.state.repeat_claim(now, lease, member, number) if number else []
        if repeated:
            self._not_repeated.discard((member, number))
        return repeated

    def _claim(
        self,
        now: int,
        member: str,
        count: int,
        lease: int,
        number: int,
        answered: int,
        spans: dict[int, tuple[int, int]],
    ) -> list[RecordLease]:
        """Change the state for a claim; the caller holds the guard."""
        if self.state.settings.breaker:
            count = self.breaker.allowed(now, count)
        if not count:
            return []
        leases = self.state.claim(now, count, lease, member, spans)
        if number:
            self.state.number_claim(member, number, answered, leases)
            if leases:
                self._not_repeated.add((member, number))
        self._count_expired(now)
        if self.state.dying:
            self.on_dying()
        return leases

    def _count_expired(self, now: int) -> None:
        """Count leases that have ended for the breaker."""
        count = self._members.failures(self.state.take_expired())
        if count:
            self._count_outcome(now, failed=True, count=count)

    async def stop_waiting(self, member: str, number: int) -> None:
        """Have a claim of a member return without waiting any longer."""
        with self._guard:
            self._check()
            self._stopped.add((member, number))
            self._wake()

    def _forget_stopped(self, member: str, answered: int) -> None:
        with self._guard:
            if self._stopped:
                self._stopped = {
                    claim for claim in self._stopped if claim[0] != member or claim[1] >= answered
                }

    async def leave(self, member: str) -> None:
        """Forget a member, which claims nothing more; its leases stay until they end."""
        with self._guard:
            self._members.left(member)
            self._stopped = {claim for claim in self._stopped if claim[0] != member}

    def _give_back(self, leases: Sequence[RecordLease], member: str, number: int) -> None:
        """Release leases whose claim was cancelled, unless a repeat of the claim has them."""
        with self._guard:
            if number and (member, number) not in self._not_repeated:
                return
            if self.failure is None and not self._closed:
                held = [lease[:3] for lease in leases]
                self.state.release(self.clock.now(), held, 0, unused=True)
                self._enqueue()
                self._wake()

    async def ack(self, leases: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
        """Finish records; return the leases that are lost."""
        with self._guard:
            self._check()
            lost = self.state.ack(_leases(leases))
            written = self._enqueue()
            if len(lost) < len(leases):
                self._count_outcome(self.clock.now(), failed=False, count=len(leases) - len(lost))
            if self.state.settings.ordered_by is not None:
                self._wake()
        await self._durable(written)
        return lost

    async def release(
        self,
        leases: Sequence[Sequence[int]],
        delay: float = 0.0,
        unused: bool = False,
        failed: bool = False,
    ) -> list[tuple[int, int, int]]:
        """Have records delivered again; return the leases that are lost.

        ``failed`` counts for the breaker: a handler has raised.
        """
        with self._guard:
            self._check()
            now = self.clock.now()
            lost = self.state.release(now, _leases(leases), round(delay * 1e6), unused=unused)
            if failed:
                self._count_outcome(now, failed=True, count=len(leases))
            written = self._enqueue()
            self._wake()
        await self._durable(written)
        return lost

    async def extend(
        self, leases: Sequence[Sequence[int]], lease: float
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """Renew leases; return their new end, and those that are lost."""
        with self._guard:
            self._check()
            now = self.clock.now()
            lost = self.state.extend(now, _leases(leases), round(lease * 1e6))
            written = self._enqueue()
        await self._durable(written)
        return now + round(lease * 1e6), lost

    async def reject(self, bucket: int, offset: int, token: int, reason: str) -> None:
        """Move a record to the dead letters; return when it is durable there."""
        with self._guard:
            self._check()
            now = self.clock.now()
            if self.dead_letter_error is not None and len(self.state.dying) >= MOST_DYING:
                raise StorageError(
                    f"{len(self.state.dying)} records of work group {self.group!r} already wait "
                    f"for their dead letters, which cannot be written: {self.dead_letter_error}. "
                    "The record is not rejected and is delivered again after its lease"
                )
            if not self.state.reject(now, bucket, offset, token, reason):
                return
            written = self._enqueue()
            if written is not None:
                self._count_outcome(now, failed=True)
            moved = LoopWaiter()
            self._rejecting.setdefault((bucket, offset), []).append(moved)
            self.on_dying()
        await self._durable(written)
        await moved.future

    async def fail(self, bucket: int, offset: int, token: int, reason: str, delay: float) -> None:
        """Have a record whose handler has raised delivered again after ``delay`` seconds; after its
        last attempt, :meth:`reject` it. The keeper decides: members may know older settings."""
        with self._guard:
            self._check()
            gives_up = self.state.gives_up(bucket, offset, token)
        if gives_up:
            await self.reject(bucket, offset, token, reason)
        elif await self.release([(bucket, offset, token)], delay, failed=True):
            raise lost_lease(bucket, offset)

    async def look(self) -> None:
        """Wait until what was put before this call can be claimed, or for a while at most: a bucket
        that cannot be read must not hold back the others."""
        with self._guard:
            self._check()
            looked = LoopWaiter()
            self._looks.append(looked)
        self.on_look()
        await asyncio.wait([looked.future], timeout=_LOOK_SECONDS)

    def take_looks(self) -> list[LoopWaiter]:
        """Return the calls of :meth:`look` that wait, for :meth:`end_looks`."""
        with self._guard:
            looks, self._looks = self._looks, []
            return looks

    def end_looks(self, looks: Sequence[LoopWaiter]) -> None:
        """Let calls of :meth:`look` return: all buckets were checked since they were taken."""
        _deliver(looks, None)

    async def configure(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Agree on settings; what a member leaves out stays as it is. Returns all of them."""
        with self._guard:
            self._check()
            agreed = agreed_settings(self.state.settings, settings, self.group)
            self.state.configure(agreed)
            written = self._enqueue()
        await self._durable(written)
        return dict(msgspec.to_builtins(agreed)) | {"max_deliveries": agreed.max_deliveries}

    async def release_all(self, member: str | None = None) -> int:
        """Release the leases of a member, or of all members; return how many there were."""
        with self._guard:
            self._check()
            count = self.state.release_member(self.clock.now(), member)
            written = self._enqueue()
            self._wake()
        await self._durable(written)
        return count

    async def redrive(self, letters: Sequence[Sequence[int]]) -> int:
        """Deliver dead records again; see :meth:`GroupState.redrive`."""
        listed = [Letter(*letter) for letter in letters]
        waiter, count = await in_thread(self._redrive, listed, LoopWaiter())
        await self._durable(waiter)
        return count

    def _redrive(self, letters: list[Letter], waiter: LoopWaiter) -> tuple[LoopWaiter | None, int]:
        with self._floors_guard:
            lowest: dict[int, int] = {}
            for letter in letters:
                lowest[letter.bucket] = min(letter.offset, lowest.get(letter.bucket, letter.offset))
            for bucket, offset in lowest.items():
                if bucket not in self._floors:
                    stored = self._storage.read_floor(bucket)
                    self._floors[bucket] = stored.offset, stored.epoch
                floor, epoch = self._floors[bucket]
                if offset < floor:  # retention must not remove it before it is open again
                    self._write_floor(bucket, offset, epoch)
            with self._guard:
                self._check()
                count = self.state.redrive(self.clock.now(), letters)
                written = self._enqueue(waiter)
                self._wake()
        return written, count

    async def undriven(self, letters: Sequence[Sequence[int]]) -> list[int]:
        """Return the numbers of those dead letters that can be re-driven: that was not done yet,
        and no restore has removed their records."""
        with self._guard:
            self._check()
            listed = [Letter(*letter) for letter in letters]
            return [letter.number for letter in listed if self.state.can_redrive(letter)]

    async def stats(self) -> dict[str, Any]:
        """Return the group's numbers."""
        with self._guard:
            self._check()
            return {
                "group": self.group,
                "mode": "work",
                **self._numbers.stats(self.clock.now(), self._status()),
                "journal_bytes": self._storage.size,
            }

    def _count_outcome(self, now: int, *, failed: bool, count: int = 1) -> None:
        if self.state.settings.breaker and self.breaker.outcome(now, failed=failed, count=count):
            if self.breaker.is_open:
                log.warning(
                    "work group %r of %s: most deliveries of the last minute failed; the group "
                    "slows down until one succeeds",
                    self.group,
                    self.place,
                )
            else:
                log.info("work group %r of %s: deliveries succeed again", *self._names)
                self._wake()

    @property
    def _names(self) -> tuple[str, str]:
        return self.group, self.place

    def _wake(self) -> None:
        """Let waiting members try again; the caller holds the guard."""
        if self._members_waiting:
            _deliver(list(self._members_waiting), None)
            self._members_waiting.clear()

    # The feed

    def position(self, bucket: int) -> tuple[int, int]:
        """Return the first offset of a bucket that the group has not seen, and its epoch."""
        with self._guard:
            state = self.state.bucket(bucket)
            return state.next, state.epoch

    def set_span(
        self, bucket: int, start: int, end: int, delays: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Offer the records of a bucket from ``start`` to ``end``.

        ``delays`` has first offset, end and time of all delayed records that were not offered yet.
        """
        with self._guard:
            self.state.bucket(bucket).delays = sorted(delays)
            if self._spans.get(bucket) != (start, end):
                self._spans[bucket] = start, end
                self._wake()

    async def cut(self, bucket: int, start: int, end: int, epoch: int) -> None:
        """Forget what retention or a restore has removed."""
        with self._guard:
            self._check()
            removed = self.state.counts.removed
            self.state.cut(bucket, start, end, epoch)
            removed = self.state.counts.removed - removed
            if removed:
                log.warning(
                    "work group %r of %s: retention has removed %d records of bucket %d that were "
                    "not acknowledged",
                    self.group,
                    self.place,
                    removed,
                    bucket,
                )
            written = self._enqueue()
            gone = [position for position in self._rejecting if position not in self.state.dying]
        await self._durable(written)
        self._end_rejects(
            gone,
            StorageError(
                "the rejected record was removed by a restore or by retention before its dead "
                "letter was written"
            ),
        )

    async def read_ahead(
        self,
        bucket: int,
        first: int,
        now: int,
        dues: list[int],
        keys: list[int],
        priorities: list[int],
    ) -> None:
        """Add records whose fields decide when they are delivered."""
        with self._guard:
            self._check()
            self.state.read_ahead(bucket, first, now, dues, keys, priorities)
            written = self._enqueue()
        await self._durable(written)
        with self._guard:
            self._wake()

    def may_read_ahead(self, bucket: int) -> bool:
        """Whether more records of a bucket should be read ahead: few are left to deliver, or all
        of them wait for others of their keys."""
        with self._guard:
            records, now = self.state.bucket(bucket).records, self.clock.now()
            if len(records) >= MOST_AHEAD:
                return False
            waiting = records.undelivered(now)
            if waiting < WINDOW:
                return True
            if self.state.settings.ordered_by is None or waiting >= _MOST_WINDOWS * WINDOW:
                return False
            return not records.due_offsets(now, 1, by_key=True)[0]

    # Dead letters

    async def next_batch(self, most: int, above: int) -> list[DyingRecord]:
        """Return the records whose dead letters are put next, with rising numbers."""
        with self._guard:
            self._check()
            positions = self.state.next_batch(most, above)
            batch = []
            for bucket, offset in positions:
                records = self.state.bucket(bucket).records
                row = records.find(offset)
                assert row is not None
                dying = self.state.dying[bucket, offset]
                batch.append(
                    DyingRecord(
                        (bucket, offset),
                        dying.reason,
                        dying.time,
                        records.attempts[row],
                        records.first[row],
                        records.last[row],
                        -1 if records.letter is None else records.letter[row] - 1,
                        dying.number,
                        self.state.bucket(bucket).generation,
                    )
                )
            written = self._enqueue()
        await self._durable(written)
        return batch

    async def letters_stored(self, positions: Sequence[Position]) -> None:
        """Finish the records of a batch, whose dead letters are durable."""
        with self._guard:
            self._check()
            self.dead_letter_error = None
            self.state.finish_batch()
            written = self._enqueue()
            self._wake()
        await self._durable(written)
        self._end_rejects(positions, None)

    def letters_failed(self, error: Exception) -> None:
        """Report that dead letters could not be written; the records stay open.

        Members whose records are in later batches are told as well: they would wait for a long
        time.
        """
        with self._guard:
            self.dead_letter_error = str(error)
            positions = list(self._rejecting)
        self._end_rejects(
            positions,
            StorageError(
                f"the dead letter could not be written: {error}. The record stays unacknowledged "
                "in the group, which writes its dead letter as soon as that is possible"
            ),
        )

    def _end_rejects(self, positions: Sequence[Position], error: StorageError | None) -> None:
        with self._guard:
            waiting = [w for p in positions for w in self._rejecting.pop(p, [])]
            _deliver(waiting, error)

    # Floors, and the end

    def end_if_lost(self) -> None:
        """End if another process is known to keep the group."""
        lost = self._storage.lost
        if lost:
            with self._guard:
                self._fail(KeeperEnded(f"another process keeps work group {self.group!r}: {lost}"))

    def write_floors(self) -> None:
        """Store below which offset everything is finished, for retention and tools. Blocking."""
        with self._floors_guard:
            with self._guard:
                floors = {
                    number: (max(bucket.floor, 0), bucket.epoch)
                    for number, bucket in self.state.buckets.items()
                    if number in self._spans
                }
                # A floor must not be ahead of the journal.
                operations = self.state.operations
                durable = self._idle.wait_for(
                    lambda: self._durable_operations >= operations or self.failure is not None,
                    _FLOOR_WAIT_SECONDS,
                )
                if not durable or self.failure is not None:
                    return
            for number, (floor, epoch) in floors.items():
                if self._floors.get(number) != (floor, epoch):
                    self._write_floor(number, floor, epoch)

    def write_status(self) -> None:
        """Note the group's numbers, for tools that do not call the keeper. Blocking."""
        with self._guard:
            if self.failure is not None:
                return
            status = self._status()
        self._storage.write_status(status)

    def _status(self) -> WorkStatus:
        """Return the numbers for tools; the caller holds the guard."""
        now = self.clock.now()
        return self._numbers.status(
            now,
            members=self._members.count(now),
            breaker_open=self.breaker.is_open,
            dead_letter_error=self.dead_letter_error,
        )

    def oldest_offset(self, bucket: int) -> int | None:
        """Return the offset whose arrival :meth:`set_arrival` should be told, None if no record was
        available on arrival."""
        with self._guard:
            return self._numbers.oldest_offset(bucket, self.clock.now())

    def set_arrival(self, bucket: int, offset: int, arrival: int) -> None:
        """Note when a record has arrived, in microseconds of Unix time."""
        with self._guard:
            self._numbers.arrivals[bucket] = offset, arrival

    def _write_floor(self, bucket: int, floor: int, epoch: int) -> None:
        self._storage.write_floor(bucket, floor, epoch)
        self._floors[bucket] = floor, epoch

    def close(self) -> None:
        """Write what is queued, and give the group up; may be called twice. Blocking."""
        if os.getpid() != self._process:
            return
        with self._guard:
            if self._closed:
                return
            self._closed = True
            while self._writing:
                self._idle.wait()
            clean = self.failure is None
        try:
            if clean:
                self.write_floors()
                self.write_status()
        except StorageError as exc:
            log.warning("%s; retention keeps more than it must", exc)
        finally:
            with self._guard:
                if self.failure is None:
                    self.failure = KeeperEnded(f"the keeper of work group {self.group!r} has ended")
                self._fail(self.failure)
            self._storage.close_journal()
            with self._floors_guard:  # one that is being written must not follow the next keeper's
                self._release(clean)

    def _release(self, clean: bool) -> None:
        """Give the group up. A note that cannot be written, as on a full disk, does no harm, and
        must not keep others from being closed."""
        try:
            self._storage.release(clean=clean)
        except StorageError as exc:
            log.warning("%s", exc)


def _deliver(waiters: Sequence[LoopWaiter], error: BaseException | None) -> None:
    by_sink: dict[Any, list[LoopWaiter]] = {}
    for waiter in waiters:
        by_sink.setdefault(waiter.sink, []).append(waiter)
    for sink, group in by_sink.items():
        sink.deliver(group, error)


def _leases(leases: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    return [(lease[0], lease[1], lease[2]) for lease in leases]
