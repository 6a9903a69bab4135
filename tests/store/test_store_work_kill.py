"""Workers and keepers of a work group in an object store that are killed at random."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crash.farm_runs import FarmRun
from support.object_stores import SeaweedFS, url


@pytest.fixture
def farm(tmp_path: Path, server: SeaweedFS, prefix: str) -> FarmRun:
    return FarmRun(tmp_path, storage_path=url(prefix), storage_options=server.options())


async def test_killed_workers_lose_nothing_and_repeat_nothing_acknowledged(farm: FarmRun) -> None:
    await farm.acknowledge(records=120, kills=3)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_a_hundred_kills_lose_nothing(farm: FarmRun) -> None:
    await farm.acknowledge(records=4000, kills=100)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_many_dead_letters_are_redriven_once_through_kills(farm: FarmRun) -> None:
    await farm.redrive(records=2000, kills=30)
