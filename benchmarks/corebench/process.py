"""Costs of a process: recovery, memory, event-loop stalls, import time."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from corebench import records
from corebench.ingest import FLUSH, PUT
from corebench.report import Run, Target, percentile, rate, stopwatch
from persisting.queue import LanceBackend, PersistingBackend

_NEVER = 1 << 40


def recovery(run: Run) -> None:
    """Measure opening a bucket with all records in its log, as a killed process leaves it."""
    for name, count, size in (
        (f"put_batch({PUT:,})", run.records, PUT),
        ("single puts", max(5_000, run.records // 20), 1),
    ):
        with run.scratch() as folder:
            log = asyncio.run(_leave_log(folder, records.batches(count, size)))
            found = max(_recover(folder, count) for _ in range(run.repeat))
        run.add(
            "recovery",
            f"opening a log of {name}, {log / 1e6:.0f} MB",
            found,
            "rec/s",
            target=Target("value", at_least=700_000) if size == PUT else None,
        )


async def _leave_log(folder: Path, made: list[list[dict[str, Any]]]) -> int:
    backend = _logged(folder / "live")
    for batch in made:
        await (backend.put_batch(batch) if len(batch) > 1 else backend.put(batch[0]))
    size = (await backend.stats())["wal_size"]
    shutil.copytree(folder / "live", folder / "left")
    await backend.close()
    return size


def _recover(folder: Path, count: int) -> float:
    copy = folder / "copy"
    shutil.copytree(folder / "left", copy)
    with stopwatch() as seconds:
        backend = _logged(copy)
    if backend.total_count() != count:
        raise SystemExit(f"recovered {backend.total_count()} of {count} records")
    asyncio.run(backend.close())
    shutil.rmtree(copy)
    return rate(count, seconds())


def _logged(path: Path) -> PersistingBackend:
    return PersistingBackend(
        bucket_id=0,
        storage_path=str(path),
        enable_wal=True,
        flush_threshold=_NEVER,
        flush_interval=None,
        max_wal_size=_NEVER,
        max_buffer_bytes=_NEVER,
    )


def stalls(run: Run) -> None:
    """Measure delays of the event loop during a flush of 100,000 records and a drain."""
    with run.scratch() as folder:
        late = asyncio.run(_late(folder, min(100_000, run.records)))
    run.add(
        "event loop",
        "delay (99.9 %), 100k flush and a drain",
        percentile(late, 0.999) * 1000,
        "ms",
        "the worst",
        max(late) * 1000,
        Target("value", at_most=20),
    )


async def _late(folder: Path, count: int) -> list[float]:
    backend = LanceBackend(bucket_id=0, storage_path=str(folder), flush_threshold=_NEVER)
    for batch in records.batches(count, PUT):
        await backend.put_batch(batch)
    late: list[float] = []
    watch = asyncio.create_task(_watch(late))
    await asyncio.sleep(0.1)
    late.clear()
    await asyncio.gather(backend.flush(), _drain(backend))
    await _drain(backend)
    watch.cancel()
    await backend.close()
    return late


async def _watch(late: list[float]) -> None:
    while True:
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - due)


async def _drain(backend: Any) -> None:
    async for _ in backend.get_stream():
        pass


def memory(run: Run) -> None:
    """Measure resident memory beyond the imports while five times the records go in and out."""
    count = 5 * run.records
    with run.scratch() as folder:
        peak = _child(_MEMORY, str(folder), str(count), str(PUT), str(FLUSH))
    run.add(
        "memory",
        f"{count:,} records in and out",
        float(peak),
        "MB",
        target=Target("value", at_most=500),
    )


_MEMORY = """
import asyncio, sys
from itertools import islice
from pathlib import Path
import lance, pyarrow
from corebench import records
from persisting.queue import LanceBackend
folder, count, put, flush = sys.argv[1], *map(int, sys.argv[2:])
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
before = peak()
async def main():
    async with LanceBackend(bucket_id=0, storage_path=folder, flush_threshold=flush) as backend:
        source = records.stream(count)
        while batch := list(islice(source, put)):
            await backend.put_batch(batch)
        await backend.flush()
        found = 0
        async for _ in backend.get_stream():
            found += 1
        assert found == count, found
asyncio.run(main())
print(peak() - before)
"""


def import_time(run: Run) -> None:
    """Measure what ``import persisting`` adds to the start of the interpreter."""
    bare = min(_seconds("pass") for _ in range(7))
    ours = min(_seconds("import persisting") for _ in range(7))
    run.add(
        "import",
        "import persisting, beyond the interpreter",
        (ours - bare) * 1000,
        "ms",
        target=Target("value", at_most=350),
    )


def _seconds(code: str) -> float:
    with stopwatch() as seconds:
        _child(code)
    return seconds()


def _child(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=Path(__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()
