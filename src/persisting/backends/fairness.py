"""Fairness on the event loop.

A call that never waits would keep the loop to itself, so it yields from time to time. Puts of one
producer must not overtake each other, or the earlier one would seem stored.
"""

from __future__ import annotations

import asyncio
import weakref

CALLS_PER_YIELD = 64


class FairYield:
    """Yields to the event loop once in a number of calls that needed no waiting."""

    def __init__(self) -> None:
        self._calls = 0

    async def checkpoint(self, calls: int = 1) -> None:
        """Count ``calls``, and let other tasks run if it is their turn."""
        self._calls += calls
        if self._calls >= CALLS_PER_YIELD:
            self._calls = 0
            await asyncio.sleep(0)


class KeyedLocks:
    """One lock for each name and event loop; waiters get it in the order of their calls."""

    def __init__(self) -> None:
        # An entry exists as long as a task holds the lock or waits for it.
        self._locks = weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock]()

    def of(self, name: str) -> asyncio.Lock:
        """Return the lock of a name in the running loop."""
        loop = asyncio.get_running_loop()
        return self._locks.setdefault((id(loop), name), asyncio.Lock())
