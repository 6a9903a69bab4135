"""The event loop that answers other processes, in a thread of its own.

The program's own event loops may block, end or be many; this loop runs while a topic listens.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

_guard = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_users = 0


def acquire() -> asyncio.AbstractEventLoop:
    """Return the running loop; it ends when every user has called :func:`release`."""
    global _loop, _users
    with _guard:
        if _loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=_run, args=[loop], name="persisting-socket", daemon=True
            )
            thread.start()
            _loop = loop
        _users += 1
        return _loop


def release() -> None:
    """Stop the loop if nobody else uses it."""
    global _loop, _users
    with _guard:
        _users -= 1
        if _users == 0 and _loop is not None:
            _loop.call_soon_threadsafe(_loop.stop)
            _loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def run_blocking(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> _T:
    """Run a coroutine on the loop, from another thread, and wait for it."""
    return asyncio.run_coroutine_threadsafe(work, loop).result()


async def run_elsewhere(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> _T:
    """Run a coroutine on the loop, from another loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def _reset_after_fork() -> None:
    """Forget the loop: a forked process has none of its parent's threads."""
    global _guard, _loop, _users
    _guard, _loop, _users = threading.Lock(), None, 0


os.register_at_fork(after_in_child=_reset_after_fork)
