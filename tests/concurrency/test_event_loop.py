"""Disk, Lance and large conversions never run in the thread of the event loop.

A test watches the functions that block and asserts in which thread they ran, and that conversions
are done in slices, since each holds the interpreter. How long anything takes is not a test.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.buckets import PERSISTING, WAL_SYNCED, Bucket

from persisting.backends.fairness import CALLS_PER_YIELD
from persisting.bucket.chunk import ROWS_AT_ONCE
from persisting.bucket.snapshot import Snapshot
from persisting.errors import BucketClosed
from persisting.queue import write_queue
from persisting.records import RecordEncoder
from persisting.table.table import Table
from persisting.topic.local import LocalTopic
from persisting.wal import Log

CONVERSIONS = (
    (RecordEncoder, "batch_of_alike"),
    (RecordEncoder, "take"),
    (RecordEncoder, "to_batch"),
)
BLOCKING = (
    *CONVERSIONS,
    (Snapshot, "batches"),
    (Snapshot, "records"),
    (Snapshot, "table"),
    (Table, "append"),
    (Log, "append"),
    (Log, "sync"),
)


class Watch:
    """Notes the threads in which watched functions ran, and how many rows were converted."""

    def __init__(self) -> None:
        self.threads: dict[str, set[int]] = defaultdict(set)
        self.converted: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for owner, name in BLOCKING:
            monkeypatch.setattr(owner, name, self._watched(owner, name))

    def _watched(self, owner: type, name: str) -> Callable[..., Any]:
        real = getattr(owner, name)
        label = f"{owner.__name__}.{name}"

        def call(this: Any, *args: Any, **options: Any) -> Any:
            self.threads[label].add(threading.get_ident())
            if (owner, name) in CONVERSIONS:
                self.converted.append(len(args[0]))
            result = real(this, *args, **options)
            return self._steps(label, result) if name == "batches" else result

        return call

    def _steps(self, label: str, steps: Iterator[Any]) -> Iterator[Any]:
        for step in steps:
            self.threads[label].add(threading.get_ident())
            yield step

    def clear(self) -> None:
        """Forget what ran so far: opening a backend blocks."""
        self.threads.clear()
        self.converted.clear()

    def assert_beside_the_loop(self, *expected: str) -> None:
        """Assert that nothing blocking ran in this thread, and that ``expected`` did run."""
        here = threading.get_ident()
        assert [name for name, threads in self.threads.items() if here in threads] == []
        assert set(expected) <= set(self.threads)
        assert max(self.converted, default=0) <= ROWS_AT_ONCE
        self.clear()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    watch.install(monkeypatch)
    return watch


@pytest.fixture(params=[PERSISTING, WAL_SYNCED], ids=str)
async def bucket(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Bucket]:
    bucket = Bucket(request.param, folder)
    yield bucket
    await bucket.close()


def small(count: int) -> list[dict[str, Any]]:
    return [{"i": i, "s": f"text {i}", "f": i / 3, "b": i % 2 == 0} for i in range(count)]


HEAVY: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "many-small": lambda: small(10_000),
    "vectors": lambda: [{"i": i, "v": np.random.rand(768).tolist()} for i in range(500)],
    "texts": lambda: [{"i": i, "t": "x" * 100_000} for i in range(200)],
    "nested": lambda: [{"a": {"b": [{"c": j} for j in range(50)]}} for i in range(1000)],
}


async def test_heavy_batch_is_converted_and_logged_outside_the_event_loop(
    persisting: Bucket, watch: Watch
) -> None:
    backend = persisting.open(enable_wal=True, flush_threshold=10**6, max_buffer_bytes=1 << 30)
    watch.clear()
    rows = small(10_000) + [{"i": i, "s": "x" * 10_000, "f": 0.5, "b": None} for i in range(1000)]
    await backend.put_batch(rows)
    watch.assert_beside_the_loop("RecordEncoder.batch_of_alike", "Log.append")


@pytest.mark.parametrize("shape", HEAVY)
async def test_heavy_batch_is_put_flushed_and_read_outside_the_event_loop(
    persisting: Bucket, shape: str, watch: Watch
) -> None:
    backend = persisting.open(flush_threshold=10**6, flush_interval=None, max_buffer_bytes=1 << 30)
    watch.clear()
    rows = HEAVY[shape]()
    await backend.put_batch(rows)
    watch.assert_beside_the_loop("RecordEncoder.batch_of_alike")
    assert len(await backend.get(0, len(rows))) == len(rows)
    watch.assert_beside_the_loop("Snapshot.records", "Snapshot.batches")
    await backend.flush()
    watch.assert_beside_the_loop("Table.append")
    assert len(await backend.get(0, len(rows))) == len(rows)
    watch.assert_beside_the_loop("Snapshot.records", "Snapshot.batches")
    assert len([record async for record in backend.get_stream(0, len(rows))]) == len(rows)
    watch.assert_beside_the_loop("Snapshot.batches")


async def test_one_huge_record_is_put_outside_the_event_loop(bucket: Bucket, watch: Watch) -> None:
    backend = bucket.open(max_buffer_bytes=1 << 30)
    watch.clear()
    record = {"a": list(range(200_000)), "d": [{"x": i} for i in range(10_000)]}
    await backend.put(record)
    await backend.put(record)
    watch.assert_beside_the_loop("RecordEncoder.take")
    await backend.flush()
    watch.assert_beside_the_loop("Table.append")


async def test_large_arrow_table_is_put_and_read_outside_the_event_loop(
    bucket: Bucket, watch: Watch
) -> None:
    backend = bucket.open(max_buffer_bytes=1 << 30)
    watch.clear()
    table = pa.table({"i": range(100_000), "t": [f"text {i}" for i in range(100_000)]})
    await backend.put_arrow(table)
    await backend.flush()
    assert (await backend.get_arrow()).num_rows == len(table)
    watch.assert_beside_the_loop("Table.append", "Snapshot.table")


async def test_puts_in_a_row_let_other_tasks_run(bucket: Bucket) -> None:
    backend = bucket.open(flush_threshold=10**6)
    rows = small(10 * CALLS_PER_YIELD)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    for row in rows:
        await backend.put(row)
    counting.cancel()
    assert turns >= len(rows) // CALLS_PER_YIELD - 1


@pytest.mark.parametrize("rows", [0, 3], ids=["empty", "buffered"])
async def test_polling_reader_lets_other_tasks_run(bucket: Bucket, rows: int) -> None:
    backend = bucket.open()
    await backend.put_batch([{"i": i} for i in range(rows)])
    for poll in (lambda: backend.get(0, 20), lambda: backend.get(rows), backend.stats):
        ran = asyncio.create_task(asyncio.sleep(0))
        for _ in range(10_000):
            await poll()
            if ran.done():
                break
        assert ran.done()


async def test_no_file_is_written_or_synced_in_the_thread_of_the_loop(
    bucket: Bucket, faults: Any
) -> None:
    backend = bucket.open(flush_threshold=50)
    faults.threads.clear()
    await backend.put({"i": 0})
    await backend.put_batch([{"i": i} for i in range(60)])
    await backend.flush()
    assert backend.total_count() == 61
    await backend.stats()
    await backend.close()
    assert faults.threads
    assert threading.get_ident() not in faults.threads


async def test_event_loop_runs_while_a_topic_that_is_opening_a_bucket_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = await write_queue("t", storage_path=str(tmp_path), backend="persisting", num_buckets=1)
    is_opening, may_open = threading.Event(), threading.Event()
    build = LocalTopic._build

    def slowly(topic: LocalTopic, *args: Any) -> Any:
        is_opening.set()
        assert may_open.wait(60), "the event loop was blocked"
        return build(topic, *args)

    monkeypatch.setattr(LocalTopic, "_build", slowly)
    put = asyncio.create_task(writer.put({"id": 1}))
    assert await asyncio.to_thread(is_opening.wait, 60)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    may_open.set()
    await closing
    with suppress(BucketClosed):
        await put
