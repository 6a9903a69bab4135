"""Topics with known rows, for tests of training data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from persisting.queue import write_queue


def record(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "text": f"row {number}",
        "score": number / 2,
        "group": number % 7,
        "vector": [float(number), float(number + 1), 0.5],
    }


def make_topic(
    storage: Path,
    rows: int,
    *,
    name: str = "rows",
    buckets: int = 3,
    tag: str | None = "v1",
    record: Callable[[int], dict[str, Any]] = record,
) -> Path:
    """Create a topic of ``rows`` records with ids from 0, tag it, and return its folder."""
    asyncio.run(_put(storage, name, range(rows), buckets, tag, record))
    return storage / name


def add_rows(folder: Path, numbers: range, *, tag: str | None = None) -> None:
    """Put further records into a topic, and tag it."""
    asyncio.run(_put(folder.parent, folder.name, numbers, None, tag))


async def _put(
    storage: Path,
    name: str,
    numbers: range,
    buckets: int | None,
    tag: str | None,
    record: Callable[[int], dict[str, Any]] = record,
) -> None:
    options = {"vector_type": "float32", "flush_interval": None}
    async with await write_queue(
        topic=name,
        storage_path=str(storage),
        num_buckets=buckets,
        backend="persisting",
        backend_options=options,
    ) as writer:
        for start in range(numbers.start, numbers.stop, 5000):
            part = range(start, min(start + 5000, numbers.stop))
            await writer.put([record(number) for number in part])
        await writer.flush()
        if tag is not None:
            await writer.tag(tag)


def ids(batches: Any) -> list[int]:
    """Return the field ``id`` of all rows of Arrow batches."""
    return [number for batch in batches for number in batch.column("id").to_pylist()]
