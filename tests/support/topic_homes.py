"""Places whose topics have tables, and helpers for the contracts of tables."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pulsing as pul

from persisting.cluster.host import host_here
from persisting.queue import QueueReader, QueueWriter
from support.topic_places import Place, numbered
from support.waiting import SECONDS

BUCKETS = 3


class Home(Place):
    """A place with tables, which are flushed only on demand."""

    async def open(self, **options: Any) -> QueueWriter:
        """Return a writer of the topic, created with these options of the backend."""
        given = {"flush_interval": None, "compaction": False, **(self.options or {}), **options}
        return await self.write(num_buckets=BUCKETS, backend_options=given)

    async def reopen(self) -> QueueWriter:
        """Close every handle and return a new writer; without a system this reopens the buckets."""
        await self.close()
        return await self.write(backend_options={})

    async def content(self) -> dict[int, list[dict[str, Any]]]:
        """Return all records by bucket."""
        found = {}
        for bucket in range(BUCKETS):
            reader = await self.read(bucket_id=bucket)
            found[bucket] = await reader.get(None)
        return found


async def home_in(where: str, kind: str, folder: Path) -> AsyncIterator[Home]:
    """Yield a home in this process, or on its own Pulsing system."""
    system = await pul.actor_system("127.0.0.1:0") if where == "one" else None
    made = Home(kind, folder, system)
    yield made
    await made.close()
    if system is not None:
        host = host_here(system._inner)
        if host is not None:
            await host.close()
        await system.shutdown()


def flat(content: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [record for bucket in sorted(content) for record in content[bucket]]


async def with_two_flushes(home: Home) -> tuple[QueueWriter, dict[int, list[dict[str, Any]]]]:
    """Flush 30 records, then 30 more; also return the content between the two."""
    writer = await home.open()
    await writer.put(numbered(30))
    await writer.flush()
    content = await home.content()
    await writer.put(numbered(30, 30))
    await writer.flush()
    return writer, content


async def taken(reader: QueueReader, count: int, seconds: float = SECONDS) -> list[Any]:
    """Wait for the next ``count`` records and return their ids; fewer if they do not arrive."""
    found: list[Any] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += [r["id"] for r in await reader.get(count - len(found), wait=True, timeout=1.0)]
    return found


class Following:
    """Reads a stream in the background and collects the ids."""

    def __init__(self, stream: AsyncIterator[dict[str, Any]]) -> None:
        self.found: list[Any] = []
        self._more = asyncio.Event()
        self._task = asyncio.create_task(self._follow(stream))

    async def _follow(self, stream: AsyncIterator[dict[str, Any]]) -> None:
        async for record in stream:
            self.found.append(record["id"])
            self._more.set()

    async def reaches(self, count: int, seconds: float = SECONDS) -> list[Any]:
        """Return the ids once there are ``count`` of them; fail if they do not arrive."""
        deadline = time.monotonic() + seconds
        while len(self.found) < count:
            if self._task.done():
                self._task.result()
                raise AssertionError(f"the stream ended after {self.found}")
            self._more.clear()
            try:
                await asyncio.wait_for(self._more.wait(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise AssertionError(f"the stream delivered only {self.found}") from None
        return list(self.found)

    async def fails(self) -> BaseException:
        """Return the exception that the stream raised."""
        try:
            await asyncio.wait_for(self._task, SECONDS)
        except asyncio.TimeoutError:
            raise AssertionError(f"the stream continues; it delivered {self.found}") from None
        except Exception as exc:
            return exc
        raise AssertionError(f"the stream ended without an error after {self.found}")

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
