"""One timer thread for the process: sync intervals, flush intervals, retries.

It only starts work elsewhere: the functions it calls must be short and must not block.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("persisting")


class _Timer:
    """One daemon thread that calls functions at given times."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], Any]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def after(self, seconds: float, call: Callable[[], Any]) -> None:
        with self._wake:
            self._ensure_thread()
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._numbers), call))
            self._wake.notify()

    def start(self) -> None:
        with self._wake:
            self._ensure_thread()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="persisting-timer", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._heap:
                    self._wake.wait()
                due = self._heap[0][0] - time.monotonic()
                if due > 0:
                    self._wake.wait(due)
                    continue
                call = heapq.heappop(self._heap)[2]
            try:
                call()
            except Exception:  # other callbacks still need the timer
                log.exception("a scheduled callback failed")


_timer = _Timer()


def start_timer() -> None:
    """Start the timer's thread, or raise RuntimeError; later calls of :func:`after` need it."""
    _timer.start()


def after(seconds: float, call: Callable[[], Any]) -> None:
    """Call a short, non-blocking function in ``seconds``; it must not raise."""
    _timer.after(seconds, call)


def _reset_after_fork() -> None:
    """Start with a new timer: a forked process has none of its parent's threads."""
    global _timer
    _timer = _Timer()


os.register_at_fork(after_in_child=_reset_after_fork)
