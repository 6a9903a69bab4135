"""The state of a work group and its journal at their limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.filesystems import QuickFileSystem

from persisting.work import bucket_state, journal
from persisting.work import state as work_state
from persisting.work.group_values import Letter, Settings
from persisting.work.journal import Journal, JournalEntry, replay
from persisting.work.state import GroupState

LEASE = 10
SPANS = {0: (0, 12)}


@pytest.mark.timeout(30)  # a claim that checks the same records repeatedly never returns
@pytest.mark.parametrize("field", ["", "priority", "ordered_by"])
def test_a_claim_ends_while_more_records_than_fit_wait_for_their_dead_letters(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_state, "MOST_DYING", 2)
    monkeypatch.setattr(bucket_state, "_SCAN_ROWS", 4)
    state = GroupState()
    fields = {field: "field"} if field else {}
    state.configure(Settings(max_deliveries=1, **fields))
    if field:
        state.read_ahead(0, 0, 0, [0] * 12, list(range(12)), [0] * 12)
    assert len(state.claim(0, 11, LEASE, "m", SPANS)) == 11
    (delivered,) = state.claim(LEASE, 12, LEASE, "m", SPANS)  # after those that cannot be
    assert (delivered.offset, sorted(state.dying)) == (11, [(0, 0), (0, 1)])
    now, dead = LEASE, 0
    while batch := state.next_batch(2):
        state.finish_batch()
        dead += len(batch)
        now += 1_000_000  # within a second of a dead letter there is room for the next
        assert dead == 12 or state.next_due([0]) <= now
        assert state.claim(now, 12, LEASE, "m", SPANS) == []
    assert (dead, len(state.bucket(0).records)) == (12, 0)


def test_a_snapshot_remembers_that_a_bucket_was_emptied() -> None:
    state = GroupState()
    state.configure(Settings(max_deliveries=1))
    (lease,) = state.claim(0, 1, LEASE, "m", {0: (0, 1)})
    state.reject(0, *lease[:3], "broken")
    assert state.next_batch(1) == [(0, 0)]
    state.finish_batch()
    letter = Letter(1, 0, 0, 0, 0)
    assert state.can_redrive(letter)
    state.cut(0, 0, 0, 0)  # its files were replaced by empty ones
    state = GroupState.load(state.dump())
    (lease,) = state.claim(1, 1, LEASE, "m", {0: (0, 1)})
    assert state.ack([lease[:3]]) == []
    assert not state.can_redrive(letter)  # it would deliver another record, a second time


def test_the_journal_of_finished_records_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 2000)
    state, log = replay(tmp_path, QuickFileSystem())
    written = Journal(log)
    segments, largest, size = 0, 0, 0
    while segments < 12:
        first = state.operations
        leases = state.claim(first, 1, LEASE, "m", {0: (0, 1 << 40)})
        assert state.ack([lease[:3] for lease in leases]) == []
        state._recent.clear()  # the leases that are remembered have a limit of their own
        written.write(JournalEntry(first, state.take_operations(), first, state.dump))
        segments += written.size < size
        size = written.size
        largest = max(largest, size)
    written.close()
    assert largest < 2 * (2000 + 500)  # a segment, and the one before until it is removed
