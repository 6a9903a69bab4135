"""How much memory a record in flight takes where its group is kept."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from pathlib import Path
from typing import Any

from corebench.report import Run, Target

from persisting.queue import read_queue, write_queue
from workbench.crowd import SMALL

_CLAIM = 10_000
_MOST_BYTES = 100
_KEEPER = (
    "state.py",
    "bucket_state.py",
    "members.py",
    "open_records.py",
    "keeper.py",
    "journal.py",
    "breaker.py",
)


async def _measure(folder: Path, count: int) -> tuple[float, int]:
    place: dict[str, Any] = {"topic": "t", "storage_path": str(folder)}
    options = {"enable_wal": True, "wal_sync_interval": 0.0}
    writer = await write_queue(**place, backend="persisting", backend_options=options)
    rows = SMALL.rows(_CLAIM)
    for _ in range(0, count, _CLAIM):
        await writer.put(rows)
    reader = await read_queue(**place, group="g", mode="work", lease=3600.0)
    tracemalloc.start()
    before = _allocated()
    for _ in range(0, count, _CLAIM):
        await reader.fetch(_CLAIM, wait=True, timeout=60.0)
    await asyncio.sleep(0.1)  # the last deliveries are this member's, not the keeper's
    after = _allocated()
    tracemalloc.stop()
    stats = await reader.stats()
    await reader.close()
    await writer.close()
    return after - before, int(stats["in_flight"])


def _allocated() -> int:
    """Return the bytes that the modules of the keeper have allocated."""
    gc.collect()
    names = [tracemalloc.Filter(True, f"*/persisting/work/{name}") for name in _KEEPER]
    taken = tracemalloc.take_snapshot().filter_traces(names)
    return sum(trace.size for trace in taken.traces)


def measure(run: Run) -> None:
    """Claim records without acknowledging them."""
    count = max(_CLAIM, min(run.records, 100_000) // _CLAIM * _CLAIM)
    with run.scratch() as folder:
        allocated, in_flight = asyncio.run(_measure(folder, count))
    run.add(
        "memory",
        f"a record in flight, of {in_flight:,}",
        allocated / in_flight,
        "bytes",
        target=Target("value", at_most=_MOST_BYTES),
    )
