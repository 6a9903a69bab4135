"""Merges the streams of several buckets fairly: pages are read ahead and delivered in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from persisting.bucket.snapshot import Page

_PAGES_AHEAD = 2


class BucketPage(NamedTuple):
    """A page, and the bucket it comes from."""

    bucket: int
    page: Page


class EndOfStreams(Exception):
    """All streams have ended, or the merge was stopped."""


class StreamMerge:
    """Reads several streams concurrently; an error in one of them ends the merge."""

    def __init__(self, streams: dict[int, Callable[[], AsyncIterator[Page]]]) -> None:
        self._queue: asyncio.Queue[tuple[int, Page | BaseException | None]] = asyncio.Queue(
            _PAGES_AHEAD * max(1, len(streams))
        )
        self._tasks = [
            asyncio.create_task(_pump(bucket, stream, self._queue))
            for bucket, stream in streams.items()
        ]
        self._running = len(self._tasks)
        self._getting: asyncio.Task[Any] | None = None
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Make :meth:`next` raise :class:`EndOfStreams`, even in a call that is waiting."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def next(self, timeout: float | None) -> BucketPage | None:
        """Return the next page, None after ``timeout`` seconds; raise at the end of all streams."""
        while self._running and not self._stopped.done():
            if self._getting is None and not self._queue.empty():
                bucket, page = self._queue.get_nowait()  # no task: pages may be small
            else:
                if self._getting is None:
                    self._getting = asyncio.create_task(self._queue.get())
                done, _ = await asyncio.wait(
                    [self._getting, self._stopped],
                    timeout=timeout,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    return None
                if self._stopped.done():
                    break
                bucket, page = self._getting.result()
                self._getting = None
            if isinstance(page, BaseException):
                raise page
            if page is not None:
                return BucketPage(bucket, page)
            self._running -= 1
        raise EndOfStreams

    async def close(self) -> None:
        """Stop reading."""
        tasks = [*self._tasks, *([self._getting] if self._getting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    bucket: int, stream: Callable[[], AsyncIterator[Page]], queue: asyncio.Queue[Any]
) -> None:
    try:
        async with aclosing(stream()) as pages:  # type: ignore[type-var]
            async for page in pages:
                await queue.put((bucket, page))
    except Exception as exc:
        await queue.put((bucket, exc))
    else:
        await queue.put((bucket, None))
