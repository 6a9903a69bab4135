"""Queues for synchronous code: each call runs on an event loop in another thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any

from persisting.errors import InvalidArgument

_loop: asyncio.AbstractEventLoop | None = None
_guard = threading.Lock()


class SyncQueue:
    """A writer or reader whose methods block instead of being awaited."""

    def __init__(self, queue: Any, home: asyncio.AbstractEventLoop) -> None:
        self._queue, self._home, self._process = queue, home, os.getpid()

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._queue, name)
        if not callable(member):
            return member
        direct = getattr(self._queue, f"{name}_from_thread", None)

        @wraps(member)
        def call(*args: Any, **kwargs: Any) -> Any:
            if direct is not None and _running_loop() is None and direct(*args, **kwargs):
                return None
            result = member(*args, **kwargs)
            if isinstance(result, AsyncIterator):
                return _iterate(result, self._run)
            return self._run(result) if asyncio.iscoroutine(result) else result

        setattr(self, name, call)
        return call

    def __enter__(self) -> SyncQueue:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._run(self._queue.__aexit__(*raised))  # commits nothing after an exception

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        home_is_alive = self._home.is_running() and self._process == os.getpid()
        loop = self._home if home_is_alive else _own_loop()
        if _running_loop() is loop:
            coroutine.close()
            raise InvalidArgument(
                "a synchronous queue was called on its own event loop, which would deadlock; await "
                "the methods of the queue itself there"
            )
        return _Call(coroutine, loop).result()


class _Call:
    """A coroutine on the loop of another thread; interrupting the caller cancels it."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._coroutine, self._loop = coroutine, loop
        self._task: asyncio.Task[Any] | None = None
        self._ended = threading.Event()

    def result(self) -> Any:
        try:
            self._loop.call_soon_threadsafe(self._begin)
            self._ended.wait()
        except BaseException:  # Ctrl-C: records that nobody receives must not be consumed
            self._loop.call_soon_threadsafe(self._cancel)
            self._ended.wait()
            raise
        assert self._task is not None
        return self._task.result()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(lambda _: self._ended.set())

    def _cancel(self) -> None:
        if self._task is None:  # interrupted before the call was scheduled
            self._coroutine.close()
            self._ended.set()
        else:
            self._task.cancel()


def run_blocking(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine, which runs on an event loop in another thread."""
    return _Call(coroutine, _own_loop()).result()


def _iterate(
    stream: AsyncIterator[Any], run: Callable[[Coroutine[Any, Any, Any]], Any]
) -> Iterator[Any]:
    async def step() -> tuple[bool, Any]:
        try:
            return True, await anext(stream)
        except StopAsyncIteration:
            return False, None

    try:
        while True:
            more, record = run(step())
            if not more:
                return
            yield record
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            run(close())


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _own_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _guard:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="persisting-sync", daemon=True).start()
        return _loop


def _reset_after_fork() -> None:
    """Forget the loop: a forked process has none of its parent's threads."""
    global _loop, _guard
    _loop, _guard = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
