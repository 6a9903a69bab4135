"""Runs of a farm of workers that are killed at random, and what must hold after them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from persisting.queue import read_queue
from support import TESTS

PROGRAM = TESTS / "support" / "crash" / "work_farm.py"


def check_events(path: Path, records: int) -> Counter[int]:
    """Check the events of a farm; return how many times each record was acknowledged."""
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


class FarmRun:
    """A farm whose topic is in a folder or in an object store."""

    def __init__(self, folder: Path, **where: Any) -> None:
        """``folder`` is for the events of the farm, and for the topic unless ``where`` says
        otherwise."""
        self._folder, self._where = folder, {"storage_path": str(folder), **where}

    def _run(self, records: int, kills: int, tasks: str) -> None:
        numbers = map(str, (records, 4, kills, 1))
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(self._folder), *numbers, tasks],
            env={**os.environ, "FARM_WHERE": json.dumps(self._where)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stderr[-20_000:]}"
        for task in tasks.split(","):
            assert f"{task}: {kills // len(tasks.split(','))} kills" in done.stdout

    async def _member(self) -> Any:
        return await read_queue("tasks", **self._where, group="farm", mode="work")

    async def _check_finished(self) -> None:
        async with await self._member() as reader:
            assert (await reader.stats())["unacknowledged"] == 0

    async def acknowledge(self, records: int, kills: int) -> None:
        """Acknowledge every record; nothing is lost, and nothing acknowledged returns."""
        self._run(records, kills, "acknowledge")
        times = check_events(self._folder / "events-acknowledge", records)
        assert max(times.values()) == 1
        await self._check_finished()

    async def redrive(self, records: int, kills: int) -> None:
        """Reject every record and re-drive it: each has one dead letter."""
        self._run(records, kills, "reject,redrive")
        check_events(self._folder / "events-reject", records)
        async with await read_queue("tasks.dead", **self._where) as letters:
            stored = Counter(letter["id"] for letter in await letters.get(None))
        assert stored == Counter(range(records)), "dead letters were lost or stored twice"
        check_events(self._folder / "events-redrive", records)
        await self._check_finished()
        async with await self._member() as reader:
            assert await reader.dead_letters() == []
            assert (await reader.stats())["redriven"] == records
