"""Waiting for records: one stream of a bucket's end serves every reader that waits."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from persisting.cluster.locator import LOST, OwnerLocator, Patience
from persisting.cluster.wire import Request
from persisting.errors import BucketClosed

IDLE_SECONDS = 30.0
"""How long the stream stays open after the last reader stopped waiting."""


class EndWatcher:
    """Follows the end of a bucket while a caller waits; a stream per wait would pile up at the
    owner."""

    def __init__(self, locator: OwnerLocator) -> None:
        self._locator = locator
        self._end = 0
        self._epoch: int | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_watching(self) -> bool:
        return self._task is not None and not self._task.done()

    async def wait(self, offset: int, epoch: int | None) -> None:
        """Wait until there are records beyond ``offset``, or the epoch is not ``epoch``; None
        stands for any epoch."""
        while self._end <= offset and (epoch is None or self._epoch in (None, epoch)):
            if self._closed:
                raise BucketClosed("the reader was closed")
            if not self.is_watching:
                self._task = asyncio.create_task(self._watch())
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)

    async def close(self) -> None:
        """Stop watching; waiting readers raise."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        try:
            await self._follow()
        except Exception as exc:
            self._wake(exc)
        finally:
            self._end, self._epoch = 0, None  # out of date from now on
            self._wake()  # readers that still wait start the next watch

    async def _follow(self) -> None:
        """Follow the bucket's end until nobody has waited for ``IDLE_SECONDS``."""
        patience = Patience()
        needed = time.monotonic()
        while time.monotonic() - needed < IDLE_SECONDS:
            try:
                async with aclosing(self._locator.stream(Request("watch"), patience)) as replies:
                    async for reply in replies:
                        if self._waiting:
                            needed = time.monotonic()
                        if isinstance(reply.value, list):
                            self._end, self._epoch = reply.value
                            self._wake()
                        if reply.value == "again" or time.monotonic() - needed >= IDLE_SECONDS:
                            break
            except LOST as exc:
                await self._locator.lost(exc, patience)

    def _wake(self, exc: Exception | None = None) -> None:
        for future in self._waiting:
            if not future.done():
                if exc is None:
                    future.set_result(None)
                else:
                    future.set_exception(exc)
