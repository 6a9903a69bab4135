"""Whether a worker that holds a record for a long time slows the others down."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from corebench.report import Run, Target, rate
from peersbench.record_kinds import Record

from persisting.queue import read_queue, write_queue
from workbench.crowd import LEASE, SMALL, WORKERS, Crowd
from workbench.topic_work import FetchingWorkers

_SLICE_SECONDS = 0.25
_ROWS = 20_000
"""Records that are put at a time."""
_ROWS_PER_SECOND = 15_000
"""Records that are put before, so that no flush runs beside the workers; more are put if needed."""


class _Topic:
    """A topic with its work group; ``slices`` has the rates of its workers."""

    def __init__(self, folder: Path, name: str) -> None:
        self._place: dict[str, Any] = {"topic": name, "storage_path": str(folder)}
        self.slices: list[float] = []
        self._left = 0
        self._rows: list[Record] = SMALL.rows(_ROWS)

    async def open(self, seconds: float) -> None:
        options = {"enable_wal": True, "wal_sync_interval": 0.0}
        self._writer = await write_queue(
            **self._place, num_buckets=4, backend="persisting", backend_options=options
        )
        await self._fill(max(2 * _ROWS, round(seconds * _ROWS_PER_SECOND)))
        await self._writer.flush()
        self.reader = await read_queue(**self._place, group="g", mode="work", lease=LEASE)

    async def work(self) -> None:
        """Let the workers claim and acknowledge for a while."""
        workers = FetchingWorkers([self.reader])
        crowd = Crowd(WORKERS, _SLICE_SECONDS)
        await workers.work(crowd)
        self.slices.append(rate(crowd.finished, crowd.seconds))
        self._left -= len(crowd.claimed)
        await self._fill(_ROWS)

    async def _fill(self, least: int) -> None:
        """Put records until there are enough for the next slices."""
        while self._left < least:
            await self._writer.put(self._rows)
            self._left += _ROWS

    async def close(self) -> None:
        await self.reader.close()
        await self._writer.close()


async def _measure(folder: Path, seconds: float) -> tuple[list[float], list[float]]:
    held, free = _Topic(folder, "held"), _Topic(folder, "free")
    for topic in (held, free):
        await topic.open(seconds)
        await topic.work()
        topic.slices.clear()
    (delivery,) = await held.reader.fetch(1)
    until = time.monotonic() + seconds
    order = [held, free]
    while time.monotonic() < until:
        if delivery.seconds_left < LEASE / 2:
            await delivery.extend()
        for topic in order:
            await topic.work()
        order.reverse()
    await delivery.ack()
    for topic in (held, free):
        await topic.close()
    return held.slices, free.slices


def measure(run: Run, seconds: float) -> None:
    """Compare a topic with a held record with one without, in short turns."""
    with run.scratch() as folder:
        held, free = asyncio.run(_measure(folder, seconds))
    ratio = statistics.median(h / f for h, f in zip(held, free, strict=True))
    run.add(
        "held",
        f"{WORKERS} workers beside one that holds a record {seconds:g} s",
        statistics.median(held),
        "rec/s",
        "nobody holds a record",
        statistics.median(free),
        Target("ratio", at_least=0.95),
        ratio,
    )
