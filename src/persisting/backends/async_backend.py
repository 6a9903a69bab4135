"""The async shell over a bucket: into a thread and back, and to disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from persisting.bucket.bucket import Bucket
from persisting.bucket.snapshot import Snapshot
from persisting.concurrency.pool import in_thread
from persisting.errors import TableError

_T = TypeVar("_T")


class AsyncBackend:
    """A bucket that is read in threads."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    @property
    def bucket(self) -> Bucket:
        """The synchronous core, for code that blocks: bulk writers own a bucket for a moment."""
        return self._bucket

    async def flush(self) -> None:
        """Persist buffered data; returns when it is in the table and synced."""
        self._bucket.check_writable()
        await asyncio.wrap_future(self._bucket.request_flush())

    async def _refresh(self) -> None:
        """For a reader without the lock: look for a new version."""
        if self._bucket.options.read_only:
            await in_thread(self._bucket.refresh)

    async def _reading(self, read: Callable[[Snapshot], _T]) -> _T:
        """Read in a thread. What takes so long that its version was cleaned up begins again."""
        await self._refresh()
        while True:
            snapshot = self._bucket.snapshot()
            try:
                return await in_thread(read, snapshot)
            except TableError:
                await self._refresh()
                if self._bucket.snapshot().view.version == snapshot.view.version:
                    raise
