"""Buckets that this process owns, as readers and writers call them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from persisting.backends.table_backend import TableBackend
from persisting.bucket.snapshot import Page
from persisting.errors import BucketClosed
from persisting.topic.backend_adapter import BucketBackend, keeps_schema, run_table_call
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.local import LocalTopic
from persisting.topic.stream_position import StreamPosition
from persisting.topic.table_calls import T, TableCall

_T = TypeVar("_T")
_PAUSE_SECONDS = 0.01


class LocalBucketClient:
    """A bucket that this process owns."""

    def __init__(self, topic: LocalTopic, bucket: int) -> None:
        self._topic, self._bucket = topic, bucket

    async def _backend(self) -> BucketBackend:
        return await self._topic.backend(self._bucket)

    def _on_backend(self, call: Callable[[BucketBackend], Awaitable[_T]]) -> Awaitable[_T]:
        return self._topic.on_backend(self._bucket, call)

    async def put(self, rows: Rows, sequence: ProducerSequence | None = None) -> None:
        await self._topic.put(self._bucket, rows, sequence)

    @property
    def lost(self) -> str:
        """Why this process no longer owns the bucket, which is in an object store; empty while it
        does, as far as it knows."""
        core = self._topic.store_bucket(self._bucket)
        return "" if core is None else core.lifecycle.lost

    @property
    def overdue(self) -> str:
        """Why another process may have taken the bucket over unnoticed; empty while that cannot
        be."""
        core = self._topic.store_bucket(self._bucket)
        return "" if core is None else core.lifecycle.overdue

    async def keeps_schema(self) -> bool:
        """Whether all records of the bucket have one schema, so that Arrow holds them exactly."""
        return keeps_schema(await self._backend())

    async def end(self) -> int:
        """Return the offset after the last record."""
        return int((await self._backend()).end_offset())

    async def rows_within(self, offset: int, nbytes: int) -> int | None:
        """Return how many rows from ``offset`` take about ``nbytes``, None if that is not known."""

        async def ask(backend: BucketBackend) -> int | None:
            return backend.rows_within(offset, nbytes)

        return await self._on_backend(ask)

    async def epoch(self) -> int:
        """Return how many times the bucket was restored, or an owner without a log was killed."""
        return (await self._backend()).epoch()

    async def read(self, offset: int, limit: int | None) -> Page:
        return await self._on_backend(lambda backend: backend.read(offset, limit))

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        return await self._on_backend(lambda backend: backend.read_arrow(offset, limit))

    async def call(self, call: TableCall[T]) -> T:
        return await self._on_backend(lambda backend: run_table_call(backend, call))

    async def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncGenerator[Page]:
        position = StreamPosition(offset, limit, epoch)
        while not position.at_limit:
            backend = await self._backend()
            try:
                async with aclosing(backend.get_pages(*position.window(block))) as stream:
                    async for page in stream:
                        yield page
                        if not position.advance(page):
                            return
            except BucketClosed:
                if self._topic.closed:
                    raise
            else:
                if not block or self._topic.closed:
                    return
            await asyncio.sleep(_PAUSE_SECONDS)  # the backend is being reopened

    async def wait(self, offset: int, epoch: int | None = None) -> None:
        await self._on_backend(lambda backend: backend.wait_beyond(offset, epoch))

    async def find(self, timestamp: int) -> int:
        return int(await (await self._backend()).offset_at(timestamp))

    async def last_number(self, writer: str) -> int:
        return (await self._backend()).last_number(writer)

    async def is_queued(self, sequence: ProducerSequence) -> bool:
        """Whether this put waits for the log."""
        backend = await self._backend()
        return isinstance(backend, TableBackend) and backend.bucket.puts.is_queued(sequence)

    async def flush(self) -> None:
        await self._on_backend(lambda backend: backend.flush())

    async def stats(self) -> dict[str, Any]:
        backend = await self._backend()
        required = {"bucket_id": self._bucket, "total_count": backend.total_count()}
        return {**required, **await backend.stats()}
