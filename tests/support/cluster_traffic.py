"""Records that flow while something happens to the cluster, and what must be true afterwards."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

from persisting.queue import read_queue, write_queue

SYNCED = {"enable_wal": True, "wal_sync_interval": 0.0}


class Traffic:
    """A producer and a blocking consumer of one topic, with everything they saw."""

    def __init__(self, system: Any, folder: Path, **given: Any) -> None:
        self.system, self.folder = system, folder
        self.words = {"backend": "persisting", "backend_options": SYNCED, **given}
        self.acknowledged: list[int] = []
        self.consumed: list[int] = []
        self.longest = 0.0
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []
        self.writer: Any = None

    async def start(self) -> None:
        self.writer = await write_queue(
            self.system, topic="t", storage_path=str(self.folder), **self.words
        )
        await self._put()
        reader = await read_queue(self.system, topic="t", storage_path=str(self.folder))
        self._tasks = [
            asyncio.create_task(self._produce()),
            asyncio.create_task(self._consume(reader)),
        ]

    async def _put(self) -> None:
        first = len(self.acknowledged)
        started = time.monotonic()
        await self.writer.put([{"id": number} for number in range(first, first + 20)])
        self.longest = max(self.longest, time.monotonic() - started)
        self.acknowledged += range(first, first + 20)

    async def _produce(self) -> None:
        while not self._stop:
            await self._put()
            await asyncio.sleep(0.01)

    async def _consume(self, reader: Any) -> None:
        async for record in reader.get_stream(block=True):
            self.consumed.append(record["id"])

    async def flows(self, seconds: float) -> None:
        """Let it flow; what the producer or the consumer raises is raised here."""
        await self.until(lambda: False, seconds, raising=False)

    async def until(self, true: Any, seconds: float, *, raising: bool = True) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            for task in self._tasks:
                if task.done():
                    task.result()
            if time.monotonic() > deadline:
                if raising:
                    raise AssertionError(f"not within {seconds} s: {self}")
                return
            await asyncio.sleep(0.05)

    async def progress(self, seconds: float = 20.0) -> float:
        """Return when 10 further puts are acknowledged and consumed; the seconds that took."""
        started = time.monotonic()
        wanted = len(self.acknowledged) + 200
        await self.until(
            lambda: len(self.acknowledged) >= wanted and len(self.consumed) >= wanted, seconds
        )
        return time.monotonic() - started

    async def check(self) -> None:
        """Stop; everything acknowledged is stored and was consumed, once."""
        self._stop = True
        await asyncio.wait_for(self._tasks[0], 60)
        await self.until(lambda: len(self.consumed) >= len(self.acknowledged), 20)
        reader = await read_queue(self.system, topic="t", storage_path=str(self.folder))
        stored = [record["id"] async for record in reader.get_stream()]
        await reader.close()
        await self.close()
        assert_once("stored", stored, self.acknowledged)
        assert_once("consumed", self.consumed, self.acknowledged)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __str__(self) -> str:
        return f"{len(self.acknowledged)} acknowledged, {len(self.consumed)} consumed"


def assert_once(what: str, found: list[int], expected: list[int]) -> None:
    missing = sorted(set(expected) - set(found))
    doubled = sorted(number for number, count in Counter(found).items() if count > 1)
    assert (missing, doubled) == ([], []), f"{what}: missing {missing[:20]}, twice {doubled[:20]}"
