"""The process's thread pool for blocking work, and helpers to await it.

A bucket owns no thread. Blocking work (syncs, Lance, conversions of many rows) runs in this pool;
the short work of every put runs in the threads of :mod:`persisting.concurrency.loop_bridge`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_R = TypeVar("_R")

POOL_THREADS = 16
_REQUEST_THREADS = 32

_pool: ThreadPoolExecutor | None = None
_request_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def pool() -> ThreadPoolExecutor:
    """Return the process's pool for blocking work."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="persisting")
        return _pool


def request_pool() -> ThreadPoolExecutor:
    """Return the process's pool for short series of requests to object stores that nobody may
    delay. Its jobs never wait for jobs that have not begun."""
    global _request_pool
    with _pool_lock:
        if _request_pool is None:
            _request_pool = ThreadPoolExecutor(_REQUEST_THREADS, "persisting-request")
        return _request_pool


def begin_request(call: Callable[..., _R], *args: Any) -> Callable[[], _R]:
    """Begin requests to an object store; the returned function waits for their result."""
    return request_pool().submit(call, *args).result


async def in_thread(call: Callable[..., _R], *args: Any) -> _R:
    """Run blocking work in the pool."""
    return await asyncio.get_running_loop().run_in_executor(pool(), call, *args)


async def in_thread_or_undo(undo: Callable[[_R], None], call: Callable[..., _R], *args: Any) -> _R:
    """Run blocking work in the pool; if the caller is cancelled, undo its result."""
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
    """Return the result, or raise ``asyncio.TimeoutError``.

    Unlike ``asyncio.wait_for`` before Python 3.12 it never swallows a cancellation.
    """
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


def _reset_after_fork() -> None:
    """Start without a pool: a forked process has none of its parent's threads."""
    global _pool, _request_pool, _pool_lock
    _pool, _request_pool, _pool_lock = None, None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
