"""Work groups that read ahead, against a model: keys one at a time, and higher priorities first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from persisting.work import bucket_state
from persisting.work.group_values import Letter, Settings
from persisting.work.state import GroupState

LEASE = 10
SPANS = {0: (0, 0)}
"""New records come through ``read_ahead``, so the span of the bucket does not matter."""


@dataclass
class Record:
    key: int
    priority: int
    due: int
    token: int = 0
    dying: bool = False
    finished: bool = False


class OrderedGroup(RuleBasedStateMachine):
    """Records of few keys with priorities; members claim, finish, release and reject them."""

    @initialize(ordered=st.booleans(), priority=st.booleans())
    def create(self, ordered: bool, priority: bool) -> None:
        self.ordered, self.priority = ordered, priority
        self.state = GroupState()
        self.state.configure(
            Settings(
                max_deliveries=1_000_000,
                ordered_by="key" if ordered else None,
                priority="urgency" if priority or not ordered else None,
            )
        )
        self.journal: list[tuple] = []
        self.now = 100
        self.records: list[Record] = []
        self.letters: dict[int, int] = {}
        """The offsets of the dead letters that were not re-driven, by number."""

    @rule(data=st.data(), count=st.integers(1, 4))
    def put(self, data: st.DataObject, count: int) -> None:
        fields = data.draw(
            st.lists(
                st.tuples(st.integers(1, 3), st.integers(0, 2), st.sampled_from([0, 0, 5])),
                min_size=count,
                max_size=count,
            )
        )
        first = len(self.records)
        self.records += [Record(key, order, self.now + delay) for key, order, delay in fields]
        added = self.records[first:]
        self.state.read_ahead(
            0,
            first,
            self.now,
            [record.due for record in added],
            [record.key if self.ordered else first + n for n, record in enumerate(added)],
            [record.priority for record in added],
        )

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    def deliverable(self) -> list[int]:
        """Return the offsets that may be delivered now, the best first."""
        unfinished = [o for o, record in enumerate(self.records) if not record.finished]
        if self.ordered:
            leased = {r.key for r in self.records if self.is_leased(r)}
            firsts: dict[int, int] = {}
            for offset in unfinished:
                firsts.setdefault(self.records[offset].key, offset)
            unfinished = [o for key, o in firsts.items() if key not in leased]
        ready = [
            o for o in unfinished if self.records[o].due <= self.now and not self.records[o].dying
        ]
        return sorted(ready, key=lambda o: (-self.records[o].priority, o))

    def is_leased(self, record: Record) -> bool:
        return record.token > 0 and record.due > self.now and not record.finished

    @rule(count=st.integers(1, 5))
    def claim(self, count: int) -> None:
        expected = self.deliverable()
        leases = self.state.claim(self.now, count, LEASE, "m", SPANS)
        offsets = [lease.offset for lease in leases]
        assert len(offsets) == min(count, len(expected))
        if self.state.settings.priority is not None:
            assert offsets == expected[:count]
        else:
            assert set(offsets) <= set(expected)
        for lease in leases:
            record = self.records[lease.offset]
            record.token, record.due = lease.token, self.now + LEASE

    def leases(self) -> list[tuple[int, int, int]]:
        return [
            (0, o, record.token)
            for o, record in enumerate(self.records)
            if record.token and not record.dying and not record.finished
        ]

    @precondition(lambda self: self.leases())
    @rule(data=st.data(), delay=st.sampled_from([0, 3]), how=st.sampled_from("arx"))
    def end_lease(self, data: st.DataObject, delay: int, how: str) -> None:
        lease = data.draw(st.sampled_from(self.leases()))
        record = self.records[lease[1]]
        if how == "a":
            assert self.state.ack([lease]) == []
            record.finished = True
        elif how == "r":
            assert self.state.release(self.now, [lease], delay) == []
            record.token, record.due = 0, self.now + delay
        else:
            assert self.state.reject(self.now, *lease, "broken")
            record.token, record.dying = 0, True

    @rule()
    def put_letters(self) -> None:
        batch = self.state.next_batch(10)
        self.state.finish_batch()
        for number, (_, offset) in enumerate(batch, self.state.batch - len(batch) + 1):
            self.records[offset].finished = True
            self.letters[number] = offset

    @precondition(lambda self: self.letters)
    @rule(data=st.data())
    def redrive(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.letters)))
        offset = self.letters.pop(number)
        record = self.records[offset]
        key = record.key if self.ordered else offset
        letter = Letter(number, number, 0, offset, 0, key, record.priority)
        assert self.state.redrive(self.now, [letter]) == 1
        self.records[offset] = Record(record.key, record.priority, self.now)

    @rule()
    def die_and_replay(self) -> None:
        self.journal += self.state.take_operations()
        state = GroupState()
        for operation in self.journal:
            state.apply(operation)
        self.state = state

    @invariant()
    def one_record_of_a_key_is_leased(self) -> None:
        if hasattr(self, "state") and self.ordered:
            keys = [record.key for record in self.records if self.is_leased(record)]
            assert len(set(keys)) == len(keys)


OrderedGroup.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestOrderedGroup = OrderedGroup.TestCase


@pytest.mark.nightly
def test_ordered_groups_agree_with_their_model_over_many_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With scans that leave records out, as those of many records do."""
    monkeypatch.setattr(bucket_state, "_SCAN_ROWS", 2)
    many = settings(max_examples=600, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(OrderedGroup, settings=many)
