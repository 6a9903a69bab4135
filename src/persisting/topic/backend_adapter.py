"""Reading backends that have the protocol's methods and no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from persisting.bucket.snapshot import Page

_PAGE = 1000
_POLL = 0.05


async def custom_pages(
    backend: Any, offset: int, limit: int | None, block: bool
) -> AsyncIterator[Page]:
    """Records in pages, by ``get``; waiting for new ones is left to the backend's own stream."""
    left = limit
    while left is None or left > 0:
        page = await backend.get(offset, _PAGE if left is None else min(_PAGE, left))
        if not page:
            break
        left = None if left is None else left - len(page)
        yield Page(offset, page)
        offset += len(page)
    if block and left != 0:
        async for record in backend.get_stream(offset, left, True):
            yield Page(offset, [record])
            offset += 1


async def wait_by_polling(backend: Any, offset: int) -> None:
    """Return when the backend holds more than ``offset`` records."""
    while backend.total_count() <= offset:  # noqa: ASYNC110 (the protocol has no event)
        await asyncio.sleep(_POLL)
