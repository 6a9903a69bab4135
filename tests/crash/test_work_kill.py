"""Workers and keepers of a work group that are killed at random: nothing acknowledged returns,
nothing is lost, and every dead letter is re-driven once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import TESTS

from persisting.queue import read_queue

PROGRAM = TESTS / "support" / "crash" / "work_farm.py"


def farm(folder: Path, records: int, kills: int, tasks: str, seed: int = 1) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *map(str, (records, 4, kills, seed)), tasks],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stderr[-20_000:]}"
    for task in tasks.split(","):
        assert f"{task}: {kills // len(tasks.split(','))} kills" in done.stdout


def check_events(path: Path, records: int) -> Counter[int]:
    """Check the events of a farm; return how often each record was acknowledged."""
    acknowledged: dict[int, int] = {}
    delivered: dict[int, list[int]] = {}
    times: Counter[int] = Counter()
    for line in path.read_text().splitlines():
        kind, number, token = line[0], *map(int, line[2:].split())
        if kind == "d":
            delivered.setdefault(number, []).append(token)
        else:
            acknowledged[number] = token
            times[number] += 1
    assert set(delivered) == set(range(records)), "records were lost"
    for number, token in acknowledged.items():
        later = [other for other in delivered[number] if other > token]
        assert not later, f"record {number} was delivered again after it was acknowledged"
    return times


async def unacknowledged(folder: Path) -> int:
    reader = await read_queue("tasks", storage_path=str(folder), group="farm", mode="work")
    stats = await reader.stats()
    await reader.close()
    return int(stats["unacknowledged"])


async def run_farm(folder: Path, records: int, kills: int) -> None:
    farm(folder, records, kills, "acknowledge")
    times = check_events(folder / "events-acknowledge", records)
    assert max(times.values()) == 1
    assert await unacknowledged(folder) == 0


async def run_dead_letters(folder: Path, records: int, kills: int) -> None:
    farm(folder, records, kills, "reject,redrive")
    check_events(folder / "events-reject", records)
    letters = await read_queue("tasks.dead", storage_path=str(folder))
    stored = Counter(letter["id"] for letter in await letters.get(None))
    await letters.close()
    assert stored == Counter(range(records)), "dead letters were lost or stored twice"
    check_events(folder / "events-redrive", records)
    assert await unacknowledged(folder) == 0
    reader = await read_queue("tasks", storage_path=str(folder), group="farm", mode="work")
    assert await reader.dead_letters() == []
    assert (await reader.stats())["redriven"] == records
    await reader.close()


@pytest.mark.asyncio
async def test_killed_workers_lose_nothing_and_repeat_nothing_acknowledged(tmp_path: Path) -> None:
    await run_farm(tmp_path, records=800, kills=15)


@pytest.mark.asyncio
async def test_dead_letters_survive_kills_and_are_redriven_once(tmp_path: Path) -> None:
    await run_dead_letters(tmp_path, records=150, kills=10)


@pytest.mark.nightly
@pytest.mark.asyncio
@pytest.mark.timeout(3600)
async def test_a_thousand_kills_lose_nothing(tmp_path: Path) -> None:
    await run_farm(tmp_path, records=40_000, kills=1000)


@pytest.mark.nightly
@pytest.mark.asyncio
@pytest.mark.timeout(3600)
async def test_many_dead_letters_are_redriven_once_through_kills(tmp_path: Path) -> None:
    await run_dead_letters(tmp_path, records=100_000, kills=40)
