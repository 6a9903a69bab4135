"""The async shell over a bucket: what both table backends share.

Nothing here decides about durability; it crosses into threads, waits without blocking the loop,
and leaves the bucket consistent wherever a task is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from persisting.backends.table_api import TableApi
from persisting.bucket.bucket import Bucket
from persisting.bucket.chunk import Prepared, prepare, prepare_arrow
from persisting.bucket.fairness import Queues, Turns
from persisting.bucket.group_commit import ProducerSequence
from persisting.bucket.producer_sequences import check_number, check_writer
from persisting.bucket.put_cost import check_records, is_light
from persisting.bucket.snapshot import Page, Snapshot
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.concurrency.loop_bridge import mailbox
from persisting.concurrency.pool import in_thread
from persisting.errors import OffsetOutOfRange, SchemaError, TableError
from persisting.options import BucketOptions, check_window
from persisting.records import RecordEncoder
from persisting.table.layout import EFFECTIVE
from persisting.table.versions import Version

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")
_FROZEN_PAUSE = 0.005
_SNAPSHOT_SECONDS = 5.0


class TableBackend(TableApi):
    """A bucket with an async face; the two backends differ in how they build it."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self._turns, self._writers = Turns(), Queues()
        self._closing = CoalescedTask(weak_callback(self, TableBackend._close))
        self._finished = False
        self._opened = bucket.end

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Raise :class:`InvalidArgument` for options that the constructor would refuse."""
        cls._options(bucket_id=0, storage_path=".", **options)

    @classmethod
    def _options(cls, **given: Any) -> BucketOptions:
        raise NotImplementedError

    # Putting

    async def put(self, record: dict[str, Any]) -> None:
        """Store a single record."""
        bucket = self._bucket
        if bucket.is_full:
            await self._make_room()
        if bucket.journal is None:
            if bucket.add_row(record):
                return await self._turns.take()
        else:
            entry = bucket.reserve_row(record)
            if entry is not None:
                return await entry.future
        await self._store(lambda shaper: prepare(shaper, [record]), small=is_light([record]))

    async def put_batch(self, records: list[dict[str, Any]]) -> None:
        """Store multiple records, all or none."""
        if self._bucket.is_full:
            await self._make_room()
        rows = check_records(records)
        await self._store(lambda shaper: prepare(shaper, rows), small=is_light(rows))

    async def put_arrow(self, data: pa.Table | pa.RecordBatch) -> None:
        """Store the rows of an Arrow table or batch, all or none."""
        if self._bucket.is_full:
            await self._make_room()
        await self._store(lambda shaper: prepare_arrow(shaper, data), small=False)

    async def put_once(
        self, rows: list[dict[str, Any]] | pa.Table, writer: str, number: int
    ) -> None:
        """Store rows unless the writer has stored this number, or a later one, before.

        The mark is kept with the rows, in the log and in the table: a retry is safe across a
        crash of either side.
        """
        check_writer(writer)
        mark = writer, check_number(number)
        records = check_records(rows) if isinstance(rows, list) else []
        # In turn until it has its place in the log: then those behind it share its sync.
        async with self._writers.of(writer):
            if self._bucket.is_full:
                await self._make_room()
            if isinstance(rows, list):
                light = is_light(records)
                waiting = await self._accept(lambda s: prepare(s, records), small=light, mark=mark)
            else:
                waiting = await self._accept(
                    lambda s: prepare_arrow(s, rows), small=False, mark=mark
                )
        if waiting is not None:
            # A retry of the same mark may wait for it too: cancelling one leaves it.
            await asyncio.shield(waiting)

    def last_number(self, writer: str) -> int:
        """The last number that :meth:`put_once` stored for a writer, -1 if none is known."""
        return self._bucket.writers.last(writer)

    async def _store(
        self, prepared_for: Callable[[RecordEncoder], Prepared], *, small: bool
    ) -> None:
        waiting = await self._accept(prepared_for, small=small)
        if waiting is not None:
            await waiting

    async def _accept(
        self,
        prepared_for: Callable[[RecordEncoder], Prepared],
        *,
        small: bool,
        mark: ProducerSequence | None = None,
    ) -> asyncio.Future[None] | None:
        """Prepare against the schema at hand until it still is the schema when accepted.

        Where there is a log, the future of its acknowledgement.
        """
        bucket = self._bucket
        while True:
            bucket.check_writable()
            if bucket.frozen:
                await self._make_room()
            shaper = bucket.shaper
            try:
                prepared = prepared_for(shaper) if small else await in_thread(prepared_for, shaper)
            except pa.ArrowException as exc:
                raise SchemaError(f"the records cannot be converted: {exc}") from exc
            if not prepared.chunks:
                return None
            if prepared.widened:
                await in_thread(bucket.learn_large, prepared.widened)
            if bucket.needs_agreement(prepared) and not await in_thread(bucket.agree, prepared):
                continue
            if bucket.journal is None:
                if bucket.admit(prepared, mark):
                    await self._turns.take()
                    return None
            else:
                entry = bucket.reserve(prepared, mark)
                if entry is not None and entry.box is not mailbox():
                    # The same mark, on its way from another loop: see what becomes of it.
                    await asyncio.wrap_future(bucket.journal.drain())
                elif entry is not None:
                    return entry.future

    async def _make_room(self) -> None:
        self._bucket.check_writable()
        while self._bucket.is_full:
            if self._bucket.frozen:
                await asyncio.sleep(_FROZEN_PAUSE)
            else:
                await asyncio.wrap_future(self._bucket.request_flush())

    # Reading

    async def get(
        self, offset: int = 0, limit: int | None = None, *, version: Version | None = None
    ) -> list[dict[str, Any]]:
        """Retrieve records: persisted rows, then the buffer, in order.

        ``version`` reads an older state of the table: a number, a tag's name, or a datetime.
        """
        if version is not None:
            check_window(offset, limit)
            return await self.read_at(version, offset, limit)
        found: list[dict[str, Any]] = (await self.read(offset, limit)).rows
        return found

    async def read(self, offset: int = 0, limit: int | None = None) -> Page:
        """As :meth:`get`, and which offset the first of the records has."""
        check_window(offset, limit)
        await self._refresh()
        snapshot = self._bucket.snapshot()
        first = snapshot.first(offset)
        if snapshot.is_quick(first, limit):
            await self._turns.take()
            return Page(first, snapshot.records(first, limit), snapshot.epoch)
        return await self._reading(lambda s: _page(s, s.records, offset, limit))

    async def get_arrow(
        self, offset: int = 0, limit: int | None = None, *, version: Version | None = None
    ) -> pa.Table:
        """Retrieve records as an Arrow table; ``version`` as in :meth:`get`."""
        if version is not None:
            check_window(offset, limit)
            return await self.arrow_at(version, offset, limit)
        return (await self.read_arrow(offset, limit)).rows

    async def read_arrow(self, offset: int = 0, limit: int | None = None) -> Page:
        """As :meth:`get_arrow`, and which offset the first row has."""
        check_window(offset, limit)
        return await self._reading(lambda s: _page(s, s.table, offset, limit))

    async def get_stream(
        self, offset: int = 0, limit: int | None = None, block: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream single records; with ``block`` wait for new ones when caught up."""
        self._bucket.check_open()
        await self._refresh()
        epoch = self._bucket.epoch
        async with aclosing(self.get_pages(offset, limit, block)) as pages:
            async for page in pages:
                if page.epoch != epoch:
                    raise OffsetOutOfRange(
                        "the bucket was restored to an older version while it was read; it ends "
                        f"at offset {self._bucket.end} now. Read on from there"
                    )
                for record in page.rows:
                    yield record

    async def get_pages(
        self,
        offset: int = 0,
        limit: int | None = None,
        block: bool = False,
        epoch: int | None = None,
    ) -> AsyncGenerator[Page]:
        """Stream records in pages; an empty one says that the epoch is not ``epoch`` (any more).

        A slow consumer sees no version for long, so that none is cleaned up under it.
        """
        check_window(offset, limit)
        self._bucket.check_open()
        left = limit
        while (left is None or left > 0) and not self._bucket.closed:
            await self._refresh()
            snapshot = self._bucket.snapshot()
            if epoch is not None and snapshot.epoch != epoch:
                yield Page(offset, [], snapshot.epoch)
                return
            epoch = snapshot.epoch
            offset = snapshot.first(offset)
            if snapshot.window(offset, left):
                pages = snapshot.pages(offset, left)
                quick = snapshot.is_quick(offset, left)
                until = time.monotonic() + _SNAPSHOT_SECONDS
                while time.monotonic() < until:
                    try:
                        rows = next(pages, None) if quick else await in_thread(_next, pages)
                    except TableError:
                        await self._refresh()
                        if self._bucket.snapshot().view.version == snapshot.view.version:
                            raise
                        break  # its version was cleaned up meanwhile
                    if not rows:
                        break
                    await self._turns.take()
                    yield Page(offset, rows, epoch)
                    offset += len(rows)
                    left = None if left is None else left - len(rows)
            elif not block:
                return
            else:
                await self._bucket.wait_beyond(offset, epoch)

    async def wait_beyond(self, offset: int, epoch: int | None = None) -> None:
        """Return when there may be records beyond ``offset``, or the epoch has changed; raises
        once closed."""
        while self._bucket.end <= offset and epoch in (None, self._bucket.epoch):
            self._bucket.check_open()
            await self._refresh()
            await self._bucket.wait_beyond(offset, epoch)

    async def offset_at(self, timestamp: int) -> int:
        """The first offset whose record arrived at ``timestamp`` (µs of Unix time) or later."""
        return await self._reading(lambda snapshot: snapshot.offset_at(timestamp))

    def epoch(self) -> int:
        """How often the bucket was restored to an older version."""
        return self._bucket.epoch

    def end_offset(self) -> int:
        """The offset after the last record."""
        bucket = self._bucket
        if bucket.options.read_only and not bucket.closed:
            bucket.refresh()
        return bucket.end

    # Upkeep and facts

    def total_count(self) -> int:
        """Get total record count (buffer + persisted)."""
        bucket = self._bucket
        if bucket.options.read_only and not bucket.closed:
            bucket.refresh()
        return sum(bucket.counts)

    async def stats(self) -> dict[str, Any]:
        """Get storage statistics."""
        await self._refresh()
        await self._turns.take()
        bucket, options = self._bucket, self._bucket.options
        snapshot = bucket.snapshot_of_any()
        persisted = snapshot.persisted - snapshot.start
        buffered = snapshot.end - snapshot.persisted
        return {
            "bucket_id": options.bucket_id,
            "backend": type(self).__name__,
            "total_count": persisted + buffered,
            "buffer_count": buffered,
            "persisted_count": persisted,
            "start_offset": snapshot.start,
            "opened_offset": self._opened,
            "end_offset": snapshot.end,
            "epoch": snapshot.epoch,
            "storage_path": str(options.storage_path),
            "version": snapshot.view.version,
            "fragments": len(snapshot.view.sizes),
            "table_bytes": sum(size.nbytes for size in snapshot.view.sizes),
            "upkeep_error": bucket.upkeep.error,
            "flush_count": bucket.flushes,
            "flush_error": bucket.flush_error,
            "compression": options.compression,
            "compression_effective": EFFECTIVE[options.compression],
            "read_only": options.read_only,
        }

    async def close(self) -> None:
        """Flush and give the bucket back; may be called twice.

        If the flush fails the error is raised, the backend stays open and keeps every record, and
        ``close`` can be called again once the cause is gone.
        """
        # One close for all who ask, from whichever loop; a cancelled one leaves it to its end.
        await asyncio.shield(asyncio.wrap_future(self._closing.request()))

    def close_now(self) -> None:
        """The same in this thread, for who alone has the backend."""
        self._close()

    def _close(self) -> None:
        """In one thread from begin to end: to wait here for another one in the pool might be to
        wait for ever."""
        if self._finished:
            return
        bucket = self._bucket
        bucket.begin_close()
        try:
            if bucket.journal is not None:
                bucket.journal.write_now()
            if not bucket.options.read_only:
                bucket.flush_now()
        except BaseException:
            bucket.cancel_close()
            raise
        bucket.finish_close()
        self._finished = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _page(
    snapshot: Snapshot, read: Callable[[int, int | None], Any], offset: int, limit: int | None
) -> Page:
    first = snapshot.first(offset)
    return Page(first, read(first, limit), snapshot.epoch)


def _next(pages: Iterator[list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    return next(pages, None)
