"""Workers and keepers of a work group that are killed at random: nothing acknowledged returns,
nothing is lost, and every dead letter is re-driven once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crash.farm_runs import FarmRun


@pytest.mark.asyncio
async def test_killed_workers_lose_nothing_and_repeat_nothing_acknowledged(tmp_path: Path) -> None:
    await FarmRun(tmp_path).acknowledge(records=800, kills=15)


@pytest.mark.asyncio
async def test_dead_letters_survive_kills_and_are_redriven_once(tmp_path: Path) -> None:
    await FarmRun(tmp_path).redrive(records=150, kills=10)


@pytest.mark.nightly
@pytest.mark.asyncio
@pytest.mark.timeout(3600)
async def test_a_thousand_kills_lose_nothing(tmp_path: Path) -> None:
    await FarmRun(tmp_path).acknowledge(records=40_000, kills=1000)


@pytest.mark.nightly
@pytest.mark.asyncio
@pytest.mark.timeout(3600)
async def test_many_dead_letters_are_redriven_once_through_kills(tmp_path: Path) -> None:
    await FarmRun(tmp_path).redrive(records=100_000, kills=40)
