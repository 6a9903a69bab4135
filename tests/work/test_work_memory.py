"""A record in flight costs at most 100 bytes of memory, and a finished one nothing."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.filesystems import QuickFileSystem
from support.work_places import WorkPlace

from persisting.work import letter_search
from persisting.work.group_storage import FolderGroup, journal_folder
from persisting.work.group_values import Letter, Settings
from persisting.work.journal import replay
from persisting.work.keeper import Keeper
from persisting.work.state import GroupState

RECORDS = 10_000
LEASE = 60_000_000


@pytest.fixture(autouse=True)
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def allocated() -> int:
    """Return the bytes that work groups and their journals hold; not those of other threads."""
    gc.collect()
    ours = [tracemalloc.Filter(True, f"*/persisting/{part}/*") for part in ("work", "wal")]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)


async def test_a_leased_record_costs_at_most_100_bytes_in_the_keeper(tmp_path: Path) -> None:
    keeper = Keeper(FolderGroup(tmp_path, "g", QuickFileSystem()))
    keeper.set_span(0, 0, RECORDS)
    before = allocated()
    for _ in range(RECORDS // 10_000):
        await keeper.claim("m", 10_000, 600.0, 0)
    assert (await keeper.stats())["in_flight"] == RECORDS
    assert (allocated() - before) / RECORDS <= 100
    assert await keeper.release_all() == RECORDS
    while leases := (await keeper.claim("m", 10_000, 600.0, 0))[0]:
        assert await keeper.ack([lease[:3] for lease in leases]) == []
    del leases
    assert (await keeper.stats())["unacknowledged"] == 0
    assert allocated() - before < 2_000_000  # what is remembered of the last leases, not by record
    keeper.close()
    before = allocated()
    state, log = replay(journal_folder(tmp_path, "g"), QuickFileSystem())
    log.close()
    assert allocated() - before < 2_000_000
    assert state.bucket(0).next == RECORDS


def test_a_record_that_was_read_ahead_and_redriven_costs_at_most_100_bytes() -> None:
    state = GroupState()
    state.configure(Settings(max_deliveries=5, ordered_by="key", priority="urgency"))
    spans = {0: (0, RECORDS)}
    before = allocated()
    for first in range(0, RECORDS, 1000):
        many = [0] * 1000
        state.read_ahead(0, first, 0, many, list(range(first, first + 1000)), many)
        state.take_operations()
    leases = state.claim(1, 100, LEASE, "m", spans)
    for number, lease in enumerate(leases):
        state.reject(1, *lease[:3], "broken")
        assert state.next_batch(1) == [lease[:2]]
        state.finish_batch()
        assert state.redrive(2, [Letter(number + 1, number, *lease[:2], 0, number, 1)]) == 1
    state.take_operations()
    del leases
    assert len(state.bucket(0).records) == RECORDS
    assert (allocated() - before) / RECORDS <= 100
    assert state.redriven == [(1, 101)]  # numbers without gaps cost nothing


async def test_redriving_does_not_hold_the_dead_letters_in_memory(
    place: WorkPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letter_search, "_PAGE_ROWS", 10)
    writer = await place.writer(num_buckets=1)
    await writer.put([{"id": number, "text": "x" * 30_000} for number in range(100)])
    member = await place.member("solvers")
    for delivery in await member.fetch(100, wait=True, timeout=60):
        await delivery.reject("broken")
    await member.dead_letters("id = 0")  # opens them
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    assert await member.redrive("dead_letter.reason = 'broken'", dry_run=True) == 100
    assert tracemalloc.get_traced_memory()[1] - before < 2_200_000  # of 3 MB
    assert await member.redrive() == 100
    assert await member.dead_letters() == []
