"""Run blocking work on a bucket in threads, from any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from persisting.bucket.bucket import Bucket
from persisting.bucket.snapshot import Snapshot
from persisting.concurrency.pool import in_thread
from persisting.errors import TableError

_T = TypeVar("_T")


class BucketAccess:
    """Crosses from coroutines into the threads that read, write and flush one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    async def refresh(self, *, watch: bool = False) -> None:
        """Show new records if the bucket is open without its lock; with ``watch``, later ones wake
        those who are already waiting."""
        if self.bucket.options.read_only:
            await in_thread(partial(self.bucket.refresh, watch=watch))

    async def read(self, read: Callable[[Snapshot], _T]) -> _T:
        """Call ``read`` with a snapshot in a thread.

        Start again with a new snapshot if the version was cleaned up during the read.
        """
        await self.refresh()
        while True:
            snapshot = self.bucket.snapshot()
            try:
                return await in_thread(read, snapshot)
            except TableError:
                self.bucket.expire_view()
                await self.refresh()
                if self.bucket.snapshot().view is snapshot.view:
                    raise

    async def write(self, call: Callable[..., _T], *args: Any) -> _T:
        """Run a call that changes the table; it runs to its end even if the caller is cancelled."""
        self.bucket.lifecycle.check_writable()
        return await asyncio.shield(in_thread(call, *args))

    async def flush(self) -> None:
        """Wait until everything acknowledged before this call is in the table and synced."""
        self.bucket.lifecycle.check_writable()
        await asyncio.wrap_future(self.bucket.flusher.request())
