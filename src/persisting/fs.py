"""Every file call that durability rests on goes through one small object.

Production uses :class:`FileSystem`; a test swaps in one that records the calls, fails them, or
forgets what was not synced (:func:`use`). Lance writes its own files past this seam, so to the
seam they do not exist until :meth:`FileSystem.sync_file` has named them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from persisting.errors import StorageError

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


class FileSystem:
    """The local file system, as POSIX gives it."""

    def make_folder(self, path: Path) -> None:
        """Make ``path`` and its missing parents, each entry synced into its parent."""
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            try:
                folder.mkdir(mode=PRIVATE_FOLDER)
            except FileExistsError:
                continue
            self.sync_folder(folder.parent)

    def sync_chain(self, path: Path) -> None:
        """Sync the entries of a folder and of the three above it: who made them may have died."""
        for folder in (path, *list(path.parents)[:3]):
            with suppress(PermissionError):
                self.sync_folder(folder)

    def create(self, path: Path) -> int:
        """Open a new file for appending; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, PRIVATE_FILE)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` or raise."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def sync(self, fd: int) -> None:
        """Bring a file's bytes, and its length, to stable storage."""
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def write_file(self, path: Path, data: bytes) -> None:
        """Put a whole small file in place, atomically and synced."""
        draft = path.with_name(path.name + ".tmp")
        self.remove(draft)
        fd = self.create(draft)
        try:
            self.write(fd, data)
            self.sync(fd)
        finally:
            self.close(fd)
        self.rename(draft, path)
        self.sync_folder(path.parent)

    def write_note(self, path: Path, data: bytes) -> None:
        """Put a small file in place that nothing rests on: not synced, power loss may take it."""
        draft = path.with_name(path.name + ".tmp")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        os.replace(draft, path)

    def cut_file(self, path: Path, size: int) -> None:
        """Shorten a file to ``size`` bytes, synced."""
        fd = os.open(path, os.O_WRONLY)
        try:
            self.truncate(fd, size)
            self.sync(fd)
        finally:
            self.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def list(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def sync_file(self, path: Path) -> None:
        """Sync a file that someone else wrote."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Sync a folder's entries: files made, renamed or removed in it."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove_all(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def told(action: str, path: Path) -> Iterator[None]:
    """What the operating system refuses, in our words."""
    try:
        yield
    except OSError as exc:
        raise StorageError(
            f"cannot {action} {path}: {exc.strerror or exc}; free the cause and try again"
        ) from exc


_current = FileSystem()


def current() -> FileSystem:
    """The file system that newly opened buckets use."""
    return _current


@contextmanager
def use(replacement: FileSystem) -> Iterator[FileSystem]:
    """Open buckets on ``replacement`` for as long as the context lasts."""
    global _current
    before, _current = _current, replacement
    try:
        yield replacement
    finally:
        _current = before
