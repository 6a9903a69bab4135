"""Quick hops between an event loop and a thread, for what every put does.

A hop through a thread pool and ``call_soon_threadsafe`` costs as much as writing a record to the
log. Here each way is one write to a file descriptor that the other side waits on: the system call
lets go of Python's lock, so that who is woken can run at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger("persisting")

MOST_THREADS = 16


class NoThread(RuntimeError):
    """Nobody can do the job, and nobody was given it."""


class EventFd:
    """What one side rings and the other waits for."""

    def __init__(self, *, counting: bool = False) -> None:
        """A counting bell is heard once per ring, by whichever thread waits; another is heard
        once for all the rings before, and never waited for: a loop watches its ``fd``."""
        self._counting = counting
        if hasattr(os, "eventfd"):
            kind = os.EFD_SEMAPHORE if counting else os.EFD_NONBLOCK
            self.fd = self._rung = os.eventfd(0, os.EFD_CLOEXEC | kind)
        else:
            self.fd, self._rung = os.pipe()
            os.set_blocking(self.fd, counting)
            os.set_blocking(self._rung, counting)
        closing = weakref.finalize(self, _close, {self.fd, self._rung})
        closing.atexit = False  # threads wait at it until the very end

    def ring(self) -> None:
        if self._rung == self.fd:
            os.eventfd_write(self.fd, 1)
        else:
            with suppress(BlockingIOError):  # it has been ringing for long
                os.write(self._rung, b"1")

    def hear(self) -> None:
        if self._rung != self.fd:
            os.read(self.fd, 1 if self._counting else 1 << 16)
            return
        while True:
            try:
                os.eventfd_read(self.fd)
                return
            except InterruptedError:  # by a signal; unlike other calls this one is not repeated
                continue


def _close(fds: set[int]) -> None:
    for fd in fds:
        os.close(fd)


class WorkerPool:
    """Daemon threads for short jobs, as many as are busy at a time. Jobs must not raise."""

    def __init__(self, most: int = MOST_THREADS) -> None:
        self._most = most
        self._jobs: deque[Callable[[], Any]] = deque()
        self._bell: EventFd | None = None
        self._guard = threading.Lock()
        self._threads = self._busy = 0

    def submit(self, job: Callable[[], Any]) -> None:
        """Run a job soon; :class:`NoThread` where not even one can be had."""
        bell = self._bell
        if bell is None or self._busy + len(self._jobs) >= self._threads:
            bell = self._grow()
        self._jobs.append(job)
        bell.ring()

    def _grow(self) -> EventFd:
        with self._guard:
            try:
                bell = self._bell = self._bell or EventFd(counting=True)
            except OSError as exc:
                raise NoThread(str(exc)) from exc
            if self._threads < self._most:
                name = f"persisting-log-{self._threads}"
                try:
                    threading.Thread(target=self._run, args=[bell], name=name, daemon=True).start()
                except RuntimeError as exc:
                    if not self._threads:
                        raise NoThread(str(exc)) from exc
                else:
                    self._threads += 1
            return bell

    @property
    def crowded(self) -> bool:
        """Whether jobs wait for a thread."""
        return bool(self._jobs)

    def _run(self, bell: EventFd) -> None:
        while True:
            bell.hear()
            with self._guard:
                self._busy += 1
            # Until none is left: Ctrl-C may have come between a job and its ring.
            while self._jobs:
                with suppress(IndexError):  # another thread was quicker
                    self._do(self._jobs.popleft())
            with self._guard:
                self._busy -= 1

    def _do(self, job: Callable[[], Any]) -> None:
        try:
            if self._jobs:
                self._grow()  # two who submitted at once may have counted on this thread both
            job()
        except BaseException:
            log.exception("a job of the log failed")


_crew = WorkerPool()


def submit(job: Callable[[], Any]) -> None:
    """Run a short job in a thread that has nothing else to do."""
    _crew.submit(job)


def crowded() -> bool:
    """Whether jobs wait, so that who goes on and on should let them have a turn."""
    return _crew.crowded


class LoopMailbox:
    """Calls for one event loop, posted by other threads.

    Calls must not raise, and may be made twice where one is interrupted.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Made by the loop itself."""
        calls = deque[tuple[Callable[..., Any], tuple[Any, ...]]]()
        self._bell = bell = EventFd()
        # Calls hold futures, and these the loop: only the loop itself may hold them.
        self._calls = weakref.ref(calls)

        def deliver() -> None:
            with suppress(BlockingIOError):  # heard already, in a turn that was broken off
                bell.hear()
            try:
                while calls:
                    call, args = calls[0]
                    try:
                        call(*args)
                    except Exception:
                        log.exception("a call in an event loop failed")
                    calls.popleft()
            finally:
                if calls:  # Ctrl-C: what is left, the one it met included, comes in the next turn
                    bell.ring()

        loop.add_reader(bell.fd, deliver)

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """Have the loop call, in the order of the posts; nothing happens once it is closed."""
        calls = self._calls()
        if calls is not None:
            calls.append((call, args))
            self._bell.ring()


class _CallSoonMailbox(LoopMailbox):
    """The same for a loop that cannot watch a file descriptor, or where none can be had."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        loop = self._loop()
        if loop is not None:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(call, *args)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox]
_mailboxes = weakref.WeakKeyDictionary()


def mailbox() -> LoopMailbox:
    """The mailbox of the running loop."""
    loop = asyncio.get_running_loop()
    found = _mailboxes.get(loop)
    if found is None:
        try:
            found = LoopMailbox(loop)
        except (NotImplementedError, OSError):
            found = _CallSoonMailbox(loop)
        _mailboxes[loop] = found
    return found


def _reset_after_fork() -> None:
    """A forked process has none of its parent's threads."""
    global _crew
    _crew = WorkerPool()


os.register_at_fork(after_in_child=_reset_after_fork)
