"""Arrival times never decrease, even if the clock is set back before a crash."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from support.children import python

from persisting.queue import PersistingBackend

HOUR = 3600 * 10**9


def opened(folder: Path) -> PersistingBackend:
    options: dict[str, Any] = {"wal_sync_interval": 0.0, "flush_interval": None}
    return PersistingBackend(0, str(folder), enable_wal=True, **options)


@pytest.mark.parametrize("flushed", [True, False])
async def test_arrival_times_stay_monotonic_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    backend = opened(tmp_path / "live")
    await backend.put({"n": 0})
    if flushed:
        await backend.flush()
    real = time.time_ns
    with monkeypatch.context() as clock:
        clock.setattr(time, "time_ns", lambda: real() - HOUR)
        for n in (1, 2):
            await backend.put({"n": n})
        await backend.put({"n": 3, "new": n})  # a new schema, so it is recovered in its own chunk
    shutil.copytree(tmp_path / "live", tmp_path / "crashed", ignore=shutil.ignore_patterns(".lock"))
    timestamp = (real() - HOUR // 2) // 1000
    assert await backend.offset_at(timestamp) == 0
    await backend.close()

    recovered = opened(tmp_path / "crashed")
    assert await recovered.offset_at(timestamp) == 0
    await recovered.flush()
    assert await recovered.offset_at(timestamp) == 0
    assert (await recovered.verify())["ok"]
    assert [record["n"] for record in await recovered.get()] == [0, 1, 2, 3]
    await recovered.close()


FAILING = """
import asyncio, sys
from persisting.queue import InvalidArgument, PersistingBackend

async def main():
    try:
        PersistingBackend(0, sys.argv[1], enable_wal=True, schema_defaults={"n": "text"})
    except InvalidArgument as exc:
        kept.append(exc)
    backend = PersistingBackend(0, sys.argv[1], enable_wal=True)
    await backend.put({"n": 2})
    await backend.close()

kept = []
asyncio.run(main())
"""


async def test_failed_open_writes_nothing_when_its_process_exits(tmp_path: Path) -> None:
    backend = opened(tmp_path / "live")
    for n in (0, 1):
        await backend.put({"n": n})
    ignored = shutil.ignore_patterns(".lock")
    shutil.copytree(tmp_path / "live", tmp_path / "crashed", ignore=ignored)
    await backend.close()
    with python(FAILING, tmp_path / "crashed") as child:
        _, complaints = child.communicate(timeout=60)
        assert (child.returncode, complaints) == (0, "")
    async with opened(tmp_path / "crashed") as backend:
        assert [record["n"] for record in await backend.get()] == [0, 1, 2]
        assert (await backend.verify())["ok"]
