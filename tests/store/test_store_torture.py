"""Competing owners of a topic in an object store: the short form of ``--only store``, and the proof
that it would notice a missing part of the protocol. `make test` runs one random round and two
mutations."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.crash.checks import PromiseBroken
from support.object_stores import SeaweedFS
from torture import store
from torture.store_owner import MUTATIONS

pytestmark = pytest.mark.timeout(1800)

NOT_NIGHTLY = {"no fence", "claims deleted"}
DECIDED_PARAMETERS = [
    pytest.param(name, marks=() if name in NOT_NIGHTLY else pytest.mark.nightly)
    for name in sorted(MUTATIONS)
]


def test_every_mutation_has_a_round_that_decides_it() -> None:
    assert set(store.DECIDED) == set(MUTATIONS)


def test_random_round_keeps_acknowledged_records(server: SeaweedFS, tmp_path: Path) -> None:
    """An owner is paused, another takes over, and the first one goes on."""
    tally: Counter[str] = Counter()
    store.run(server, tmp_path, 6, tally, store.random_round)
    assert tally["pause"] == 1
    assert tally["acknowledged"] > 0


@pytest.mark.nightly
def test_owner_that_is_paused_while_another_takes_over_changes_nothing(
    server: SeaweedFS, tmp_path: Path
) -> None:
    tally: Counter[str] = Counter()
    store.run(server, tmp_path, 1, tally, store.paused_owner_flushes_late)
    assert tally["refused"] > 0
    assert tally["flush refused"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_decided_round_passes_with_the_whole_protocol(
    server: SeaweedFS, tmp_path: Path, name: str
) -> None:
    store.run(server, tmp_path, 2, Counter(), store.DECIDED[name])


@pytest.mark.nightly
def test_commit_that_lands_late_is_stored_once(server: SeaweedFS, tmp_path: Path) -> None:
    store.run(server, tmp_path, 4, Counter(), store.commit_lands_late)


@pytest.mark.parametrize("name", DECIDED_PARAMETERS)
def test_decided_round_breaks_without_a_part_of_the_protocol(
    server: SeaweedFS, tmp_path: Path, name: str
) -> None:
    """A round misses it only if the machine is so slow that nothing happens between two steps."""
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        try:
            store.run(server, folder, 3 + attempt, Counter(), store.DECIDED[name], mutation=name)
        except PromiseBroken:
            return
    pytest.fail("no round has noticed what the protocol lacks")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 160, 10))
async def test_ten_rounds_keep_acknowledged_records(seed: int) -> None:
    tally: Counter[str] = Counter()
    await store.torture(seed, 3000, tally, most=10)
    assert tally["rounds"] == 10
