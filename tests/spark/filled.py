"""Topics that queues fill and read, for tests that look at them through Spark."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from persisting.queue import read_queue, write_queue
from persisting.topic.sync import SyncQueue

QUIET: dict[str, Any] = {"flush_interval": None, "compaction": False}
"""Nothing reaches the table, and nothing is changed there, but on demand."""


def writer(
    folder: Path,
    topic: str = "t",
    *,
    buckets: int | None = None,
    column: str | None = None,
    backend: str | None = None,
    writer_id: str | None = None,
    **options: Any,
) -> SyncQueue:
    """A queue that owns the topic until it is closed; a new one has two buckets."""
    new = not (folder / topic / "topic.json").exists()
    opening = write_queue(
        topic=topic,
        storage_path=str(folder),
        num_buckets=buckets or (2 if new else None),
        bucket_column=column,
        backend=backend or ("persisting" if new else None),
        backend_options={**QUIET, **options} if new else (options or None),
        writer_id=writer_id,
    )
    return _sync(opening)


def reader(folder: Path, topic: str = "t", **given: Any) -> SyncQueue:
    return _sync(read_queue(topic=topic, storage_path=str(folder), **given))


def _sync(opening: Any) -> SyncQueue:
    async def opened() -> SyncQueue:
        found: SyncQueue = (await opening).sync()
        return found

    return asyncio.run(opened())


def put(
    folder: Path, records: Iterable[dict[str, Any]] | pa.Table, topic: str = "t", **given: Any
) -> Path:
    """Put records to the topic, as one flush, and close it; its folder."""
    with writer(folder, topic, **given) as queue:
        if isinstance(records, pa.Table):
            queue.put_arrow(records)
        else:
            queue.put_batch(list(records))
    return folder / topic


def content(folder: Path, topic: str = "t") -> dict[int, list[dict[str, Any]]]:
    """All records of the topic as ``read_queue`` has them, by bucket."""
    found = {}
    with reader(folder, topic) as whole:
        buckets = list(whole.buckets)
    for bucket in buckets:
        with reader(folder, topic, bucket_id=bucket) as queue:
            found[bucket] = queue.get(None)
    return found


def stored(folder: Path, topic: str = "t") -> list[dict[str, Any]]:
    """All records of the topic, bucket by bucket."""
    return [record for records in content(folder, topic).values() for record in records]


def ids(folder: Path, topic: str = "t") -> list[Any]:
    """The ids of all records, sorted."""
    return sorted(record["id"] for record in stored(folder, topic))


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Plain records with ids from ``first`` on."""
    return [
        {"id": i, "text": f"row {i}", "score": i / 4, "even": i % 2 == 0}
        for i in range(first, first + count)
    ]
