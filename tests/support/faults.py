"""A file system that fails on demand."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

from support.filesystems import HookedFileSystem

READS = ("read", "list")


class FaultyFileSystem(HookedFileSystem):
    """Passes every call on, except those that a test makes fail. Reads are not counted.

    ``calls`` holds the names of the calls and ``threads`` the threads that made them. While
    ``gate`` is cleared, calls wait for it.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()
        self._rule: Callable[[str], bool] | None = None
        self._error = errno.EIO

    def fail_always(self, *names: str, error: int = errno.EIO) -> None:
        """Fail every call of these names until :meth:`heal`."""
        self._error, self._rule = error, lambda name: name in names

    def fail_once_at(self, index: int) -> None:
        """Fail only the call after ``index`` further ones."""
        left = [index]

        def rule(name: str) -> bool:
            left[0] -= 1
            if left[0] == -1:
                self._rule = None
                return True
            return False

        self._error, self._rule = errno.EIO, rule

    def heal(self) -> bool:
        """Stop failing; return whether a fault was still pending."""
        pending, self._rule = self._rule is not None, None
        return pending

    def before(self, name: str, *args: Any) -> None:
        if name in READS:
            return
        with self._lock:
            self.calls.append(name)
            self.threads.add(threading.get_ident())
            failing = self._rule is not None and self._rule(name)
        assert self.gate.wait(60), "the gate of the faulty file system was never opened"
        if failing:
            raise OSError(self._error, f"injected fault in {name}")
