"""Callbacks of consumers that wait for the next record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Waiters:
    """Callbacks that :meth:`wake` calls once each, from any thread."""

    def __init__(self) -> None:
        # Reentrant: a waiter of a closed loop is removed by garbage collection, which may run in
        # a thread that holds this lock.
        self._lock = threading.RLock()
        self._callbacks: dict[object, Callable[[], None]] = {}

    @contextmanager
    def waiting(self, callback: Callable[[], None]) -> Iterator[None]:
        """Have the next wake call ``callback``. Check the state inside the context, then wait."""
        key = object()
        with self._lock:
            self._callbacks[key] = callback
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.pop(key, None)

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._callbacks

    def wake(self) -> None:
        """Call every callback that waits."""
        if not self._callbacks:
            return
        with self._lock:
            callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks.values():
            callback()
