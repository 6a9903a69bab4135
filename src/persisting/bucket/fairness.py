"""Letting others run: calls that never wait would keep the event loop to themselves, and calls
of one writer that overtake each other would make the earlier one look stored."""

from __future__ import annotations

import asyncio
import weakref

CALLS_PER_TURN = 64


class Turns:
    """Counts calls that needed no waiting, and waits for one turn of the loop now and then."""

    def __init__(self) -> None:
        self._calls = 0

    async def take(self) -> None:
        self._calls += 1
        if self._calls % CALLS_PER_TURN == 0:
            await asyncio.sleep(0)


class Queues:
    """One call at a time for each name, in the order in which an event loop made them."""

    def __init__(self) -> None:
        # A lock is there as long as somebody holds it or waits for it.
        self._locks = weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock]()

    def of(self, name: str) -> asyncio.Lock:
        """The lock to hold meanwhile."""
        loop = asyncio.get_running_loop()
        return self._locks.setdefault((id(loop), name), asyncio.Lock())
