"""Several buckets as one stream, fairly: each is read ahead by a page, and they take turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

Page = list[dict[str, Any]]
_PAGES_AHEAD = 2


async def merged(
    pages: dict[int, Callable[[], Any]],
) -> AsyncGenerator[tuple[int, Page]]:
    """(bucket, page) from each source until all have ended; an error of one ends all."""
    queue: asyncio.Queue[tuple[int, Page | BaseException | None]] = asyncio.Queue(
        _PAGES_AHEAD * max(1, len(pages))
    )
    tasks = [asyncio.create_task(_pump(bucket, source, queue)) for bucket, source in pages.items()]
    try:
        running = len(tasks)
        while running:
            bucket, page = await queue.get()
            if page is None:
                running -= 1
            elif isinstance(page, BaseException):
                raise page
            else:
                yield bucket, page
    finally:
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
