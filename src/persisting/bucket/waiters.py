"""Consumers that wait for the next record, each in its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from persisting.concurrency import loop_bridge


class Waiters:
    """Futures that :meth:`wake` resolves, from whatever thread."""

    def __init__(self) -> None:
        # Whoever waited in a loop that is gone leaves when its garbage is collected: anywhere, so
        # perhaps in a thread that holds this very lock.
        self._guard = threading.RLock()
        self._futures: dict[asyncio.Future[None], loop_bridge.LoopMailbox] = {}

    @contextmanager
    def waiting(self) -> Iterator[asyncio.Future[None]]:
        """A future for the next wake. Look at the state inside the context, then await it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        box = loop_bridge.mailbox()
        with self._guard:
            self._futures[future] = box
        try:
            yield future
        finally:
            with self._guard:
                self._futures.pop(future, None)

    def wake(self) -> None:
        """Resolve every waiting future."""
        if not self._futures:
            return
        with self._guard:
            futures, self._futures = self._futures, {}
        for future, box in futures.items():
            box.post(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
