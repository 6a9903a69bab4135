"""What a work group knows: a pure state machine, without a clock, files or threads.

Of every bucket it keeps the first offset that was never delivered, and the open records below it:
what is below and not open is finished, and costs nothing. Every change is an operation, a small
tuple. :meth:`GroupState.apply` is the only code that changes the state, for a call as for a replay
of the journal, so that a replay gives the same state.

Times are whole microseconds that never go back; the caller sees to that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from persisting.errors import StorageError
from persisting.topic.work_status import WorkCounts
from persisting.work.bucket_state import BucketState, delay_run
from persisting.work.group_values import Dying, Letter, Position, RecordLease, Settings, lost_lease
from persisting.work.letter_numbers import has_number, with_numbers
from persisting.work.numbered_claims import NumberedClaims
from persisting.work.open_records import NEVER, OpenRecords
from persisting.work.turns import Turns

Operation: TypeAlias = "tuple[Any, ...]"
FORMAT = 1

MOST_DYING = 1024
"""Records on their way to the dead letters before no further one is sent there."""

_RECENT = 4096
"""Leases whose end is remembered: a call that is repeated after a lost answer succeeds."""

_LEAST_SHARE = 256
"""A claim of at most this many records takes all of them from one bucket, if that has enough: they
are journaled and read together."""

_FEW_MEMBERS = 64

CLAIM, RECLAIM, ACK, RELEASE, EXTEND, READ_AHEAD, DELAY = "c", "r", "a", "w", "x", "h", "y"
NUMBER = "n"
DYING, LETTERS, DEAD, REDRIVE, CUT, SETTINGS = "d", "b", "D", "v", "t", "s"


class _Snapshot(msgspec.Struct):
    format: int
    operations: int
    token: int
    batch: int
    settings: Settings
    counts: WorkCounts
    recent: dict[int, str]
    members: list[str]
    dying: list[tuple[int, int, Dying]]
    redriven: list[tuple[int, int]]
    claims: list[tuple[str, int, int, int]]
    buckets: dict[int, tuple[int, int, int, list[tuple[int, int]], dict[str, bytes]]]
    time: int


class _Claim(NamedTuple):
    """A claim of a member that is being answered."""

    now: int
    wanted: int
    """The number of records at most."""
    lease: int
    member: str
    leases: list[RecordLease]
    """What it gets; filled bucket by bucket."""


class GroupState:
    """The state of one group in all buckets of a topic."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.counts = WorkCounts()
        self.buckets: dict[int, BucketState] = {}
        self.operations = 0
        """How many operations were applied; a replay skips those that a snapshot holds."""
        self.time = 0
        """The latest time of an operation."""
        self.batch = 0
        """The number of the last dead letter; batches have consecutive numbers."""
        self.dying: dict[Position, Dying] = {}
        self.redriven: list[tuple[int, int]] = []
        """The numbers of the dead letters that were re-driven, as ranges."""
        self._token = 0
        """The last token. Tokens are not below the time of their lease, so that a group that was
        recreated or restored from a backup does not give a token out again."""
        self._claims = NumberedClaims()
        self._recent: OrderedDict[int, str] = OrderedDict()
        """How leases have ended: the operation by token, the latest last."""
        self._members: list[str] = [""]
        self._numbers: dict[str, int] = {"": 0}
        self._pending: list[Operation] = []
        self._turns = Turns()
        self._expired: list[tuple[str, int]] = []

    def take_operations(self) -> list[Operation]:
        """Return the operations since the last call, for the journal."""
        pending, self._pending = self._pending, []
        return pending

    def take_expired(self) -> list[tuple[str, int]]:
        """Return the leases whose ends claims have found since the last call: each with its member
        and when it began."""
        expired, self._expired = self._expired, []
        return expired

    def bucket(self, number: int) -> BucketState:
        found = self.buckets.get(number)
        if found is None:
            found = self.buckets[number] = BucketState()
        return found

    # Calls: each checks, then applies operations

    def claim(
        self, now: int, count: int, lease: int, member: str, ends: Mapping[int, tuple[int, int]]
    ) -> list[RecordLease]:
        """Lease up to ``count`` records to a member.

        ``ends`` has the first and the end offset of every bucket: what may be delivered. Records
        that come again precede those that were never delivered.
        """
        leases: list[RecordLease] = []
        claim = _Claim(now, count, lease, member, leases)
        in_turn = self._turns.order(now, member, count, sorted(ends))
        if self.settings.priority is None:
            for number in in_turn:
                self._claim_again(claim, number)
        else:
            self._claim_by_priority(claim, in_turn)
        if self.settings.reads_ahead:
            return leases
        left = len(in_turn)
        for number in in_turn:
            wanted = count - len(leases)
            share = min(wanted, max(_LEAST_SHARE, -(-wanted // left)))
            left -= 1
            if share > 0:
                self._claim_new(claim, number, share, ends[number])
        for number in in_turn:  # what some buckets lack, others may have
            if len(leases) >= count:
                break
            self._claim_new(claim, number, count - len(leases), ends[number])
        return leases

    def number_claim(
        self, member: str, number: int, answered: int, leases: list[RecordLease]
    ) -> None:
        """Remember what a claim got under its number, so that it can be repeated.

        The member has the answers to all its claims below ``answered``: they are forgotten.
        """
        if leases:
            tokens = [lease.token for lease in leases]
            first = min(tokens)
            self._do((NUMBER, member, number, answered, first, max(tokens) - first + 1))

    def repeat_claim(self, now: int, lease: int, member: str, number: int) -> list[RecordLease]:
        """Return what a claim has whose answer was lost, with new leases.

        That is nothing if this is its first time, or if it was cancelled or others got the records
        meanwhile.
        """
        tokens = self._claims.find(member, number)
        if tokens is None:
            return []
        repeated: list[RecordLease] = []
        for bucket_number, bucket in self.buckets.items():
            for row in bucket.records.held_rows(*tokens):
                self._do((EXTEND, bucket_number, bucket.records.offset[row], now + lease))
                repeated.append(self._lease(bucket_number, bucket, row))
        return sorted(repeated, key=lambda leased: leased.token)

    def _claim_new(self, claim: _Claim, number: int, count: int, span: tuple[int, int]) -> None:
        start, end = span
        now, bucket = claim.now, self.bucket(number)
        while count > 0 and (first := max(bucket.next, start)) < end:
            run, due = delay_run(bucket.delays, first, end)
            if due is not None and due > now:
                self._do((DELAY, number, first, run, due))
                continue
            run, token = min(run, count), self._next_token(now)
            ends = now + claim.lease
            self._do((CLAIM, number, first, run, token, now, ends, claim.member))
            claim.leases.extend(
                RecordLease(number, first + i, token + i, 1, now, now, ends, -1, bucket.epoch, end)
                for i in range(run)
            )
            count -= run

    def _claim_again(self, claim: _Claim, number: int) -> None:
        bucket = self.bucket(number)
        while len(claim.leases) < claim.wanted:
            offset = bucket.next_ready(claim.now, self.settings, dying_full=self._dying_full)
            if offset is None:
                return
            self._reclaim(claim, bucket, number, offset)

    def _claim_by_priority(self, claim: _Claim, numbers: list[int]) -> None:
        while len(claim.leases) < claim.wanted:
            best: tuple[int, int, int] | None = None
            for number in numbers:
                bucket = self.bucket(number)
                offset = bucket.next_ready(claim.now, self.settings, dying_full=self._dying_full)
                if offset is None:
                    continue
                bucket.ready.appendleft(offset)
                row, priorities = bucket.records.find(offset), bucket.records.priority
                priority = 0 if priorities is None or row is None else priorities[row]
                if best is None or priority > best[0]:
                    best = priority, number, offset
            if best is None:
                return
            _, number, offset = best
            bucket = self.bucket(number)
            bucket.ready.popleft()
            self._reclaim(claim, bucket, number, offset)

    def _reclaim(self, claim: _Claim, bucket: BucketState, number: int, offset: int) -> None:
        now, records = claim.now, bucket.records
        row = records.find(offset)
        assert row is not None
        if records.token[row]:
            self._expired.append((self._members[records.member[row]], records.last[row]))
        if records.attempts[row] >= self.settings.max_deliveries:
            times = records.attempts[row]
            reason = f"delivered {times} times without an acknowledgement"
            self._do((DYING, number, offset, reason, now, 0))
            return
        token, ends = self._next_token(now), now + claim.lease
        self._do((RECLAIM, number, offset, token, now, ends, claim.member))
        claim.leases.append(self._lease(number, bucket, row))

    @property
    def _dying_full(self) -> bool:
        """Whether no further record is sent to the dead letters, until some of them are written."""
        return len(self.dying) >= MOST_DYING

    def _next_token(self, now: int) -> int:
        return max(self._token + 1, now)

    def _lease(self, number: int, bucket: BucketState, row: int) -> RecordLease:
        records = bucket.records
        return RecordLease(
            number,
            records.offset[row],
            records.token[row],
            records.attempts[row],
            records.first[row],
            records.last[row],
            records.due[row],
            -1 if records.letter is None else records.letter[row] - 1,
            bucket.epoch,
            bucket.next,
        )

    def ack(self, leases: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Finish records for good; each has bucket, offset and token.

        Returns those whose lease is lost: another member has the record, or it is finished.
        """
        lost = []
        for bucket, offset, token in leases:
            if self._holds(bucket, offset, token) is not None:
                self._do((ACK, bucket, offset))
            elif self._recent.get(token) != ACK:
                lost.append((bucket, offset, token))
        return lost

    def release(
        self, now: int, leases: Iterable[tuple[int, int, int]], delay: int, *, unused: bool = False
    ) -> list[tuple[int, int, int]]:
        """Have records delivered again after ``delay``; return those whose lease is lost.

        An ``unused`` delivery never reached the member's code, and does not count.
        """
        lost = []
        for bucket, offset, token in leases:
            if self._holds(bucket, offset, token) is not None:
                self._do((RELEASE, bucket, offset, now + delay, unused))
            elif self._recent.get(token) != RELEASE:
                lost.append((bucket, offset, token))
        return lost

    def extend(
        self, now: int, leases: Iterable[tuple[int, int, int]], lease: int
    ) -> list[tuple[int, int, int]]:
        """Let leases end ``lease`` from now; return those that are lost."""
        lost = []
        for bucket, offset, token in leases:
            if self._holds(bucket, offset, token) is not None:
                self._do((EXTEND, bucket, offset, now + lease))
            else:
                lost.append((bucket, offset, token))
        return lost

    def reject(self, now: int, bucket: int, offset: int, token: int, reason: str) -> bool:
        """Send a record on its way to the dead letters; False if it is already there.

        The call may be repeated. Raises :class:`LeaseLost` if another member has the record.
        """
        if self._holds(bucket, offset, token) is not None:
            self._do((DYING, bucket, offset, reason, now, token))
            return True
        dying = self.dying.get((bucket, offset))
        if dying is not None and dying.token == token:
            return True
        if self._recent.get(token) != DEAD:
            raise lost_lease(bucket, offset)
        return False

    def gives_up(self, bucket: int, offset: int, token: int) -> bool:
        """Whether a record whose handler has failed goes to the dead letters: this was its last
        attempt. A repeated question has the same answer."""
        row = self._holds(bucket, offset, token)
        if row is not None:
            return self.bucket(bucket).records.attempts[row] >= self.settings.max_deliveries
        dying = self.dying.get((bucket, offset))
        return (dying is not None and dying.token == token) or self._recent.get(token) == DEAD

    def next_batch(self, most: int, above: int = 0) -> list[Position]:
        """Return the records whose dead letters are to be put next.

        Their numbers are consecutive; the last one is ``self.batch``. The batch stays the same
        until :meth:`finish_batch`, except for records that a restore or retention removes: its put
        may have to be repeated. A new batch has numbers above ``above``, the last one that the dead
        letters have stored.
        """
        batch = [position for position, dying in self.dying.items() if dying.number]
        if not batch and self.dying:
            batch = sorted(self.dying)[:most]
            self._do((LETTERS, max(self.batch, above) + len(batch), batch))
        return sorted(batch)

    def finish_batch(self) -> None:
        """Finish the records of the batch: their dead letters are durable."""
        if any(dying.number for dying in self.dying.values()):
            self._do((DEAD, self.batch))

    def read_ahead(
        self,
        bucket: int,
        first: int,
        now: int,
        dues: list[int],
        keys: list[int],
        priorities: list[int],
    ) -> None:
        """Add records whose fields decide when they are delivered."""
        if dues:
            self._do((READ_AHEAD, bucket, first, now, dues, keys, priorities))

    def redrive(self, now: int, letters: Sequence[Letter]) -> int:
        """Deliver dead records again; return how many of the letters were not re-driven before."""
        fresh: dict[Position, Operation] = {}
        for letter in letters:
            if self.can_redrive(letter):
                position = letter.bucket, letter.offset
                fresh.setdefault(
                    position, (letter.number, letter.place, *position, letter.key, letter.priority)
                )
        if fresh:
            self._do((REDRIVE, now, list(fresh.values())))
        return len(fresh)

    def can_redrive(self, letter: Letter) -> bool:
        """Whether a dead letter was not re-driven yet, and its record still has its offset."""
        state = self.bucket(letter.bucket)
        return (
            not self.was_redriven(letter.number)
            and letter.offset < state.next
            and state.still_has(letter.offset, letter.generation)
            and state.records.find(letter.offset) is None
        )

    def was_redriven(self, letter: int) -> bool:
        """Whether the dead letter of that number was re-driven."""
        return has_number(self.redriven, letter)

    def cut(self, bucket: int, start: int, end: int, epoch: int) -> None:
        """Forget everything outside of ``start`` to ``end``: retention or a restore removed it."""
        self._do((CUT, bucket, start, end, epoch))

    def configure(self, settings: Settings) -> None:
        if settings != self.settings:
            self._do((SETTINGS, msgspec.to_builtins(settings)))

    def release_member(self, now: int, member: str | None) -> int:
        """Release the leases of a member, or of all; return how many there were."""
        count = 0
        for number, bucket in self.buckets.items():
            for offset, holder in bucket.records.leases():
                if member is None or self._members[holder] == member:
                    self._do((RELEASE, number, offset, now, False))
                    count += 1
        return count

    def resume_leases(self, latest: int, now: int) -> None:
        """Let the leases that had not ended continue from ``now`` with the time that they had left
        at ``latest``, when the last keeper wrote something: its clock may have been another one."""
        for number, bucket in self.buckets.items():
            for offset, _ in bucket.records.leases():
                end = bucket.records.due[_row(bucket.records, offset)]
                if end > latest and (number, offset) not in self.dying:
                    self._do((EXTEND, number, offset, now + end - latest))
        self._saw(now)

    def next_due(self, numbers: Iterable[int]) -> int:
        """Return the earliest time at which a record of some buckets may be delivered again."""
        buckets = [self.bucket(number) for number in numbers]
        waiting = (0 if b.dirty or b.more or b.ready else b.next_due for b in buckets)
        return min(waiting, default=NEVER)

    def oldest(self, number: int, now: int, span: tuple[int, int]) -> tuple[int | None, int | None]:
        """Return the two unacknowledged records of a bucket that may have been available for the
        longest time, like :meth:`OpenRecords.oldest`; ``span`` is what may be delivered."""
        bucket, (start, end) = self.bucket(number), span
        offset, since = bucket.records.oldest(now)
        first = max(bucket.next, start)
        while offset is None and first < end:
            count, due = delay_run(bucket.delays, first, end)
            if due is None:
                offset = first
            elif due <= now:
                since = due if since is None else min(since, due)
            first += count
        return offset, since

    def _holds(self, bucket: int, offset: int, token: int) -> int | None:
        """Return the row of a lease that is still the record's last one."""
        records = self.bucket(bucket).records
        row = records.find(offset)
        if row is None or token <= 0 or records.token[row] != token:
            return None
        return row

    # Operations

    def _do(self, operation: Operation) -> None:
        self.apply(operation)
        self._pending.append(operation)

    def apply(self, operation: Sequence[Any]) -> None:
        """Apply an operation, from a call or from the journal."""
        apply = _APPLY.get(operation[0])
        if apply is None:
            raise StorageError(
                f"the journal of a work group holds the unknown operation {operation[0]!r}; "
                "upgrade persisting"
            )
        apply(self, *operation[1:])
        self.operations += 1

    def _apply_claim(
        self, number: int, first: int, count: int, token: int, now: int, until: int, member: str
    ) -> None:
        bucket = self.bucket(number)
        bucket.records.append_leased(
            first, count, token=token, due=until, now=now, member=self._number(member)
        )
        bucket.next = first + count
        bucket.next_due = min(bucket.next_due, until)
        self._token = token + count - 1
        self._saw(now)
        self.counts.delivered += count

    def _apply_reclaim(
        self, number: int, offset: int, token: int, now: int, until: int, member: str
    ) -> None:
        bucket = self.bucket(number)
        records = bucket.records
        row = _row(records, offset)
        if records.attempts[row]:
            self.counts.redelivered += 1
        if records.token[row]:
            self.counts.expired += 1
        if not records.first[row]:
            records.first[row] = now
        records.attempts[row] += 1
        records.token[row], records.due[row] = token, until
        records.last[row], records.member[row] = now, self._number(member)
        bucket.next_due = min(bucket.next_due, until)
        self._token = token
        self._saw(now)
        self.counts.delivered += 1

    def _apply_number(
        self, member: str, number: int, answered: int, first: int, count: int
    ) -> None:
        self._claims.add(member, number, answered, first, count)

    def _apply_ack(self, number: int, offset: int) -> None:
        bucket = self.bucket(number)
        row = _row(bucket.records, offset)
        self._remember(bucket.records.token[row], ACK)
        self._finish(bucket, row)
        self.counts.acknowledged += 1

    def _remember(self, token: int, end: str) -> None:
        if token > 0:
            self._recent[token] = end
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)

    def _finish(self, bucket: BucketState, row: int) -> None:
        bucket.records.remove(row)
        self._free_key(bucket)

    def _free_key(self, bucket: BucketState) -> None:
        """Note that a lease has ended, so that another record of its key may be deliverable."""
        if self.settings.ordered_by is not None:
            bucket.dirty = True

    def _apply_release(self, number: int, offset: int, due: int, unused: bool) -> None:
        bucket = self.bucket(number)
        records = bucket.records
        row = _row(records, offset)
        self._remember(records.token[row], RELEASE)
        records.token[row], records.due[row] = 0, due
        if unused:
            records.attempts[row] -= 1
            self.counts.delivered -= 1
        else:
            self.counts.released += 1
        bucket.next_due = min(bucket.next_due, due)
        self._free_key(bucket)

    def _apply_extend(self, number: int, offset: int, until: int) -> None:
        bucket = self.bucket(number)
        bucket.records.due[_row(bucket.records, offset)] = until
        bucket.next_due = min(bucket.next_due, until)

    def _apply_dying(self, number: int, offset: int, reason: str, now: int, token: int) -> None:
        bucket = self.bucket(number)
        records = bucket.records
        row = _row(records, offset)
        if records.token[row] and not token:
            self.counts.expired += 1
        records.token[row], records.due[row] = 0, NEVER
        self._free_key(bucket)
        self.dying[number, offset] = Dying(reason, now, token)
        self._saw(now)

    def _apply_letters(self, batch: int, positions: Iterable[Sequence[int]]) -> None:
        self.batch = batch
        listed = [(bucket, offset) for bucket, offset in positions]
        for number, position in enumerate(listed, batch - len(listed) + 1):
            self.dying[position].number = number

    def _apply_dead(self, batch: int) -> None:
        for number, offset in [p for p, dying in self.dying.items() if dying.number]:
            self._remember(self.dying.pop((number, offset)).token, DEAD)
            bucket = self.bucket(number)
            self._finish(bucket, _row(bucket.records, offset))
            self.counts.dead += 1

    def _apply_read_ahead(
        self,
        number: int,
        first: int,
        now: int,
        dues: list[int],
        keys: list[int],
        priorities: list[int],
    ) -> None:
        bucket = self.bucket(number)
        bucket.records.append_read_ahead(first, now, dues, keys, priorities)
        bucket.next = first + len(dues)
        bucket.dirty = True

    def _apply_delay(self, number: int, first: int, count: int, due: int) -> None:
        bucket = self.bucket(number)
        for offset in range(first, first + count):
            bucket.records.append_delayed(offset, due)
        bucket.next = first + count
        bucket.next_due = min(bucket.next_due, due)

    def _apply_redrive(self, now: int, letters: Iterable[Sequence[int]]) -> None:
        by_bucket: dict[int, dict[int, tuple[int, int, int]]] = {}
        numbers = []
        for letter, place, bucket, offset, key, priority in letters:
            by_bucket.setdefault(bucket, {})[offset] = place, key, priority
            numbers.append(letter)
        for number, offsets in by_bucket.items():
            bucket_state = self.bucket(number)
            bucket_state.records.insert(offsets, now)
            bucket_state.ready.clear()
            bucket_state.dirty = True
        self.redriven = with_numbers(self.redriven, numbers)
        self.counts.redriven += len(numbers)
        self._saw(now)

    def _apply_cut(self, number: int, start: int, end: int, epoch: int) -> None:
        bucket = self.bucket(number)
        if end < bucket.next:
            bucket.generation += 1
            while bucket.cuts and bucket.cuts[-1][1] >= end:
                bucket.cuts.pop()
            bucket.cuts.append((bucket.generation, end))
        self.counts.removed += bucket.records.remove_outside(start, end)
        self.counts.removed += max(0, min(start, end) - bucket.next)
        bucket.next = max(start, min(bucket.next, end))
        bucket.epoch = epoch
        bucket.ready.clear()
        bucket.dirty = True
        for position in [p for p in self.dying if p[0] == number]:
            if bucket.records.find(position[1]) is None:
                del self.dying[position]

    def _apply_settings(self, settings: dict[str, Any]) -> None:
        self.settings = msgspec.convert(settings, Settings)

    def _number(self, member: str) -> int:
        number = self._numbers.get(member)
        if number is None:
            number = self._numbers[member] = len(self._members)
            self._members.append(member)
        return number

    def _saw(self, now: int) -> None:
        self.time = max(self.time, now)

    # Snapshots

    def dump(self) -> bytes:
        """Return the whole state, for the first frame of a segment of the journal."""
        self._forget_members()
        self._claims.keep_held([bucket.records.tokens() for bucket in self.buckets.values()])
        return msgspec.msgpack.encode(
            _Snapshot(
                format=FORMAT,
                operations=self.operations,
                token=self._token,
                batch=self.batch,
                settings=self.settings,
                counts=self.counts,
                recent=self._recent,
                members=self._members,
                dying=[(*position, dying) for position, dying in self.dying.items()],
                redriven=self.redriven,
                claims=self._claims.dump(),
                buckets={
                    number: (
                        bucket.next,
                        bucket.epoch,
                        bucket.generation,
                        bucket.cuts,
                        bucket.records.dump(),
                    )
                    for number, bucket in sorted(self.buckets.items())
                    if bucket.next or bucket.epoch or bucket.generation
                },
                time=self.time,
            )
        )

    def _forget_members(self) -> None:
        """Forget the names of members that have no record."""
        used = {0}.union(*(bucket.records.member for bucket in self.buckets.values()))
        if len(self._members) <= 2 * len(used) + _FEW_MEMBERS:
            return
        kept = sorted(used)
        renumbered = {old: new for new, old in enumerate(kept)}
        for bucket in self.buckets.values():
            bucket.records.renumber_members(renumbered)
        self._members = [self._members[old] for old in kept]
        self._numbers = {name: number for number, name in enumerate(self._members)}

    @classmethod
    def load(cls, data: bytes | memoryview) -> GroupState:
        """Return the state of a snapshot."""
        try:
            snapshot = msgspec.msgpack.decode(data, type=_Snapshot)
        except msgspec.DecodeError as exc:
            raise StorageError(
                f"a snapshot of a work group cannot be read ({exc}); upgrade persisting"
            ) from exc
        if snapshot.format > FORMAT:
            raise StorageError(
                f"a snapshot of a work group has format {snapshot.format}, but this version reads "
                f"up to {FORMAT}; upgrade persisting"
            )
        state = cls()
        state.operations, state._token = snapshot.operations, snapshot.token
        state.batch, state.settings, state.counts = (
            snapshot.batch,
            snapshot.settings,
            snapshot.counts,
        )
        state._recent = OrderedDict(snapshot.recent)
        state._members = snapshot.members
        state._numbers = {name: number for number, name in enumerate(snapshot.members)}
        state.dying = {(bucket, offset): dying for bucket, offset, dying in snapshot.dying}
        state.redriven, state.time = snapshot.redriven, snapshot.time
        state._claims = NumberedClaims(snapshot.claims)
        for number, (following, epoch, generation, cuts, columns) in snapshot.buckets.items():
            bucket = state.bucket(number)
            bucket.next, bucket.epoch, bucket.dirty = following, epoch, True
            bucket.generation, bucket.cuts = generation, cuts
            bucket.records = OpenRecords.load(columns)
        return state


def _row(records: OpenRecords, offset: int) -> int:
    row = records.find(offset)
    if row is None:
        raise StorageError(
            f"the journal of a work group changes offset {offset}, which is not open: the journal "
            "is damaged"
        )
    return row


_APPLY: dict[str, Any] = {
    CLAIM: GroupState._apply_claim,
    RECLAIM: GroupState._apply_reclaim,
    NUMBER: GroupState._apply_number,
    ACK: GroupState._apply_ack,
    RELEASE: GroupState._apply_release,
    EXTEND: GroupState._apply_extend,
    READ_AHEAD: GroupState._apply_read_ahead,
    DELAY: GroupState._apply_delay,
    DYING: GroupState._apply_dying,
    LETTERS: GroupState._apply_letters,
    DEAD: GroupState._apply_dead,
    REDRIVE: GroupState._apply_redrive,
    CUT: GroupState._apply_cut,
    SETTINGS: GroupState._apply_settings,
}
