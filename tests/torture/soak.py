"""Run a mixed load for minutes: memory, file descriptors, threads and disk must not grow."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from support.crash.checks import PromiseBroken

from persisting.demo.report_charts import Series, page
from persisting.queue import OffsetOutOfRange, read_queue, write_queue
from torture.records import as_arrow, plain, record

OPTIONS = {
    "enable_wal": True,
    "wal_sync_interval": 0.05,
    "flush_threshold": 500,
    "flush_interval": 0.5,
    "retention_rows": 3000,
    "keep_versions": 2.0,
}
SAMPLES = 48
WARM = 3
"""The first 1/WARM of the samples is warm-up and is ignored."""


class Sample(NamedTuple):
    seconds: float
    memory: float
    """Megabytes."""
    files: int
    threads: int
    disk: float
    """Megabytes."""


ALLOWED = {"memory": 1.15, "files": 1.25, "threads": 1.25, "disk": 1.4}
"""Allowed ratio of the last third to the middle third."""
SLACK = {"memory": 16.0, "files": 12.0, "threads": 6.0, "disk": 6.0}
"""Absolute growth that is always allowed."""


def _sample(started: float, folder: Path) -> Sample:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        time.monotonic() - started,
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        len(os.listdir("/proc/self/fd")),
        threading.active_count() + _native_threads(),
        _size(folder) / 1e6,
    )


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total


async def soak(seed: int, seconds: float, tally: Counter[str], report: str | None) -> None:
    """Run the load for ``seconds``; raise if a resource grows."""
    folder = Path(tempfile.mkdtemp(prefix="torture-soak-"))
    samples: list[Sample] = []
    until = time.monotonic() + seconds
    tasks = [
        asyncio.create_task(work)
        for work in (
            _put(seed, folder, until, tally),
            _consume(folder, until, tally),
            _maintain(seed, folder, until, tally),
            _watch(folder, until, seconds, samples),
        )
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    shutil.rmtree(folder)
    print(table(samples), flush=True)
    if report is not None:
        page(Path(report), "Soak", _facts(seed, seconds, tally), list(_series(samples)))
    if grown := growth(samples):
        raise PromiseBroken(f"seed {seed}: after {seconds:.0f} s {'; '.join(grown)}")


async def _topic(folder: Path) -> Any:
    return await write_queue(
        topic="t",
        storage_path=str(folder),
        num_buckets=2,
        backend="persisting",
        backend_options=OPTIONS,
    )


async def _put(seed: int, folder: Path, until: float, tally: Counter[str]) -> None:
    rng = random.Random(f"soak/{seed}")
    number = 0
    async with await _topic(folder) as writer:
        while time.monotonic() < until:
            count = rng.choice((1, 1, 20, 200))
            records = [plain(record("p", number + n, 0)) for n in range(count)]
            number += count
            if count == 200:
                await writer.put_arrow(as_arrow(records))
            else:
                await writer.put(records)
            tally["records"] += count
            await asyncio.sleep(0.005)


async def _consume(folder: Path, until: float, tally: Counter[str]) -> None:
    """Consume with members that join and leave."""
    while time.monotonic() < until:
        async with await read_queue(
            topic="t", storage_path=str(folder), group="g", wait_for_topic=30
        ) as reader:
            leaves = min(until, time.monotonic() + 3)
            while time.monotonic() < leaves:
                try:
                    tally["consumed"] += len(await reader.get(500, wait=True, timeout=0.2))
                except OffsetOutOfRange:
                    tally["outrun by retention"] += 1
                    await reader.reset()
                await reader.commit()


async def _maintain(seed: int, folder: Path, until: float, tally: Counter[str]) -> None:
    rng = random.Random(f"soak/upkeep/{seed}")
    async with await _topic(folder) as writer:
        await writer.put(plain(record("first", 0, 0)))
        await writer.create_index("n")
        while time.monotonic() < until:
            await asyncio.sleep(0.3)
            action = rng.choice(("compact", "tag", "query", "search", "vector", "verify", "take"))
            tally[action] += 1
            if action == "compact":
                await writer.compact()
            elif action == "tag":
                await writer.tag("now")
            elif action == "query":
                await writer.query("n % 97 = 3")
            elif action == "search":
                await writer.search(text="word3", column="text", k=5)
            elif action == "vector":
                await writer.search(vector=[1.0, 2.0, 1.0, 0.5], k=5)
            elif action == "verify":
                if not (found := await writer.verify())["ok"]:
                    raise PromiseBroken(f"verify: {found}")
            else:
                await writer.lookup("n", rng.randrange(1000))


async def _watch(folder: Path, until: float, seconds: float, samples: list[Sample]) -> None:
    started = time.monotonic()
    while time.monotonic() < until:
        samples.append(await asyncio.to_thread(_sample, started, folder))
        await asyncio.sleep(seconds / SAMPLES)


def growth(samples: list[Sample]) -> list[str]:
    """Describe the resources that grew from the middle third to the last third of the samples."""
    warm = samples[len(samples) // WARM :]
    middle, last = warm[: len(warm) // 2], warm[len(warm) // 2 :]
    found = []
    for name in Sample._fields[1:]:
        before = _median([getattr(sample, name) for sample in middle])
        after = _median([getattr(sample, name) for sample in last])
        if after > max(before * ALLOWED[name], before + SLACK[name]):
            found.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return found


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def table(samples: list[Sample]) -> str:
    lines = [" seconds  memory MB  files  threads  disk MB"]
    for one in samples[:: len(samples) // 12 + 1]:
        lines.append(
            f"{one.seconds:8.0f} {one.memory:10.1f} {one.files:6} {one.threads:8} {one.disk:8.2f}"
        )
    return "\n".join(lines)


def _facts(seed: int, seconds: float, tally: Counter[str]) -> list[tuple[str, str]]:
    facts = [("seed", str(seed)), ("seconds", f"{seconds:.0f}")]
    return facts + [(name, f"{count:,}") for name, count in sorted(tally.items())]


def _series(samples: list[Sample]) -> list[Series]:
    names = [f"{sample.seconds:.0f} s" for sample in samples]
    units = {"memory": "MB", "files": "open", "threads": "", "disk": "MB"}
    return [
        Series(name, units[name], names, [float(getattr(sample, name)) for sample in samples])
        for name in Sample._fields[1:]
    ]
