"""kill -9 at random times of puts, flushes, compaction, retention, tags, restores and indexing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crash.killed_maintenance import kill_owners


async def test_three_owners_killed_during_maintenance_lose_and_duplicate_nothing(
    tmp_path: Path,
) -> None:
    assert await kill_owners(tmp_path / "bucket", 3, seed=1) > 5


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
async def test_two_hundred_owners_killed_during_maintenance_lose_and_duplicate_nothing(
    tmp_path: Path, seed: int
) -> None:
    """Ten buckets with twenty owners each."""
    assert await kill_owners(tmp_path / "bucket", 20, seed=100 + seed) > 100
