"""Threads for blocking work: one shared pool, one timer, and jobs that never overlap themselves.

A bucket owns no thread. What blocks (syncs, Lance, conversions of many rows) runs in the pool, or
where it is the short work of every put in the threads of :mod:`persisting.hops`;
what must happen later (a sync interval, a flush interval) is handed to the timer, which only
submits to the pool.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from persisting import hops

log = logging.getLogger("persisting")

_T = TypeVar("_T")
_R = TypeVar("_R")

POOL_THREADS = 16

_pool: ThreadPoolExecutor | None = None
_pool_guard = threading.Lock()


def pool() -> ThreadPoolExecutor:
    """The process's pool for blocking work."""
    global _pool
    with _pool_guard:
        if _pool is None:
            _pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="persisting")
        return _pool


def weakly(owner: _T, method: Callable[[_T], Any]) -> Callable[[], Any]:
    """A call of ``method`` that does not keep its owner alive, and does nothing once it is gone."""
    ref = weakref.ref(owner)

    def call() -> Any:
        alive = ref()
        return method(alive) if alive is not None else None

    return call


async def in_thread(call: Callable[..., _R], *args: Any) -> _R:
    """Run blocking work in the pool."""
    return await asyncio.get_running_loop().run_in_executor(pool(), call, *args)


async def in_thread_or_undo(undo: Callable[[_R], None], call: Callable[..., _R], *args: Any) -> _R:
    """Run blocking work in the pool; if the caller is cancelled, undo what it did after all."""
    future = asyncio.get_running_loop().run_in_executor(pool(), call, *args)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:

        def finish(done: asyncio.Future[_R]) -> None:
            if not done.cancelled() and done.exception() is None:
                undo(done.result())

        future.add_done_callback(finish)
        raise


async def within(awaitable: Awaitable[_R], seconds: float | None) -> _R:
    """The result, or ``asyncio.TimeoutError``. Unlike ``asyncio.wait_for`` before Python 3.12 it
    never swallows a cancellation."""
    task = asyncio.ensure_future(awaitable)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    except BaseException:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise asyncio.TimeoutError
    return task.result()


class SharedJob:
    """A job of which one run goes on at a time, and whose runs are shared.

    :meth:`request` returns a future of a run that **begins after the call**, so that a caller
    knows its own state was seen; callers that arrive while a run is under way share the next.
    """

    def __init__(self, run: Callable[[], Any], *, short: bool = False) -> None:
        """A ``short`` job waits for none that is in the pool."""
        self._run, self._short = run, short
        self._guard = threading.Lock()
        self._waiting: list[Future[Any]] = []
        self._wanted = False
        self._active = self._running = False

    def request(self) -> Future[Any]:
        future: Future[Any] = Future()
        with suppress(hops.NoThread):  # the future tells
            self._want([future])
        return future

    def want(self) -> None:
        """As :meth:`request`, for those who wait for nothing: ``run`` tells of its own failures."""
        self._want([])

    def _want(self, waiting: list[Future[Any]]) -> None:
        try:
            with self._guard:
                self._waiting += waiting
                self._wanted = True
                start = not self._active
                self._active = True
            if start:
                self._submit()
        except hops.NoThread as exc:
            with self._guard:
                refused, self._waiting = self._waiting, []
                self._wanted = self._active = False
            for one in refused:
                if one.set_running_or_notify_cancel():
                    one.set_exception(exc)
            raise
        except BaseException:
            # A signal's exception, perhaps before it was submitted; twice does no harm.
            self._submit()
            raise

    def _submit(self) -> None:
        if self._short:
            hops.submit(self._work)
            return
        try:
            pool().submit(self._work)
        except RuntimeError as exc:  # also where the interpreter is going down
            raise hops.NoThread(str(exc)) from exc

    @property
    def pending(self) -> bool:
        """Whether a run is waiting to begin."""
        return self._wanted

    @property
    def active(self) -> bool:
        """Whether a run is under way or waiting to begin."""
        return self._active

    def _work(self) -> None:
        with self._guard:
            if self._running:
                return
            self._running = True
        while True:
            with self._guard:
                served, self._waiting = self._waiting, []
                wanted, self._wanted = self._wanted, False
                if not wanted:
                    self._active = self._running = False
                    return
            try:
                result = self._run()
            except BaseException as exc:
                if not served:
                    log.exception("what nobody waits for failed")
                for future in served:
                    if future.set_running_or_notify_cancel():
                        future.set_exception(exc)
            else:
                for future in served:
                    if future.set_running_or_notify_cancel():
                        future.set_result(result)
            if self._short and hops.crowded():
                with self._guard:
                    self._running = False
                self._submit()  # behind those who wait
                return


class _Timer:
    """One daemon thread that calls functions at given times."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], Any]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def after(self, seconds: float, call: Callable[[], Any]) -> None:
        with self._wake:
            self._begin()
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._numbers), call))
            self._wake.notify()

    def begin(self) -> None:
        with self._wake:
            self._begin()

    def _begin(self) -> None:
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
            except Exception:  # the timer is needed by others too
                log.exception("what was to be done by now failed")


_timer = _Timer()


def begin_timer() -> None:
    """Have the timer's thread, or RuntimeError; :func:`after` then finds it."""
    _timer.begin()


def after(seconds: float, call: Callable[[], Any]) -> None:
    """Call a short, non-blocking function in ``seconds``; it must not raise."""
    _timer.after(seconds, call)


def _begin_anew() -> None:
    """A forked process has none of its parent's threads."""
    global _pool, _pool_guard, _timer
    _pool, _pool_guard, _timer = None, threading.Lock(), _Timer()


os.register_at_fork(after_in_child=_begin_anew)
