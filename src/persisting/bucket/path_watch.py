"""Calls back when files or folders change: inotify, or polling with a bounded back-off.

One thread serves the whole process. It starts with the first watch. A watch ends by itself when an
event finds no waiting listener, so a busy log costs nothing while nobody waits.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import struct
import threading
import time
import weakref
from pathlib import Path
from typing import Protocol

log = logging.getLogger("persisting")

CHANGED = 0x2  # IN_MODIFY
CLOSED = 0x8  # IN_CLOSE_WRITE: its writer has closed it, or died
ENTRIES = 0x80 | 0x100 | 0x200  # IN_MOVED_TO, IN_CREATE, IN_DELETE
_GONE = 0x400 | 0x800 | 0x8000  # IN_DELETE_SELF, IN_MOVE_SELF, IN_IGNORED
_OVERFLOW = 0x4000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16

_SHORTEST = 0.001
_LONGEST = 0.02
"""Seconds between two polls, where inotify is not available: doubled while nothing changes."""


class Listener(Protocol):
    """Anything that follows a path. Called in the thread of the watch; must be quick."""

    @property
    def is_waiting(self) -> bool:
        """Whether a caller waits for changes; otherwise the watch ends."""

    def on_change(self, *, gone: bool) -> bool:
        """Look for changes and return whether there were any.

        ``gone``: the path, or the writer of the file, no longer exists.
        """


class PathWatch:
    """Watches paths while a listener waits."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._inotify = _Inotify.open()
        self._listeners: dict[int, weakref.WeakSet[Listener]] = {}
        """By watch; without inotify, those that are polled have the key -1."""
        self._thread: threading.Thread | None = None
        self._added = threading.Event()

    @property
    def polls(self) -> bool:
        """Whether changes are found by polling."""
        return self._inotify is None

    def add(self, path: Path, events: int, listener: Listener) -> None:
        """Call the listener when the path changes, while it waits.

        The listener must already be waiting, and look for changes after this call. A path that
        does not exist is not watched. Without inotify only the files that :data:`CHANGED` was asked
        for are polled.
        """
        with self._guard:
            watch = -1
            if self._inotify is not None:
                watch = self._inotify.add(path, events)
                if watch < 0:
                    return
            elif not events & CHANGED:
                return
            self._listeners.setdefault(watch, weakref.WeakSet()).add(listener)
            self._ensure_thread()
            self._added.set()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            run = self._poll if self._inotify is None else self._run
            thread = threading.Thread(target=run, name="persisting-watch", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        assert self._inotify is not None
        while True:
            for watch, events in self._inotify.read().items():
                self._dispatch(watch, gone=bool(events & (CLOSED | _GONE)))
                if events & 0x8000:  # the watch has ended
                    with self._guard:
                        self._listeners.pop(watch, None)

    def _poll(self) -> None:
        pause = _SHORTEST
        while True:
            with self._guard:
                idle = not self._listeners
                if idle:
                    self._added.clear()
            if idle:
                self._added.wait()
                pause = _SHORTEST
            changed = self._dispatch(-1, gone=False)
            pause = _SHORTEST if changed else min(2 * pause, _LONGEST)
            time.sleep(pause)

    def _dispatch(self, watch: int, *, gone: bool) -> bool:
        """Call the listeners of a watch, or of all watches for -1; end it if nobody waits."""
        with self._guard:
            watches = [w for w in self._listeners if watch in (w, -1)]
            listeners = [item for w in watches for item in self._listeners[w]]
        changed = False
        for listener in listeners:
            try:
                changed |= listener.on_change(gone=gone)
            except Exception:  # other listeners still need this thread
                log.exception("a watch on a log failed")
        with self._guard:
            for ended in watches:
                waiting = self._listeners.get(ended)
                if waiting is not None and not any(item.is_waiting for item in waiting):
                    del self._listeners[ended]
                    if self._inotify is not None:
                        self._inotify.remove(ended)
        return changed

    def close_copy(self) -> None:
        """In a forked child, close the parent's file."""
        if self._inotify is not None:
            os.close(self._inotify.fd)


class _Inotify:
    """The system calls of inotify, which Python does not have."""

    def __init__(self, libc: ctypes.CDLL, fd: int) -> None:
        self._libc, self.fd = libc, fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    @classmethod
    def open(cls) -> _Inotify | None:
        """Return None where the system has no inotify, or allows no further instance."""
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, AttributeError):
            return None
        return cls(libc, fd) if fd >= 0 else None

    def add(self, path: Path, events: int) -> int:
        """Return the number of the watch, -1 if the path cannot be watched."""
        watch = int(self._libc.inotify_add_watch(self.fd, os.fsencode(path), events | 0xC00))
        if watch < 0 and ctypes.get_errno() not in (errno.ENOENT, errno.ENOTDIR):
            log.debug("cannot watch %s: %s", path, os.strerror(ctypes.get_errno()))
        return watch

    def remove(self, watch: int) -> None:
        self._libc.inotify_rm_watch(self.fd, watch)

    def read(self) -> dict[int, int]:
        """Wait for events, and return them joined by watch; -1 stands for all watches."""
        self._poll.poll()
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return {}
        found: dict[int, int] = {}
        position = 0
        while position < len(data):
            watch, events, _, length = _EVENT.unpack_from(data, position)
            position += _EVENT.size + length
            watch = -1 if events & _OVERFLOW else watch
            found[watch] = found.get(watch, 0) | events
        return found


_watch: PathWatch | None = None
_watch_guard = threading.Lock()


def path_watch() -> PathWatch:
    """Return the watch of this process."""
    global _watch
    with _watch_guard:
        if _watch is None:
            _watch = PathWatch()
        return _watch


def _reset_after_fork() -> None:
    """A forked process has none of its parent's threads."""
    global _watch, _watch_guard
    if _watch is not None:
        _watch.close_copy()
    _watch, _watch_guard = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
