"""Topics that two processes share without a cluster: recovery after kill -9, and latency.

Children are spawned, not forked, so they share nothing with this process but the topic's folder.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from corebench import records
from corebench.report import Row, Run, Target, percentile, rate, stopwatch

from peersbench.workload import BATCH, PRODUCERS
from persisting.queue import QueueReader, QueueWriter, read_queue, write_queue

BUCKETS = 4
_NEVER = 1 << 40
_UNFLUSHED = {
    "flush_threshold": _NEVER,
    "flush_interval": None,
    "max_wal_size": _NEVER,
    "max_buffer_bytes": _NEVER,
}
_SPAWN = multiprocessing.get_context("spawn")


async def _writer(folder: Path, **options: Any) -> QueueWriter:
    return await write_queue(
        topic="t",
        storage_path=str(folder),
        num_buckets=BUCKETS,
        backend="persisting",
        backend_options={"enable_wal": True, **options},
    )


# Recovery


_NEARLY_EMPTY = 4 * BUCKETS


def recovery(run: Run) -> None:
    """Measure opening a topic with all records in its log, as a killed process leaves it.

    The rates include all costs. Opening takes some time for each bucket and its table, whatever the
    log holds; the time for a log of a few records is shown by itself.
    """
    many, single = max(100, run.records * 5), Target("value", at_least=300_000)
    logs = (
        ("log of single puts, 1 producer", many, 1, 1, single),
        (f"log of single puts, {PRODUCERS} producers", many, 1, PRODUCERS, single),
        (f"log of lists of {BATCH:,}", many, BATCH, 1, None),
        (f"log of {_NEARLY_EMPTY} records", _NEARLY_EMPTY, 1, 1, None),
    )
    with run.scratch() as left:
        measures = []
        for name, count, size, producers, _ in logs:
            child = _SPAWN.Process(target=_leave_log, args=(left / name, count, size, producers))
            child.start()
            child.join()
            if child.exitcode != -signal.SIGKILL:
                raise SystemExit(f"the child that leaves a log failed: exit code {child.exitcode}")
            measures.append(_recover(left / name, count))
        rates = run.best(*measures)
    for (name, count, *_, target), found in zip(logs, rates, strict=True):
        title = f"{name}, {BUCKETS} buckets"
        if count == _NEARLY_EMPTY:
            run.rows.append(Row("recovery", title, count / found * 1000, "ms"))
        else:
            run.rows.append(Row("recovery", title, found, "rec/s", target=target))


def _leave_log(folder: Path, count: int, size: int, producers: int) -> None:
    """Put ``count`` records in lists of ``size``, or single ones, and die before any flush."""

    async def put() -> None:
        writer = await _writer(folder, **_UNFLUSHED)
        made = records.batches(count, size)

        async def produce(share: list[list[dict[str, Any]]]) -> None:
            for batch in share:
                await writer.put(batch if size > 1 else batch[0])

        await asyncio.gather(*(produce(made[i::producers]) for i in range(producers)))
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(put())


def _recover(left: Path, count: int) -> Callable[[Path], float]:
    async def reopen(folder: Path) -> float:
        with stopwatch() as took:
            writer = await write_queue(topic="t", storage_path=str(folder))
            found = (await writer.stats())["total_count"]
            seconds = took()
        if found != count:
            raise SystemExit(f"recovered {found:,} of {count:,} records")
        await writer.close()
        return rate(count, seconds)

    def measure(folder: Path) -> float:
        copy = shutil.copytree(left, folder / "copy", ignore=shutil.ignore_patterns(".sockets"))
        os.sync()  # the syncs of the recovery must not write the copy
        return asyncio.run(reopen(copy))

    return measure


# Latency

_SAMPLES = 300
_SPACING = 0.005, 0.015
_PATIENCE = 10.0
"""Seconds to wait for the last records; one that is not seen until then counts with its age."""


def latency(run: Run) -> None:
    """Measure from the call of a synced put until a waiting reader in another process has it."""
    samples = min(_SAMPLES, max(20, run.records // 100))
    found: dict[str, list[list[float]]] = {name: [] for name in _READERS}
    for _ in range(run.repeat):
        for name, rounds in found.items():
            with run.scratch() as folder:
                rounds.append(asyncio.run(_latencies(folder, name, samples)))
    for name, rounds in found.items():
        for share, most in ((0.5, 10), (0.99, 50)):
            best = min(percentile(seconds, share) for seconds in rounds) * 1000
            title = f"another process, {name}, p{share * 100:g}"
            run.rows.append(Row("latency", title, best, "ms", target=Target("value", at_most=most)))


async def _latencies(folder: Path, reader: str, samples: int) -> list[float]:
    async with await _writer(folder, wal_sync_interval=0.0) as writer:
        # Readers of other processes need a table to start from, in every bucket.
        await writer.put([{**row, "sent": 0} for row in records.stream(16 * BUCKETS)])
        await writer.flush()
        here, there = _SPAWN.Pipe()
        child = _SPAWN.Process(target=_read, args=(folder, reader, there))
        child.start()
        there.close()
        try:
            await _seen(here, 16 * BUCKETS, 60.0)
            # The reader also waits for the log of every bucket before the clock counts.
            await writer.put([{**row, "sent": 0} for row in records.stream(16 * BUCKETS, seed=3)])
            await _seen(here, 16 * BUCKETS, 60.0)
            # Read while putting: the child must not wait for a full pipe.
            patience = 2 * samples * _SPACING[1] + _PATIENCE
            seeing = asyncio.create_task(_seen(here, samples, patience))
            sent = []
            rng = random.Random(5)
            for row in records.stream(samples, seed=11):
                await asyncio.sleep(rng.uniform(*_SPACING))
                sent.append(time.monotonic_ns())
                await writer.put({**row, "sent": sent[-1]})
            seen = dict(await seeing)
            ended = time.monotonic_ns()
        finally:
            child.kill()
            child.join()
    return [(seen.get(at, ended) - at) / 1e9 for at in sent]


async def _seen(child: Connection, count: int, patience: float) -> list[tuple[int, int]]:
    """Return the times at which each record was sent and seen; fewer than ``count`` if patience
    runs out."""
    seen: list[tuple[int, int]] = []
    until = time.monotonic() + patience
    while len(seen) < count and await asyncio.to_thread(
        child.poll, max(0.0, until - time.monotonic())
    ):
        seen += child.recv()
    return seen


async def _wait_for_pages(reader: QueueReader) -> AsyncIterator[list[dict[str, Any]]]:
    while True:
        yield await reader.get(limit=100, wait=True)


async def _follow_stream(reader: QueueReader) -> AsyncIterator[list[dict[str, Any]]]:
    async for row in reader.get_stream(block=True):
        yield [row]


_READERS = {"get(wait=True)": _wait_for_pages, "get_stream(block=True)": _follow_stream}


def _read(folder: Path, name: str, parent: Connection) -> None:
    """Follow the topic until killed; tell the parent when each record was sent and seen."""

    async def follow() -> None:
        async with await read_queue(topic="t", storage_path=str(folder)) as reader:
            async for page in _READERS[name](reader):
                now = time.monotonic_ns()
                parent.send([(row["sent"], now) for row in page])

    asyncio.run(follow())
