"""The state of a work group against a model that is too simple to be wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from persisting.errors import LeaseLost
from persisting.work.group_values import Letter, Settings
from persisting.work.state import GroupState

BUCKETS = 2
LEASE = 10


@dataclass
class Open:
    token: int
    attempts: int
    due: int


class WorkGroup(RuleBasedStateMachine):
    """Members claim, acknowledge, release, extend, reject; keepers die and replay."""

    @initialize(most=st.integers(1, 3))
    def create(self, most: int) -> None:
        self.state = GroupState()
        self.state.configure(Settings(max_deliveries=most))
        self.most = most
        self.snapshot: bytes | None = None
        self.journal: list[tuple] = []
        self.now = 100
        self.ends = dict.fromkeys(range(BUCKETS), 0)
        self.starts = dict.fromkeys(range(BUCKETS), 0)
        self.open: dict[tuple[int, int], Open] = {}
        self.dying: set[tuple[int, int]] = set()
        self.finished: set[tuple[int, int]] = set()
        self.letters: list[tuple[int, int, int]] = []
        self.redriven: set[int] = set()
        self.restored: set[int] = set()
        """The letters whose records a restore has removed."""
        self.rejected: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.stored = 0
        self.delayed: dict[tuple[int, int], int] = {}
        self.tokens: list[tuple[int, int, int]] = []
        self.used_tokens: set[int] = set()
        self.ended: dict[tuple[int, int, int], str] = {}
        self.claims: dict[str, tuple[int, list[tuple[int, int, int]]]] = {}
        """By member, the number of the last claim that got records, and what it got."""

    @rule(bucket=st.integers(0, BUCKETS - 1), count=st.integers(1, 5))
    def put(self, bucket: int, count: int) -> None:
        self.ends[bucket] += count

    @rule(bucket=st.integers(0, BUCKETS - 1), count=st.integers(1, 3), delay=st.integers(1, 30))
    def put_later(self, bucket: int, count: int, delay: int) -> None:
        for offset in range(self.ends[bucket], self.ends[bucket] + count):
            self.delayed[bucket, offset] = self.now + delay
        self.ends[bucket] += count
        self.give_delays()

    def give_delays(self) -> None:
        """Give the state the delays, as the feed does; a few of them have passed."""
        for number in range(BUCKETS):
            self.state.bucket(number).delays = sorted(
                (offset, offset + 1, due)
                for (bucket, offset), due in self.delayed.items()
                if bucket == number
            )

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 6), member=st.sampled_from("ab"))
    def claim(self, count: int, member: str) -> None:
        spans = {b: (self.starts[b], end) for b, end in self.ends.items()}
        due = {p for p, r in self.open.items() if r.due <= self.now and p not in self.dying}
        exhausted = {p for p in due if self.open[p].attempts >= self.most}
        unseen = {
            (b, o)
            for b, (start, end) in spans.items()
            for o in range(start, end)
            if (b, o) not in self.open and (b, o) not in self.finished
            if self.delayed.get((b, o), 0) <= self.now
        }
        leases = self.state.claim(self.now, count, LEASE, member, spans)
        if leases:
            number = self.claims.get(member, (0, []))[0] + 1
            self.state.number_claim(member, number, number, leases)
            self.claims[member] = number, [lease[:3] for lease in leases]
        positions = [(lease.bucket, lease.offset) for lease in leases]
        assert len(set(positions)) == len(positions)
        assert set(positions) <= (due - exhausted) | unseen
        assert len(leases) == min(count, len(due - exhausted) + len(unseen))
        if set(positions) & unseen:
            assert due - exhausted <= set(positions)  # what comes again precedes what is new
        for bucket in self.ends:
            new = sorted(o for b, o in set(positions) & unseen if b == bucket)
            waiting = sorted(o for b, o in unseen if b == bucket)
            assert new == waiting[: len(new)]
        for lease in leases:
            position = lease.bucket, lease.offset
            before = self.open.get(position)
            assert lease.attempt == (before.attempts if before else 0) + 1
            assert lease.token not in self.used_tokens
            self.used_tokens.add(lease.token)
            self.open[position] = Open(lease.token, lease.attempt, self.now + LEASE)
            self.tokens.append((*position, lease.token))
        for position, due_time in self.delayed.items():
            passed = position[1] < self.state.bucket(position[0]).next
            if passed and position not in self.open and position not in self.finished:
                self.open[position] = Open(0, 0, due_time)
        self.dying |= set(self.state.dying) & exhausted
        assert set(self.state.dying) == self.dying

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def repeat_claim(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.claims)))
        number, leases = self.claims[member]
        held = [lease for lease in leases if self.holds(lease)]
        repeated = self.state.repeat_claim(self.now, LEASE, member, number)
        assert [lease[:3] for lease in repeated] == held
        for lease in repeated:
            assert lease.attempt == self.open[lease[:2]].attempts
            self.open[lease[:2]].due = self.now + LEASE
        assert self.state.repeat_claim(self.now, LEASE, member, number - 1) == []

    def holds(self, lease: tuple[int, int, int]) -> bool:
        record = self.open.get(lease[:2])
        return record is not None and record.token == lease[2] and lease[:2] not in self.dying

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.tokens))
        held = self.holds(lease)
        lost = self.state.ack([lease])
        if held:
            assert lost == []
            del self.open[lease[:2]]
            self.finished.add(lease[:2])
            self.ended[lease] = "ack"
        else:
            assert lost == ([] if self.ended.get(lease) == "ack" else [lease])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), delay=st.integers(0, 10), unused=st.booleans())
    def release(self, data: st.DataObject, delay: int, unused: bool) -> None:
        lease = data.draw(st.sampled_from(self.tokens))
        held = self.holds(lease)
        repeated = self.ended.get(lease) == "release"
        assert self.state.release(self.now, [lease], delay, unused=unused) == (
            [] if held or repeated else [lease]
        )
        if held:
            self.ended[lease] = "release"
            record = self.open[lease[:2]]
            self.open[lease[:2]] = Open(0, record.attempts - unused, self.now + delay)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.tokens))
        held = self.holds(lease)
        assert self.state.extend(self.now, [lease], 20) == ([] if held else [lease])
        if held:
            self.open[lease[:2]].due = self.now + 20

    @precondition(lambda self: any(self.holds(lease) for lease in self.tokens))
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([t for t in self.tokens if self.holds(t)]))
        assert self.state.reject(self.now, *lease, "broken")
        assert self.state.reject(self.now, *lease, "repeated")
        self.dying.add(lease[:2])
        self.rejected[lease[:2]] = lease

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def reject_late(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.tokens))
        if self.holds(lease) or self.rejected.get(lease[:2]) == lease:
            return
        if self.ended.get(lease) == "dead":
            assert not self.state.reject(self.now, *lease, "repeated")
        else:
            with pytest.raises(LeaseLost):
                self.state.reject(self.now, *lease, "late")

    @rule(most=st.integers(1, 3), stored=st.booleans())
    def put_letters(self, most: int, stored: bool) -> None:
        batch = self.state.next_batch(most, self.stored)
        assert self.state.next_batch(most, self.stored) == batch
        assert set(batch) <= self.dying
        assert bool(batch) == bool(self.dying)
        if stored:
            self.state.finish_batch()
            assert self.state.batch - len(batch) == self.stored or not batch
            self.stored = self.state.batch
            for position in batch:
                self.dying.discard(position)
                del self.open[position]
                self.finished.add(position)
                self.letters.append((*position, self.state.bucket(position[0]).generation))
                if position in self.rejected:
                    self.ended[self.rejected.pop(position)] = "dead"

    @precondition(lambda self: self.letters)
    @rule(data=st.data())
    def redrive(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.integers(0, len(self.letters) - 1), min_size=1))
        by_position = {self.letters[letter]: letter for letter in chosen - self.redriven}
        expected = {p[:2]: n for p, n in by_position.items() if p[:2] not in self.open}
        expected = {p: n for p, n in expected.items() if n not in self.restored}
        letters = [Letter(n, n, *p) for p, n in by_position.items()]
        letters += [Letter(n, n, *self.letters[n]) for n in chosen & self.redriven]
        assert self.state.redrive(self.now, letters) == len(expected)
        for position, letter in expected.items():
            self.redriven.add(letter)
            self.finished.discard(position)
            self.open[position] = Open(0, 0, self.now)

    @rule(bucket=st.integers(0, BUCKETS - 1), data=st.data())
    def restore(self, bucket: int, data: st.DataObject) -> None:
        end = data.draw(st.integers(self.starts[bucket], self.ends[bucket]))
        self.ends[bucket] = end
        self.state.cut(bucket, self.starts[bucket], end, self.state.bucket(bucket).epoch + 1)
        gone = {p for p in (*self.open, *self.finished) if p[0] == bucket and p[1] >= end}
        for position in gone:
            self.open.pop(position, None)
            self.finished.discard(position)
            self.dying.discard(position)
            self.rejected.pop(position, None)
        for position in [p for p in self.delayed if p[0] == bucket and p[1] >= end]:
            del self.delayed[position]
        self.give_delays()
        self.restored |= {n for n, p in enumerate(self.letters) if p[:2] in gone}

    @rule(snapshot=st.booleans())
    def die_and_replay(self, snapshot: bool) -> None:
        self.journal += self.state.take_operations()
        if snapshot:
            self.snapshot = self.state.dump()
        state = GroupState.load(self.snapshot) if self.snapshot else GroupState()
        for operation in self.journal[state.operations :]:
            state.apply(operation)
        assert state.dump() == self.state.dump()
        self.state = state
        self.give_delays()

    @invariant()
    def open_records_agree(self) -> None:
        if not hasattr(self, "state"):
            return
        for number, bucket in self.state.buckets.items():
            expected = sorted(o for b, o in self.open if b == number)
            assert len(bucket.records) == len(expected)
            if expected:
                assert bucket.floor == expected[0]


WorkGroup.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestWorkGroup = WorkGroup.TestCase
