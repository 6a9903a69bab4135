"""Several buckets as one stream, fairly: each is read ahead by a page, and they take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from persisting.bucket.snapshot import Page

_PAGES_AHEAD = 2


class Turn(NamedTuple):
    """The next page, and the bucket it is from."""

    bucket: int
    page: Page


class Ended(Exception):
    """All sources have come to their end."""


class Merged:
    """Reads several sources at once; an error of one is raised, and ends all."""

    def __init__(self, sources: dict[int, Callable[[], Any]]) -> None:
        self._queue: asyncio.Queue[tuple[int, Page | BaseException | None]] = asyncio.Queue(
            _PAGES_AHEAD * max(1, len(sources))
        )
        self._tasks = [
            asyncio.create_task(_pump(bucket, source, self._queue))
            for bucket, source in sources.items()
        ]
        self._running = len(self._tasks)
        self._getting: asyncio.Task[Any] | None = None
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Let :meth:`next` raise :class:`Ended`, also where it waits just now."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def next(self, timeout: float | None) -> Turn | None:
        """The next page, None if ``timeout`` seconds were over before; raises :class:`Ended`."""
        while self._running:
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
                return Turn(bucket, page)
            self._running -= 1
        raise Ended

    async def close(self) -> None:
        """Stop reading."""
        tasks = [*self._tasks, *([self._getting] if self._getting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(bucket: int, source: Callable[[], Any], queue: asyncio.Queue[Any]) -> None:
    try:
        async with aclosing(source()) as stream:
            async for page in stream:
                await queue.put((bucket, page))
    except Exception as exc:
        await queue.put((bucket, exc))
    else:
        await queue.put((bucket, None))
