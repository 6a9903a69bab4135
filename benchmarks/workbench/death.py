"""How long after the death of a member its records come again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from corebench.report import Run, Target

from persisting.queue import read_queue, write_queue
from workbench.crowd import SMALL, WORKERS

_LEASE = 5.0
_MOST_SECONDS = 1.0
_LEASED = "LEASED\n"


def _place(folder: Path) -> dict[str, Any]:
    return {"topic": "t", "storage_path": str(folder)}


async def _reader(folder: Path) -> Any:
    return await read_queue(**_place(folder), group="g", mode="work", lease=_LEASE)


def _child(folder: Path) -> subprocess.Popen[str]:
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(Path(__file__).parents[1]), *given])
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


async def _measure(folder: Path, *, keeper: bool) -> float:
    """Return how many seconds after lease and death the last record was delivered again.

    The process that is killed keeps the group, or is another one.
    """
    writer = await write_queue(
        **_place(folder),
        backend="persisting",
        backend_options={"enable_wal": True, "wal_sync_interval": 0.0},
    )
    await writer.put(SMALL.rows(WORKERS))
    await writer.close()
    reader = None if keeper else await _reader(folder)
    child = _child(folder)
    try:
        assert child.stdout is not None
        line = await asyncio.to_thread(child.stdout.readline)
        if line != _LEASED:
            raise SystemExit("the member of the benchmark did not start")
        if reader is None:
            reader = await _reader(folder)
    finally:
        child.kill()
        died = time.time()
        child.wait()
    got: dict[tuple[int, int], float] = {}
    while len(got) < WORKERS:
        for delivery in await reader.fetch(WORKERS, wait=True, timeout=60.0):
            got[delivery.bucket, delivery.offset] = time.time()
            await delivery.ack()
    await reader.close()
    return max(got.values()) - died - _LEASE


def measure(run: Run) -> None:
    """Kill a process that has leased records, and wait for them."""
    for keeper in (False, True):
        with run.scratch() as folder:
            late = asyncio.run(_measure(folder, keeper=keeper))
        run.add(
            "death",
            f"{'the keeper' if keeper else 'a member'} dies: its records come again after the "
            "lease and",
            max(0.0, late),
            "s",
            target=Target("value", at_most=_MOST_SECONDS),
        )


async def _lease_and_wait(folder: Path) -> None:
    reader = await _reader(folder)
    leased = await reader.fetch(WORKERS, wait=True, timeout=60.0)
    assert len(leased) == WORKERS
    print(_LEASED, end="", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_lease_and_wait(Path(sys.argv[1])))
