"""The calling side: topics and buckets wherever their owners are."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from typing import Any

import pyarrow as pa

from persisting.bucket.snapshot import Page
from persisting.cluster import wire
from persisting.cluster.locator import LOST, OwnerLocator, Patience
from persisting.cluster.put_pipeline import PutPipeline
from persisting.cluster.service import BucketService
from persisting.cluster.watcher import EndWatcher
from persisting.cluster.wire import Reply, Request
from persisting.errors import BucketClosed, InvalidArgument, OffsetOutOfRange
from persisting.records import Rules
from persisting.records.arrow import align, merge
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.configured import ConfiguredTopic
from persisting.topic.stream_position import StreamPosition
from persisting.topic.table_calls import T, TableCall

_LARGEST_INT = (1 << 63) - 1
_WINDOW_TRIES = 4


class RemoteTopic(ConfiguredTopic):
    """A topic whose buckets have their owners elsewhere, or in this process."""

    def __init__(self, *, as_columns: bool = False, puts_directly: bool = True) -> None:
        """With ``as_columns``, owners take records as Arrow columns.

        Without ``puts_directly``, puts to buckets of this process are numbered too, so that they
        can be repeated elsewhere if it is unknown whether they were stored.
        """
        self._puts_directly = puts_directly
        self._locators: dict[int, OwnerLocator] = {}
        self._clients: dict[int, RemoteBucketClient] = {}
        self._puts = PutPipeline(self.locator, as_columns=as_columns)

    @abstractmethod
    def _new_locator(self, bucket: int) -> OwnerLocator:
        """Return the way to the owner of a bucket."""

    @abstractmethod
    async def _put_here(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None
    ) -> list[tuple[int, Rows]]:
        """Store rows in buckets of this process; return those that were not stored, because their
        buckets have moved."""

    def locator(self, bucket: int) -> OwnerLocator:
        """Return the way to the owner of a bucket."""
        if bucket not in self._locators:
            self._locators[bucket] = self._new_locator(bucket)
        return self._locators[bucket]

    def is_busy(self, bucket: int) -> bool:
        """Whether puts to a bucket are under way."""
        return self._puts.is_busy(bucket)

    def bucket(self, bucket: int) -> RemoteBucketClient:
        if bucket not in self._clients:
            client = RemoteBucketClient(
                bucket, self.locator(bucket), self._puts, puts_directly=self._puts_directly
            )
            self._clients[bucket] = client
        return self._clients[bucket]

    def put_soon(self, bucket: int, record: dict[str, Any]) -> Awaitable[None] | None:
        return self._puts.start_row(bucket, record)

    async def put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> None:
        """Store rows in several buckets, with one call per owner.

        Each owner stores its part as a whole, independently of the other owners.
        """
        if len(parts) == 1:
            ((bucket, rows),) = parts
            await self.bucket(bucket).put(rows, sequence)
            return
        owned: list[tuple[int, Rows]] = []
        others: list[tuple[int, Rows]] = []
        for part in parts:
            is_direct = self.bucket(part[0]).direct_service() is not None
            (owned if is_direct else others).append(part)
        if not others:
            await self._put_directly(owned, sequence)
            return
        under_way = self._start(others, sequence)
        if not owned:
            await under_way
            return
        try:
            await self._put_directly(owned, sequence)
        except Exception:
            await asyncio.gather(under_way, return_exceptions=True)
            raise
        except BaseException:
            under_way.cancel()
            raise
        await under_way

    def _start(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None
    ) -> asyncio.Future[None]:
        if sequence is None:
            return self._puts.start(parts)
        return asyncio.ensure_future(self._puts.put_sequenced(parts, sequence))

    async def _put_directly(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None
    ) -> None:
        """Store rows in buckets that this process owns."""
        left = await self._put_here(parts, sequence)
        if left:
            await self._start(left, sequence)

    async def close(self) -> None:
        """Finish the puts that are under way; the buckets stay with their owners."""
        for client in self._clients.values():
            await client.close()

    async def reopen(self) -> None:
        """Have every owner reopen its bucket with the topic's new configuration."""
        await asyncio.gather(*(self.bucket(b).reopen() for b in range(self.num_buckets)))


class RemoteBucketClient:
    """A bucket of any owner, reached directly while this process owns it."""

    def __init__(
        self, bucket: int, locator: OwnerLocator, puts: PutPipeline, *, puts_directly: bool = True
    ) -> None:
        """``puts`` is shared by all buckets of the topic."""
        self._bucket, self._locator, self._puts = bucket, locator, puts
        self._puts_directly = puts_directly
        self._watcher = EndWatcher(locator)
        self._start = 0
        """The first offset left, as far as a read from the earliest record has shown."""

    def direct_service(self) -> BucketService | None:
        """Return the bucket itself if this process owns it and a put to it can go directly:
        none that was called earlier is still on its way."""
        if not self._puts_directly:
            return None
        service = self._locator.local_service()
        return service if service is not None and not self._puts.is_busy(self._bucket) else None

    async def put(self, rows: Rows, sequence: ProducerSequence | None = None) -> None:
        service = self.direct_service()
        if service is not None:
            with suppress(BucketClosed):  # it has just moved; nothing was stored
                await service.direct(lambda client: client.put(rows, sequence))
                return
        if sequence is not None:
            await self._puts.put_sequenced([(self._bucket, rows)], sequence)
        else:
            await self._puts.start([(self._bucket, rows)])

    async def drain(self) -> None:
        """Wait until the puts to the bucket that are under way have ended."""
        await self._puts.drain(self._bucket)

    async def close(self) -> None:
        """Finish the puts that are under way and stop watching."""
        await self.drain()
        await self._watcher.close()

    async def reopen(self) -> None:
        """Have the owner open the bucket with the topic's new configuration."""
        await self._locator.reopen()

    async def read(self, offset: int, limit: int | None) -> Page:
        service = self._locator.local_service()
        if service is not None:
            with suppress(BucketClosed):
                return self._seen(offset, await service.direct(lambda c: c.read(offset, limit)))
        pages = await self._window("get", offset, limit)
        records = [record for page in pages for record in _as_records(page.rows)]
        return self._seen(offset, pages[0]._replace(rows=records))

    def _seen(self, offset: int, page: Page) -> Page:
        if offset == 0:
            self._start = page.first
        return page

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        pages = await self._window("get_arrow", offset, limit)
        tables = [page.rows for page in pages]
        table = await asyncio.to_thread(_joined, [t for t in tables if len(t)] or tables[:1])
        return pages[0]._replace(rows=table)

    async def _window(self, op: str, offset: int, limit: int | None) -> list[Page]:
        """Read a window in pages that each fit a message.

        All pages are of one epoch and follow each other. If retention or a restore comes between
        two pages, the window is read again, as if it had begun after that. If that happens time and
        again, the pages so far are returned: the caller's next read starts after them.
        """
        for _ in range(_WINDOW_TRIES):
            pages, whole = await self._pages_of_window(op, offset, limit)
            if whole:
                break
        return pages

    async def _pages_of_window(
        self, op: str, offset: int, limit: int | None
    ) -> tuple[list[Page], bool]:
        """Return pages, and whether they are all that the window has."""
        pages: list[Page] = []
        left = limit
        while True:
            try:
                reply = await self._ask(op, {"offset": offset, "limit": left})
            except OffsetOutOfRange:
                if not pages:
                    raise
                return pages, False  # retention removed the next rows
            page = _page_of(reply)
            count = len(page.rows)
            if pages and page.epoch != pages[0].epoch:
                return pages, False
            pages.append(page)
            offset = page.first + count
            left = None if left is None else left - count
            if not count or left == 0:
                return pages, True

    async def call(self, call: TableCall[T]) -> T:
        """Run a call on the bucket's table; it may be slow."""
        await self.drain()
        patience = Patience()
        while True:
            try:
                service = self._locator.local_service()
                if service is not None:
                    return await service.direct(lambda client: client.call(call))
                request = Request("table", {"op": call.op, "args": call.args})
                _check_sendable(request)
                replies = await self._collect(request, patience)
                return await asyncio.to_thread(wire.join_replies, call.op, replies)
            except LOST as exc:
                await self._locator.lost(exc, patience)

    async def _collect(self, request: Request, patience: Patience) -> list[Reply]:
        """Return the replies of a stream up to its end, without the keepalives."""
        collected = []
        async with aclosing(self._locator.stream(request, patience)) as replies:
            async for reply in replies:
                if reply.value == "end":
                    break
                if reply.value != "alive":
                    collected.append(reply)
        return collected

    async def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncIterator[Page]:
        position = StreamPosition(offset, limit, epoch)
        patience = Patience()
        while not position.at_limit:
            window = {
                "offset": position.offset,
                "limit": position.left,
                "block": block,
                "epoch": position.epoch,
            }
            request = Request("stream", _in_int64(window))
            try:
                async with aclosing(self._locator.stream(request, patience)) as replies:
                    async for reply in replies:
                        if reply.rows is not None:
                            page = _page_of(reply)
                            yield page._replace(rows=_as_records(page.rows))
                            if not position.advance(page):
                                return
                        elif reply.value == "end":
                            return
                        elif reply.value == "again":
                            break
            except LOST as exc:
                await self._locator.lost(exc, patience)

    async def wait(self, offset: int, epoch: int | None = None) -> None:
        # 0 means the earliest record left. If all were dropped, the next one will be at the start.
        await self._watcher.wait(offset or self._start, epoch)

    async def find(self, timestamp: int) -> int:
        return int((await self._ask("find", {"timestamp": timestamp})).value)

    async def last_number(self, writer: str) -> int:
        return int((await self._ask("last_number", {"writer": writer})).value)

    async def flush(self) -> None:
        await self.drain()
        await self._ask("flush", {})

    async def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = (await self._ask("stats", {})).value
        return {**stats, "node": self._locator.node}

    async def _ask(self, op: str, args: dict[str, Any]) -> Reply:
        return await self._locator.ask(Request(op, _in_int64(args)))


def _page_of(reply: Reply) -> Page:
    first, _, epoch = reply.value
    rows = wire.unpack_rows(reply.rows, reply.arrow) if reply.rows else []
    return Page(first, rows, epoch)


def _as_records(rows: Any) -> list[dict[str, Any]]:
    return rows if isinstance(rows, list) else rows.to_pylist()


def _joined(tables: list[pa.Table]) -> pa.Table:
    """Concatenate the pages of one read; a put between two of them may have widened the schema."""
    schema = tables[0].schema
    for table in tables[1:]:
        schema = merge(schema, table.schema, Rules(evolving=True))
    batches = [align(batch, schema) for table in tables for batch in table.to_batches()]
    return pa.Table.from_batches(batches, schema=schema)


def _in_int64(args: dict[str, Any]) -> dict[str, Any]:
    """Lower offsets and limits beyond every possible row to what a message can hold."""
    large = {name: _LARGEST_INT for name, v in args.items() if type(v) is int and v > _LARGEST_INT}
    return args | large if large else args


def _check_sendable(request: Request) -> None:
    try:
        wire.encode(request)
    except (TypeError, OverflowError, UnicodeEncodeError) as exc:
        raise InvalidArgument(
            f"{request.args['op']}: an argument has the wrong type or is out of range: {exc}"
        ) from exc
