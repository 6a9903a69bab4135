"""A file system that fails at a chosen call, once or until it is healed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from persisting.fs import FileSystem
from support.filesystems import CALLS, QuickFileSystem

ERRORS = {
    "ENOSPC": errno.ENOSPC,
    "EIO": errno.EIO,
    "EROFS": errno.EROFS,
    "EMFILE": errno.EMFILE,
}
READ_CALLS = {"read", "list"}


class FaultyFileSystem(QuickFileSystem):
    """Counts calls after :meth:`arm` and fails the call with the given number.

    A failed write has written half of its bytes; a failed sync has synced nothing. During a lasting
    fault reads succeed, unless the error is EMFILE.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fired = False
        self._guard = threading.Lock()
        self._index: int | None = None
        self._code = errno.EIO
        self._lasting = False

    def arm(self, index: int, code: int, *, lasting: bool) -> None:
        with self._guard:
            self.calls.clear()
            self._index, self._code, self._lasting, self.fired = index, code, lasting, False

    def heal(self) -> None:
        with self._guard:
            self._index = None

    def _fails(self, name: str) -> bool:
        with self._guard:
            self.calls.append(name)
            if self._index is None:
                return False
            now = len(self.calls) - 1
            if now == self._index:
                self.fired = True
                return True
            spared = name in READ_CALLS and self._code != errno.EMFILE
            return self._lasting and now > self._index and not spared

    def _error(self) -> OSError:
        return OSError(self._code, os.strerror(self._code))

    def write(self, fd: int, data: bytes | memoryview) -> None:
        if self._fails("write"):
            FileSystem.write(self, fd, data[: len(data) // 2])
            raise self._error()
        FileSystem.write(self, fd, data)

    def make_folder(self, path: Path) -> None:
        if self._fails("make_folder"):
            raise self._error()
        FileSystem.make_folder(self, path)


def _failing(name: str) -> Callable[..., Any]:
    real = getattr(QuickFileSystem, name)

    def call(self: FaultyFileSystem, *args: Any) -> Any:
        if self._fails(name):
            raise self._error()
        return real(self, *args)

    return call


for _name in CALLS:
    if _name not in vars(FaultyFileSystem):
        setattr(FaultyFileSystem, _name, _failing(_name))
