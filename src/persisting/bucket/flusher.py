"""When a bucket flushes: at a number of rows, after an interval, on request, and again after a
failure."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from persisting.concurrency import timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.metrics import BucketMetrics

log = logging.getLogger("persisting")

_RETRY_SECONDS = 1.0
FLUSH_PAUSE = 0.1
"""Minimum seconds between two flushes that the threshold starts, of all buckets that share a log:
they compete for the same processors and the same disk."""


class FlushTurns:
    """Spaces the flushes of the buckets that share a log."""

    def __init__(self) -> None:
        self._next = 0.0
        self._guard = threading.Lock()

    def seconds_to_wait(self) -> float:
        """Take the next turn, and return how long to wait for it."""
        with self._guard:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + FLUSH_PAUSE
            return turn - now


class Flusher:
    """Runs the flushes of one bucket, one at a time."""

    def __init__(
        self,
        folder: Path,
        metrics: BucketMetrics,
        interval: float | None,
        commit: Callable[[], bool],
        buffered: Callable[[], int],
        after_flush: Callable[[], None],
        turns: Callable[[], FlushTurns | None],
        least_pause: float = 0.0,
    ) -> None:
        """``commit`` writes the buffer to the table and returns whether there was anything;
        ``buffered`` returns the rows that are left, ``turns`` the turns of the bucket's log. None
        of the callables may keep the bucket alive. ``least_pause`` is the least time between two
        flushes that the threshold starts, in seconds, if a flush is expensive."""
        self.error: str | None = None
        self.count = 0
        self.seconds = 0.0
        """Seconds that all these flushes took."""
        self.lock = threading.Lock()
        """Held during a flush. The first lock of all: nothing else is held when it is taken."""
        self._folder, self._metrics, self._interval = folder, metrics, interval
        self._commit, self._buffered, self._after_flush = commit, buffered, after_flush
        self._turns, self._least_pause = turns, least_pause
        self._task = CoalescedTask(weak_callback(self, Flusher.flush))
        self._interval_due = self._pause_due = self._retry_due = False
        self._flushed_at = -math.inf
        self._stopped = False

    def request(self) -> Future[None]:
        """Return the future of a flush of everything acknowledged before this call."""
        return self._task.request()

    def stop(self) -> None:
        """Stop starting flushes: the bucket is closed."""
        self._stopped = True

    def resume(self) -> None:
        """Undo :meth:`stop`: the bucket stays open."""
        self._stopped = False

    def soon(self, *, urgent: bool) -> None:
        """Flush at the threshold, but not right after the last flush unless it is ``urgent``.

        Many small commits cost more than one, and the waiting records are no less safe.
        """
        if self._task.pending or (self._pause_due and not urgent):
            return
        if urgent:
            self.request()
            return
        least = max(FLUSH_PAUSE, self._least_pause)
        pause = self._flushed_at + least - time.monotonic()
        if self._task.active:
            pause = least  # a flush is running: the pause begins with its end
        turns = self._turns()
        if turns is not None:
            pause = max(pause, turns.seconds_to_wait())
        if pause <= 0:
            self.request()
        else:
            self._pause_due = True
            timer.after(pause, weak_callback(self, Flusher.after_pause))

    def after_pause(self) -> None:
        """Flush what has gathered since the last flush."""
        self._pause_due = False
        if self._buffered() and not self._stopped and not self._task.pending:
            self.request()

    def at_interval(self) -> None:
        """Flush when the interval is over, if there is one."""
        if not self._interval_due and self._interval is not None:
            self._interval_due = True
            timer.after(self._interval, weak_callback(self, Flusher._after_interval))

    def _after_interval(self) -> None:
        self._interval_due = False
        if self._buffered() and not self._stopped:
            self.request()

    def flush(self) -> None:
        """Flush in this thread."""
        started = time.perf_counter()
        with self._errors_retried():
            flushed = self._commit()
        self.error = None
        self._flushed_at = time.monotonic()
        if flushed:
            seconds = time.perf_counter() - started
            self.count += 1
            self.seconds += seconds
            self._metrics.flushed(seconds, self._buffered())
            self._after_flush()

    @contextmanager
    def _errors_retried(self) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            self.error = str(exc) or type(exc).__name__
            self._metrics.flush_failed()
            log.error("flush of %s failed: %s", self._folder, exc)
            if not self._retry_due:  # else every put that fails would add another series of them
                self._retry_due = True
                timer.after(_RETRY_SECONDS, weak_callback(self, Flusher._retry))
            raise

    def _retry(self) -> None:
        self._retry_due = False
        if self.error is not None and not self._stopped:
            self.request()
