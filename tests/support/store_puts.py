"""Puts records to a topic in an object store that fails, and knows what must be there."""

from __future__ import annotations

import asyncio
import random

from persisting.errors import OwnershipLost, StorageError
from persisting.queue import QueueWriter, read_queue, write_queue
from support.object_stores import storage_options, url


class Topic:
    """A topic in an object store, and what was acknowledged."""

    def __init__(self, port: int, prefix: str, *, padding: int = 0, **client: str) -> None:
        """Each record has ``padding`` more bytes."""
        client = {"timeout": "2s", "connect_timeout": "2s", **client}
        self._place = {
            "topic": "t",
            "storage_path": url(prefix),
            "storage_options": storage_options(port, **client),
        }
        self.acknowledged: list[int] = []
        self.failures: list[StorageError] = []
        self._next = 0
        self._padding = random.Random(1).randbytes(padding)
        self._writer: QueueWriter | None = None

    async def writer(self) -> QueueWriter:
        if self._writer is None:
            options = {"lease": 1.0, "flush_interval": None}
            self._writer = await write_queue(
                **self._place,
                durable=True,
                num_buckets=1,
                bucket_column="n",
                backend_options=options,
            )
        return self._writer

    async def put(self, count: int) -> None:
        """Put records one after the other; open the topic again if it was lost."""
        for _ in range(count):
            number, self._next = self._next, self._next + 1
            try:
                await (await self.writer()).put({"n": number, "padding": self._padding})
                self.acknowledged.append(number)
            except StorageError as exc:
                await self._failed(exc)

    async def flush(self) -> None:
        """Flush until it succeeds."""
        while True:
            try:
                return await (await self.writer()).flush()
            except StorageError as exc:
                await self._failed(exc)

    async def _failed(self, exc: StorageError) -> None:
        self.failures.append(exc)
        if isinstance(exc, OwnershipLost) and self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.close()
        await asyncio.sleep(0.05)

    async def consume(self) -> None:
        """Read all that a group has not committed, and commit."""
        async with await read_queue(**self._place, group="g") as reader:
            await reader.get(10_000)
            await reader.commit()

    async def check(self) -> None:
        """Everything acknowledged is there once and in order; of the others, some may be."""
        if self._writer is not None:
            await self._writer.close()
        async with await read_queue(**self._place) as reader:
            found = [record["n"] for record in await reader.get(100_000)]
        assert found == sorted(set(found))
        assert set(self.acknowledged) <= set(found)
        assert set(found) <= set(range(self._next))
