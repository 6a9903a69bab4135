"""A clock that is set back, and a crash: times of arrival never fall."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from persisting.queue import PersistingBackend

HOUR = 3600 * 10**9


def opened(folder: Path) -> PersistingBackend:
    options: dict[str, Any] = {"wal_sync_interval": 0.0, "flush_interval": None}
    return PersistingBackend(0, str(folder), enable_wal=True, **options)


async def test_times_do_not_fall_where_the_log_was_written_by_a_clock_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path / "live")
    await backend.put({"n": 0})
    await backend.flush()
    real = time.time_ns
    with monkeypatch.context() as clock:
        clock.setattr(time, "time_ns", lambda: real() - HOUR)
        for n in (1, 2, 3):
            await backend.put({"n": n})
    shutil.copytree(tmp_path / "live", tmp_path / "crashed", ignore=shutil.ignore_patterns(".lock"))
    moment = (real() - HOUR // 2) // 1000
    assert await backend.offset_at(moment) == 0
    await backend.close()

    recovered = opened(tmp_path / "crashed")
    assert await recovered.offset_at(moment) == 0
    await recovered.flush()
    assert await recovered.offset_at(moment) == 0
    assert (await recovered.verify())["ok"]
    assert [one["n"] for one in await recovered.get()] == [0, 1, 2, 3]
    await recovered.close()
