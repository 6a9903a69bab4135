"""kill -9 at random times: exactly the acknowledged records survive, once and in order."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crash.killed_writers import kill_writers


async def test_ten_killed_writers_lose_and_duplicate_nothing(tmp_path: Path) -> None:
    assert await kill_writers(tmp_path / "bucket", 10, seed=1) > 100


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
async def test_a_hundred_killed_writers_lose_and_duplicate_nothing(
    tmp_path: Path, seed: int
) -> None:
    """Five buckets with twenty writers each."""
    assert await kill_writers(tmp_path / "bucket", 20, seed=100 + seed) > 100
