"""Read a bucket in pages: windows of records, streams, and waiting for new records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from persisting.backends.bucket_access import BucketAccess
from persisting.backends.fairness import FairYield
from persisting.bucket.snapshot import Page, Snapshot
from persisting.concurrency.loop_bridge import next_wake
from persisting.concurrency.pool import in_thread
from persisting.errors import OffsetOutOfRange, TableError
from persisting.options import check_window

_SNAPSHOT_SECONDS = 5.0
"""How long a stream reads from one snapshot, so that its version can be cleaned up soon."""


class BucketReader:
    """Reads table rows, then the buffer, in order.

    Streams hand over pages of ``batch_size`` rows. What is read and converted in one step is a
    larger block, so that small pages do not make a stream slow.
    """

    def __init__(self, access: BucketAccess, fairness: FairYield) -> None:
        self._access, self._bucket = access, access.bucket
        self._fairness = fairness
        self._page_rows = access.bucket.options.batch_size

    async def read(self, offset: int, limit: int | None) -> Page:
        """Read a window of records."""
        check_window(offset, limit)
        await self._access.refresh()
        snapshot = self._bucket.snapshot()
        first = snapshot.first(offset)
        if snapshot.is_quick(first, limit):
            await self._fairness.checkpoint()
            return Page(first, snapshot.records(first, limit), snapshot.epoch)
        return await self._access.read(lambda s: _page(s, s.records, offset, limit))

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        """Read a window of records as an Arrow table."""
        check_window(offset, limit)
        return await self._access.read(lambda s: _page(s, s.table, offset, limit))

    async def stream(
        self, offset: int, limit: int | None, block: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream single records; raise if the bucket is restored to an older version meanwhile."""
        self._bucket.lifecycle.check_open()
        await self._access.refresh()
        epoch = self._bucket.epoch
        async with aclosing(self._blocks(offset, limit, block)) as blocks:
            async for page in blocks:
                if page.epoch != epoch:
                    raise OffsetOutOfRange(
                        "the bucket was restored to an older version during the read and now ends "
                        f"at offset {self._bucket.end}; continue from there"
                    )
                for record in page.rows:
                    yield record

    async def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncGenerator[Page]:
        """Stream pages; an empty page says that the bucket's epoch is not ``epoch``."""
        step = self._page_rows
        async with aclosing(self._blocks(offset, limit, block, epoch)) as blocks:
            async for first, rows, block_epoch in blocks:
                if len(rows) <= step:
                    yield Page(first, rows, block_epoch)
                    continue
                for start in range(0, len(rows), step):
                    yield Page(first + start, rows[start : start + step], block_epoch)

    async def _blocks(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncGenerator[Page]:
        """Stream blocks: whole pages that are read and converted in one step.

        The snapshot is renewed every few seconds, so that a slow consumer does not depend on a
        version that is cleaned up.
        """
        check_window(offset, limit)
        self._bucket.lifecycle.check_open()
        left = limit
        while (left is None or left > 0) and not self._bucket.lifecycle.closed:
            await self._access.refresh()
            snapshot = self._bucket.snapshot()
            if epoch is not None and snapshot.epoch != epoch:
                yield Page(offset, [], snapshot.epoch)
                return
            epoch = snapshot.epoch
            offset = snapshot.first(offset)
            if snapshot.window(offset, left):
                blocks = snapshot.blocks(offset, left, self._page_rows)
                quick = snapshot.is_quick(offset, left)
                until = time.monotonic() + _SNAPSHOT_SECONDS
                while time.monotonic() < until:
                    try:
                        rows = next(blocks, None) if quick else await in_thread(_next, blocks)
                    except TableError:
                        self._bucket.expire_view()
                        await self._access.refresh()
                        if self._bucket.snapshot().view is snapshot.view:
                            raise
                        break  # the snapshot's version was cleaned up: continue with a new one
                    if not rows:
                        break
                    await self._fairness.checkpoint()
                    yield Page(offset, rows, epoch)
                    offset += len(rows)
                    left = None if left is None else left - len(rows)
            elif not block:
                return
            else:
                await self._next_change(offset, epoch)
        if not block and (left is None or left > 0):
            self._bucket.lifecycle.check_open()  # the caller must not take a part for all there is

    async def wait_beyond(self, offset: int, epoch: int | None) -> None:
        """Wait until there may be records beyond ``offset`` or the epoch has changed."""
        while self._bucket.ends_before(offset) and epoch in (None, self._bucket.epoch):
            self._bucket.lifecycle.check_open()
            await self._next_change(offset, epoch)

    async def _next_change(self, offset: int, epoch: int | None) -> None:
        """Wait until there may be records beyond ``offset``, the epoch is not ``epoch``, or the
        bucket is closed."""
        bucket = self._bucket
        with next_wake(bucket.waiters) as woken:
            await self._access.refresh(watch=True)
            if (
                bucket.ends_before(offset)
                and not bucket.lifecycle.closed
                and epoch in (None, bucket.epoch)
            ):
                if bucket.wait_seconds is None:
                    await woken
                else:
                    await asyncio.wait([woken], timeout=bucket.wait_seconds)

    async def offset_at(self, timestamp: int) -> int:
        """Return the first offset whose record arrived at ``timestamp`` or later."""
        return await self._access.read(lambda snapshot: snapshot.offset_at(timestamp))

    async def arrival_of(self, offset: int) -> int:
        """Return the time at which a record arrived, 0 if it is not there."""
        return await self._access.read(lambda snapshot: snapshot.arrival_of(offset))


def _page(
    snapshot: Snapshot, read: Callable[[int, int | None], Any], offset: int, limit: int | None
) -> Page:
    first = snapshot.first(offset)
    return Page(first, read(first, limit), snapshot.epoch)


def _next(blocks: Iterator[list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    return next(blocks, None)
