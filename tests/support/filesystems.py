"""File systems for tests: without syncs, and with a hook before each call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from persisting.fs import FileSystem


class QuickFileSystem(FileSystem):
    """Skips syncs, for tests in which no power loss follows."""

    def sync(self, fd: int) -> None:
        pass

    def sync_file(self, path: Path) -> None:
        path.stat()

    def sync_folder(self, path: Path) -> None:
        assert path.is_dir()


CALLS = (
    "make_folder",
    "create",
    "write",
    "sync",
    "truncate",
    "read",
    "rename",
    "remove",
    "list",
    "sync_file",
    "sync_folder",
)


class HookedFileSystem(FileSystem):
    """Runs :meth:`before` ahead of each call; an error that it raises fails the call."""

    def before(self, name: str, *args: Any) -> None:
        raise NotImplementedError


def _hooked(name: str) -> Any:
    def call(self: HookedFileSystem, *args: Any) -> Any:
        self.before(name, *args)
        return getattr(super(HookedFileSystem, self), name)(*args)

    return call


for _name in CALLS:
    setattr(HookedFileSystem, _name, _hooked(_name))
