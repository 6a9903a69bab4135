"""Topics that this process only reads: their tables, without a lock.

Another process may own the topic; its flushed rows are seen within 100 ms. If this process opens
the topic for writing, the readers go over to its buckets, buffer and all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from persisting.backends.lance import LanceBackend
from persisting.backends.table_backend import TableBackend
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.snapshot import Page
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, BucketLocked, OffsetOutOfRange, StorageError
from persisting.table.versions import NOTHING
from persisting.topic.bucket_client import TABLE_CHANGES, ProducerSequence, Rows
from persisting.topic.local import LocalBucketClient, live_topic
from persisting.topic.ownership import open_owner, recover
from persisting.topic.spec import TopicConfig, bucket_folder

_T = TypeVar("_T")
_LOOK = 0.05
_PAUSE = 0.01


class ReadonlyTopic:
    """A topic on disk, opened for reading."""

    def __init__(self, folder: Path, config: TopicConfig) -> None:
        self.folder, self._config = folder, config
        self._ports: dict[int, ReadonlyBucketClient] = {}

    @property
    def name(self) -> str:
        return self._config.topic

    @property
    def num_buckets(self) -> int:
        return self._config.num_buckets

    @property
    def bucket_column(self) -> str:
        return self._config.bucket_column

    @property
    def batch_size(self) -> int:
        return self._config.batch_size

    def port(self, bucket: int) -> ReadonlyBucketClient:
        if bucket not in self._ports:
            self._ports[bucket] = ReadonlyBucketClient(self.folder, self._config, bucket)
        return self._ports[bucket]

    async def close(self) -> None:
        for port in self._ports.values():
            await port.close()


class ReadonlyBucketClient:
    """A bucket on disk, or the live one where this process owns it."""

    def __init__(self, folder: Path, config: TopicConfig, bucket: int) -> None:
        self._topic_folder, self._config, self._bucket = folder, config, bucket
        self._folder = bucket_folder(folder, bucket)
        self._reader: TableBackend | None = None

    async def _source(self) -> Any | None:
        """The live bucket, else a reader of the table, None while there is none."""
        live = live_topic(self._topic_folder)
        if live is not None:
            return LocalBucketClient(live, self._bucket)
        if self._reader is None:
            self._reader = await in_thread(self._open)
        return self._reader

    def _open(self) -> TableBackend | None:
        if not self._folder.is_dir():
            return None
        recover(self._topic_folder, self._config, self._bucket)
        schema_path = self._topic_folder / SCHEMA_FILE
        return LanceBackend(
            self._bucket, str(self._folder), read_only=True, schema_path=schema_path
        )

    async def put(self, rows: Rows, mark: ProducerSequence | None = None) -> None:
        raise StorageError(f"topic {self._config.topic!r} is open for reading only")

    async def _on_source(self, call: Callable[[Any], Awaitable[_T]], nothing: _T) -> _T:
        """Call the live bucket or the reader; the other one if it has just been closed."""
        while True:
            source = await self._source()
            if source is None:
                return nothing
            try:
                return await call(source)
            except BucketClosed:
                if not isinstance(source, LocalBucketClient):
                    raise
                await asyncio.sleep(_PAUSE)

    async def read(self, offset: int, limit: int | None) -> Page:
        return await self._on_source(lambda s: s.read(offset, limit), Page(offset, []))

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        nothing = Page(offset, pa.table({}))
        return await self._on_source(lambda s: s.read_arrow(offset, limit), nothing)

    async def do(self, op: str, **args: Any) -> Any:
        source = await self._source()
        while isinstance(source, LocalBucketClient):
            try:
                return await source.do(op, **args)
            except BucketClosed:  # this process has just closed the topic
                await asyncio.sleep(_PAUSE)
                source = await self._source()
        if op in TABLE_CHANGES:
            return await self._as_owner(op, args)
        if source is None:
            return _of_nothing(op, args)
        return await getattr(source, op)(**args)

    async def _as_owner(self, op: str, args: dict[str, Any]) -> Any:
        """Own the bucket for the length of a call; if somebody else owns it, say so."""
        try:
            owner = await in_thread(open_owner, self._topic_folder, self._config, self._bucket)
        except BucketLocked as exc:
            raise BucketLocked(
                exc.summary,
                owner=exc.owner,
                hint=f"call {op}() there, or on a queue of its cluster",
            ) from exc
        try:
            return await getattr(owner, op)(**args)
        finally:
            await owner.close()
            if self._reader is not None:
                self._reader.bucket.expire_view()

    async def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncIterator[Page]:
        left = limit
        while left is None or left > 0:
            source = await self._source()
            if source is not None:
                live = isinstance(source, LocalBucketClient)
                pages: Any = source.pages if live else source.get_pages
                try:
                    async with aclosing(pages(offset, left, False, epoch)) as stream:
                        async for page in stream:
                            yield page
                            if not page.rows:
                                return
                            epoch, offset = page.epoch, page.first + len(page.rows)
                            left = None if left is None else left - len(page.rows)
                except BucketClosed:
                    if not live:
                        raise
                    await asyncio.sleep(_PAUSE)
                    continue
            if not block:
                return
            if left is None or left > 0:
                await self.wait(offset, epoch or 0)

    async def wait(self, offset: int, epoch: int = 0) -> None:
        """Wakes on put where this process owns the topic, by then; else it looks now and then."""
        while True:
            source = await self._source()
            if isinstance(source, LocalBucketClient):
                try:
                    return await source.wait(offset, epoch)
                except BucketClosed:
                    pass
            elif source is not None:
                if await in_thread(source.end_offset) > offset or source.epoch() != epoch:
                    return
            await asyncio.sleep(_LOOK)

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
        nothing = {
            "bucket_id": self._bucket,
            "total_count": 0,
            "end_offset": 0,
            "start_offset": 0,
            "epoch": 0,
        }
        return await self._on_source(lambda source: source.stats(), nothing)

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()


def _of_nothing(op: str, args: dict[str, Any]) -> Any:
    """What a call finds in a bucket that does not exist yet."""
    if op == "resolve":
        return NOTHING
    if op == "take" and args["offsets"]:
        raise OffsetOutOfRange(
            f"there is no offset {args['offsets'][0]}: nothing is stored in this bucket"
        )
    if op == "arrow_at":
        return pa.table({})
    if op == "verify":
        return {"ok": True, "rows": 0, "files": 0, "damaged": [], "unchecked": []}
    return []
