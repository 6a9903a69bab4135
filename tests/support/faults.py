"""A file system that fails when a test says so."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Any

from persisting.fs import FileSystem

CALLS = (
    "make_folder",
    "create",
    "write",
    "sync",
    "truncate",
    "remove",
    "rename",
    "sync_file",
    "sync_folder",
)


class FaultyFileSystem(FileSystem):
    """Passes every call on, unless it is told to fail it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._guard = threading.Lock()
        self._rule: Callable[[str], bool] | None = None
        self._error = errno.EIO
        self.delay = 0.0

    def fail_always(self, *names: str, error: int = errno.EIO) -> None:
        """Fail every call of these names until :meth:`heal`."""
        self._error, self._rule = error, lambda name: name in names

    def fail_once_at(self, index: int) -> None:
        """Fail the call that comes after ``index`` further ones, and no other."""
        left = [index]

        def rule(name: str) -> bool:
            left[0] -= 1
            if left[0] == -1:
                self._rule = None
                return True
            return False

        self._error, self._rule = errno.EIO, rule

    def heal(self) -> bool:
        """Fail nothing any more; whether a fault was still waiting."""
        waiting, self._rule = self._rule is not None, None
        return waiting

    def _pass(self, name: str) -> None:
        with self._guard:
            self.calls.append(name)
            failing = self._rule is not None and self._rule(name)
        if self.delay:
            time.sleep(self.delay)
        if failing:
            raise OSError(self._error, f"injected fault in {name}")


def _watched(name: str) -> Any:
    real = getattr(FileSystem, name)

    def call(self: FaultyFileSystem, *args: Any) -> Any:
        self._pass(name)
        return real(self, *args)

    return call


for _name in CALLS:
    setattr(FaultyFileSystem, _name, _watched(_name))
