"""The topics that the console is measured with: many small ones and a large one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from persisting.queue import read_queue, write_queue

LARGE = "large"
_ROWS = 100_000
_BUCKETS = 4
_AT_ONCE = 16


async def prepare(storage: Path, topics: int, records: int) -> None:
    """Create the topics that are not there yet."""
    started = time.perf_counter()
    names = [f"topic-{number:05d}" for number in range(topics - 1)]
    missing = [name for name in names if not (storage / name / "topic.json").exists()]
    for first in range(0, len(missing), _AT_ONCE):
        await asyncio.gather(*(_small(storage, n) for n in missing[first : first + _AT_ONCE]))
    if not (storage / LARGE / "topic.json").exists():
        await _large(storage, records)
    print(f"prepared the topics in {time.perf_counter() - started:.0f} s", flush=True)


async def _small(storage: Path, name: str) -> None:
    writer = await write_queue(name, storage_path=str(storage), durable=True, num_buckets=1)
    async with writer:
        await writer.put([{"id": f"{name}-{n}", "n": n, "text": "a short text"} for n in range(20)])
    async with await read_queue(name, storage_path=str(storage), group="readers") as reader:
        await reader.get(limit=10)
        await reader.commit()


async def _large(storage: Path, records: int) -> None:
    writer = await write_queue(
        LARGE, storage_path=str(storage), durable=True, num_buckets=_BUCKETS, backend="persisting"
    )
    words = np.array(["lock", "queue", "agent", "table", "record", "tail", "sync", "lance"])
    random = np.random.default_rng(7)
    async with writer:
        for first in range(0, records, _ROWS):
            numbers = np.arange(first, min(first + _ROWS, records))
            chosen = words[random.integers(0, len(words), (len(numbers), 2))]
            texts = np.char.add(np.char.add(chosen[:, 0], " "), chosen[:, 1])
            table = pa.table(
                {
                    "id": pa.array(numbers).cast(pa.string()),
                    "run": pa.array(numbers // 1000).cast(pa.string()),
                    "n": numbers,
                    "text": pa.array(texts.tolist()),
                }
            )
            await writer.put_arrow(table)
        await writer.flush()
    reader = await read_queue(LARGE, storage_path=str(storage), group="readers")
    async with reader:
        await reader.get(limit=1000)
        await reader.commit()
