"""Consumers that wait for the next record, each in its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from persisting.concurrency import loop_bridge


class Waiters:
    """Futures that :meth:`wake` resolves, from any thread."""

    def __init__(self) -> None:
        # Reentrant: a waiter of a closed loop is removed by garbage collection, which may run in
        # a thread that holds this lock.
        self._lock = threading.RLock()
        self._futures: dict[asyncio.Future[None], loop_bridge.LoopMailbox] = {}

    @contextmanager
    def waiting(self) -> Iterator[asyncio.Future[None]]:
        """Yield a future of the next wake. Check the state inside the context, then await it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        box = loop_bridge.mailbox()
        with self._lock:
            self._futures[future] = box
        try:
            yield future
        finally:
            with self._lock:
                self._futures.pop(future, None)

    def wake(self) -> None:
        """Resolve every waiting future."""
        if not self._futures:
            return
        with self._lock:
            futures, self._futures = self._futures, {}
        for future, box in futures.items():
            box.post(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
