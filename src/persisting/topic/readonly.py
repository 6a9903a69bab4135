"""Topics that this process only reads: their tables and their owner's log, without a lock.

Another process may own the topic; what it has acknowledged in its log is visible immediately, and
without a log what it has flushed. If this process opens the topic for writing, readers switch to
its live buckets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from persisting.backends.lance import LanceBackend
from persisting.backends.table_backend import TableBackend
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.snapshot import Page
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, BucketLocked, StorageError, TableError
from persisting.topic.address import TopicAddress
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.configured import ConfiguredTopic
from persisting.topic.local import LocalBucketClient, LocalTopic, live_bucket
from persisting.topic.ownership import open_owner, recover, recover_own_log
from persisting.topic.spec import TopicConfig, bucket_folder
from persisting.topic.stream_position import StreamPosition
from persisting.topic.table_calls import T, TableCall, TableRead

_T = TypeVar("_T")
_POLL_SECONDS = 0.05
_PAUSE_SECONDS = 0.01


class ReadonlyTopic(ConfiguredTopic):
    """A topic on disk, opened for reading."""

    def __init__(self, folder: Path, config: TopicConfig) -> None:
        self.folder, self._config = folder, config
        self._clients: dict[int, ReadonlyBucketClient] = {}

    @property
    def config(self) -> TopicConfig:
        return self._config

    def bucket(self, bucket: int) -> ReadonlyBucketClient:
        if bucket not in self._clients:
            self._clients[bucket] = ReadonlyBucketClient(self.folder, self._config, bucket)
        return self._clients[bucket]

    async def put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> None:
        raise StorageError(f"topic {self.name!r} is open for reading only")

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


class ReadonlyBucketClient:
    """A bucket on disk, or the live bucket while this process owns it."""

    may_be_behind = False
    """Whether it may show a little later what is acknowledged. :class:`MakeDurable` of an offset
    that it does not show makes it look."""
    _is_elsewhere = False
    """Whether another process owned the bucket when the live topic was to open it. The files are
    read then, as without a live topic."""

    def __init__(self, folder: Path, config: TopicConfig, bucket: int) -> None:
        self._topic_folder, self._config, self._bucket = folder, config, bucket
        self._address = TopicAddress.in_folder(folder)
        self._folder = bucket_folder(folder, bucket)
        self._reader: TableBackend | None = None

    async def _source(self) -> LocalBucketClient | TableBackend | None:
        """Return the live bucket, else a reader of the table, None while neither exists."""
        live = self._live()
        if live is not None:
            return LocalBucketClient(live, self._bucket)
        if self._reader is None:
            self._reader = await in_thread(self._open)
        return self._reader

    def _live(self) -> LocalTopic | None:
        return live_bucket(self._address, self._bucket, is_elsewhere=self._is_elsewhere)

    async def _left(self, exc: BucketClosed | BucketLocked) -> None:
        """Pause after the live bucket was closed, or another process turned out to own it."""
        self._is_elsewhere = isinstance(exc, BucketLocked)
        await asyncio.sleep(_PAUSE_SECONDS)

    def _open(self) -> TableBackend | None:
        if not self._folder.is_dir():
            return None
        place = self._topic_folder, self._config, self._bucket
        recover_own_log(*place)
        try:
            return self._open_reader()
        except TableError:
            recover(*place)  # if power loss has torn the table, its next owner repairs it
            return self._open_reader()

    def _open_reader(self) -> TableBackend:
        return LanceBackend(
            self._bucket,
            str(self._folder),
            batch_size=self._config.batch_size,
            read_only=True,
            schema_path=self._topic_folder / SCHEMA_FILE,
            schema_defaults=self._config.options.get("schema_defaults") or {},
        )

    async def put(self, rows: Rows, sequence: ProducerSequence | None = None) -> None:
        raise StorageError(f"topic {self._config.topic!r} is open for reading only")

    async def _on_source(
        self, call: Callable[[LocalBucketClient | TableBackend], Awaitable[_T]], empty: _T
    ) -> _T:
        """Call the live bucket or the reader; if the live bucket has just been closed, retry.

        A bucket that does not exist yet gives ``empty``.
        """
        while True:
            source = await self._source()
            if source is None:
                return empty
            try:
                return await call(source)
            except (BucketClosed, BucketLocked) as exc:  # perhaps of another process now
                if not isinstance(source, LocalBucketClient):
                    raise
                await self._left(exc)

    async def read(self, offset: int, limit: int | None) -> Page:
        return await self._on_source(lambda s: s.read(offset, limit), Page(offset, []))

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        empty = Page(offset, pa.table({}))
        return await self._on_source(lambda s: s.read_arrow(offset, limit), empty)

    async def call(self, call: TableCall[T]) -> T:
        source = await self._source()
        while isinstance(source, LocalBucketClient):
            try:
                return await source.call(call)
            except (BucketClosed, BucketLocked) as exc:  # this process has just closed or lost it
                await self._left(exc)
                source = await self._source()
        if not isinstance(call, TableRead):
            return await self._as_owner(call)
        if source is None:
            result: T = call.without_bucket()
            return result
        return await call.run(source)

    async def _as_owner(self, call: TableCall[T]) -> T:
        """Own the bucket for the duration of a call; raise if another process owns it."""
        try:
            owner = await in_thread(open_owner, self._topic_folder, self._config, self._bucket)
        except BucketLocked as exc:
            raise BucketLocked(
                exc.summary,
                owner=exc.owner,
                hint=f"call {call.op}() there, or on a queue of its cluster",
            ) from exc
        try:
            return await call.run(owner)
        finally:
            await owner.close()
            if self._reader is not None:
                self._reader.bucket.expire_view()

    async def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncGenerator[Page]:
        position = StreamPosition(offset, limit, epoch)
        while not position.at_limit:
            source = await self._source()
            if source is not None:
                live = isinstance(source, LocalBucketClient)
                pages = source.pages if isinstance(source, LocalBucketClient) else source.get_pages
                try:
                    async with aclosing(pages(*position.window(block=False))) as stream:
                        async for page in stream:
                            yield page
                            if not position.advance(page):
                                return
                except (BucketClosed, BucketLocked) as exc:
                    if not live:
                        raise
                    await self._left(exc)
                    continue
            if not block:
                return
            if not position.at_limit:
                await self.wait(position.offset, position.epoch)

    async def wait(self, offset: int, epoch: int | None = None) -> None:
        """Wait until there is more, or the epoch is not ``epoch``; None stands for any epoch."""
        while True:
            source = await self._source()
            if isinstance(source, LocalBucketClient):
                try:
                    return await source.wait(offset, epoch)
                except (BucketClosed, BucketLocked) as exc:
                    await self._left(exc)
            elif source is not None and await self._wait_unless_live(source, offset, epoch):
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _wait_unless_live(self, source: TableBackend, offset: int, epoch: int | None) -> bool:
        """Wait for more in the files; False once this process owns the topic."""
        waiting = asyncio.ensure_future(source.wait_beyond(offset, epoch))
        try:
            while self._live() is None:
                if (await asyncio.wait([waiting], timeout=_POLL_SECONDS))[0]:
                    waiting.result()
                    return True
            return False
        finally:
            waiting.cancel()

    async def find(self, timestamp: int) -> int:
        source = await self._source()
        if source is None:
            return 0
        if isinstance(source, LocalBucketClient):
            return await source.find(timestamp)
        return int(await source.offset_at(timestamp))

    async def last_number(self, writer: str) -> int:
        source = await self._source()
        if source is None:
            return -1
        if isinstance(source, LocalBucketClient):
            return await source.last_number(writer)
        return int(source.last_number(writer))

    async def flush(self) -> None:
        raise StorageError(f"topic {self._config.topic!r} is open for reading only")

    async def stats(self) -> dict[str, Any]:
        empty = {
            "bucket_id": self._bucket,
            "total_count": 0,
            "end_offset": 0,
            "start_offset": 0,
            "epoch": 0,
        }
        return await self._on_source(lambda source: source.stats(), empty)

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()
