"""Fast switches between an event loop and a thread, for the path of every put.

A switch through a thread pool and ``call_soon_threadsafe`` costs as much as writing a record to the
log. Here each direction is one write to a file descriptor that the other side waits on. The system
call releases the GIL, so that the woken thread can run immediately.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

log = logging.getLogger("persisting")

MAX_THREADS = 16
MAX_REQUESTS = 64
"""Threads that wait for an object store to store a log, and as many that begin such requests."""
MAX_HEARTBEATS = 256
"""Threads that wait for an object store to take a heartbeat."""


class SupportsWaiting(Protocol):
    """Anything that calls back when its state may have changed."""

    def waiting(self, callback: Callable[[], None]) -> AbstractContextManager[None]: ...


class NoThread(RuntimeError):
    """No thread can be started; the job was not accepted."""


class EventFd:
    """A wake-up that one side signals and the other waits for: an eventfd, or a pipe."""

    def __init__(self, *, counting: bool = False) -> None:
        """With ``counting`` each signal wakes one waiting thread. Without it one :meth:`wait`
        takes all signals so far and never blocks: an event loop watches ``fd``."""
        self._counting = counting
        if hasattr(os, "eventfd"):
            kind = os.EFD_SEMAPHORE if counting else os.EFD_NONBLOCK
            self.fd = self._write_fd = os.eventfd(0, os.EFD_CLOEXEC | kind)
        else:
            self.fd, self._write_fd = os.pipe()
            os.set_blocking(self.fd, counting)
            os.set_blocking(self._write_fd, counting)
        closing = weakref.finalize(self, _close, {self.fd, self._write_fd})
        closing.atexit = False  # threads wait on it until the process ends

    def signal(self) -> None:
        """Wake the other side."""
        if self._write_fd == self.fd:
            os.eventfd_write(self.fd, 1)
        else:
            with suppress(BlockingIOError):  # the pipe is already full
                os.write(self._write_fd, b"1")

    def wait(self) -> None:
        """Take one signal of a counting event, waiting for it, or all signals of another one."""
        if self._write_fd != self.fd:
            os.read(self.fd, 1 if self._counting else 1 << 16)
            return
        while True:
            try:
                os.eventfd_read(self.fd)
                return
            except InterruptedError:  # Python does not retry this call after a signal (PEP 475)
                continue


def _close(fds: set[int]) -> None:
    for fd in fds:
        os.close(fd)


class WorkerPool:
    """Daemon threads for short jobs; grows to the number of simultaneous jobs.

    Jobs must not raise.
    """

    def __init__(self, max_threads: int = MAX_THREADS, name: str = "persisting-log") -> None:
        self._max_threads, self._name = max_threads, name
        self._jobs: deque[Callable[[], Any]] = deque()
        self._event: EventFd | None = None
        self._lock = threading.Lock()
        self._threads = self._busy = 0

    def submit(self, job: Callable[[], Any]) -> None:
        """Run a job soon; raise :class:`NoThread` if no thread can be started."""
        event = self._event
        if event is None or self._busy + len(self._jobs) >= self._threads:
            event = self._grow()
        self._jobs.append(job)
        event.signal()

    def _grow(self) -> EventFd:
        with self._lock:
            try:
                event = self._event = self._event or EventFd(counting=True)
            except OSError as exc:
                raise NoThread(str(exc)) from exc
            if self._threads < self._max_threads:
                name = f"{self._name}-{self._threads}"
                try:
                    threading.Thread(target=self._run, args=[event], name=name, daemon=True).start()
                except RuntimeError as exc:
                    if not self._threads:
                        raise NoThread(str(exc)) from exc
                else:
                    self._threads += 1
            return event

    @property
    def has_backlog(self) -> bool:
        """Whether jobs wait for a thread."""
        return bool(self._jobs)

    def _run(self, event: EventFd) -> None:
        while True:
            event.wait()
            with self._lock:
                self._busy += 1
            # Take all jobs: Ctrl-C may have come between a job and its signal.
            while self._jobs:
                with suppress(IndexError):  # another thread took the last job
                    self._run_job(self._jobs.popleft())
            with self._lock:
                self._busy -= 1

    def _run_job(self, job: Callable[[], Any]) -> None:
        try:
            if self._jobs:
                self._grow()  # two concurrent submits may both have counted on this thread
            job()
        except BaseException:
            log.exception("a background job of the log failed")


def _new_pools() -> tuple[WorkerPool, WorkerPool, WorkerPool, WorkerPool]:
    return (
        WorkerPool(),
        WorkerPool(MAX_REQUESTS, "persisting-request"),
        WorkerPool(MAX_REQUESTS, "persisting-group"),
        WorkerPool(MAX_HEARTBEATS, "persisting-beat"),
    )


# Apart from each other, so that no job waits for one that is queued behind it, or behind jobs of
# another store that does not answer.
_workers, _requests, _groups, _heartbeats = _new_pools()


def submit_request(job: Callable[[], Any]) -> None:
    """Run a job that waits for an object store to store a log.

    It has threads of its own: those of the pool may all be busy with flushes and compactions, which
    would keep the log waiting.
    """
    _requests.submit(job)


def submit_group(job: Callable[[], Any]) -> None:
    """Run a job that begins such requests, and waits for them."""
    _groups.submit(job)


def submit_heartbeat(job: Callable[[], Any]) -> None:
    """Run a job that sends a heartbeat to an object store, and repeats it if necessary."""
    _heartbeats.submit(job)


def submit(job: Callable[[], Any]) -> None:
    """Run a short job in a worker thread."""
    _workers.submit(job)


def has_backlog() -> bool:
    """Whether jobs wait for a thread, so that a task that repeats should let them run first."""
    return _workers.has_backlog


class LoopMailbox:
    """Calls for one event loop, posted by other threads.

    Calls must not raise, and may run twice if they are interrupted.
    """

    is_here = True

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Must be created in the loop itself."""
        calls = deque[tuple[Callable[..., Any], tuple[Any, ...]]]()
        self._after_turn: dict[Callable[[], Any], None] = {}
        self._event = event = EventFd()
        # Calls hold futures, which hold the loop: only the loop itself may own them.
        self._calls = weakref.ref(calls)

        def deliver() -> None:
            with suppress(BlockingIOError):  # already taken, by a call that was interrupted
                event.wait()
            try:
                while calls:
                    call, args = calls[0]
                    try:
                        call(*args)
                    except Exception:
                        log.exception("a call in an event loop failed")
                    calls.popleft()
            finally:
                if calls:  # Ctrl-C: deliver the rest, and the interrupted call, next time
                    event.signal()

        loop.add_reader(event.fd, deliver)

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """Call in the loop, in the order of the posts; does nothing once the loop is closed."""
        calls = self._calls()
        if calls is not None:
            calls.append((call, args))
            self._event.signal()

    def deliver(self, waiters: Sequence[Any], exc: BaseException | None) -> None:
        """Resolve the futures of callers that wait in this loop."""
        self.post(_resolve, waiters, exc)

    def after_turn(self, call: Callable[[], Any]) -> bool:
        """Call once when everything that can run in the loop now has run. Only from the loop."""
        if not self._after_turn:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._after_turn[call] = None
        return True

    def _end_turn(self) -> None:
        calls = self._after_turn
        try:
            while calls:
                call = next(iter(calls))
                try:
                    call()
                except Exception:
                    log.exception("a call in an event loop failed")
                del calls[call]
        finally:
            if calls:  # Ctrl-C: the rest, and the interrupted call, in the next turn
                asyncio.get_running_loop().call_soon(self._end_turn)


class _CallSoonMailbox(LoopMailbox):
    """A mailbox for loops that cannot watch a file descriptor, or when none is available."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._after_turn = {}

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        loop = self._loop()
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(call, *args)


class LoopWaiter:
    """A caller in an event loop that waits for its put; await ``future``."""

    __slots__ = ("future", "sink")

    def __init__(self) -> None:
        self.sink = mailbox()
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


def _resolve(waiters: Sequence[Any], exc: BaseException | None) -> None:
    for waiter in waiters:
        future = waiter.future
        if future.done():
            continue
        if exc is None:
            future.set_result(None)
        else:
            future.set_exception(exc)


class ThreadWaiter:
    """A thread that waits for its put in :meth:`result`."""

    __slots__ = ("_done", "_exc", "sink")

    def __init__(self) -> None:
        self.sink = _threads
        self._done = threading.Lock()  # a lock wakes its thread sooner than an Event
        self._done.acquire()
        self._exc: BaseException | None = None

    def resolve(self, exc: BaseException | None) -> None:
        """Let the thread continue."""
        self._exc = exc
        self._done.release()

    def result(self) -> None:
        """Wait until the put is acknowledged, or raise its error."""
        try:
            self._done.acquire()
        except BaseException:  # Ctrl-C: the put is under way, so wait for its outcome first
            self._done.acquire()
            raise
        if self._exc is not None:
            raise self._exc


class _Threads:
    """Delivers results to threads that wait."""

    is_here = True

    def deliver(self, waiters: Sequence[Any], exc: BaseException | None) -> None:
        for waiter in waiters:
            waiter.resolve(exc)

    def after_turn(self, call: Callable[[], Any]) -> bool:
        """It is unknown which threads are about to put."""
        return False


_threads = _Threads()


@contextmanager
def next_wake(waiters: SupportsWaiting) -> Iterator[asyncio.Future[None]]:
    """Yield a future of the next wake, in this loop. Check the state inside, then await it."""
    waiter = LoopWaiter()
    with waiters.waiting(lambda: waiter.sink.deliver([waiter], None)):
        yield waiter.future


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox]
_mailboxes = weakref.WeakKeyDictionary()


def mailbox() -> LoopMailbox:
    """Return the mailbox of the running loop."""
    loop = asyncio.get_running_loop()
    box = _mailboxes.get(loop)
    if box is None:
        try:
            box = LoopMailbox(loop)
        except (NotImplementedError, OSError):
            box = _CallSoonMailbox(loop)
        _mailboxes[loop] = box
    return box


def _reset_after_fork() -> None:
    """A forked process has none of its parent's threads."""
    global _workers, _requests, _groups, _heartbeats
    _workers, _requests, _groups, _heartbeats = _new_pools()


os.register_at_fork(after_in_child=_reset_after_fork)
