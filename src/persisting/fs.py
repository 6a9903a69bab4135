"""The seam for every file call that durability depends on.

Production uses :class:`FileSystem`. A test replaces it (:func:`use`) with one that records calls,
fails them, or drops what was not synced. Lance writes its own files past this seam, so the seam
does not know of them until :meth:`FileSystem.sync_file` is called on them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from persisting.errors import StorageError

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
DRAFT = ".tmp"
"""The suffix of a file that is being written and not yet in place. Listings ignore such files."""

_DRAFT_NAME = re.compile(r"\.[0-9a-f]{16}\.tmp$")


class FileSystem:
    """The local POSIX file system."""

    def make_folder(self, path: Path) -> None:
        """Make ``path`` and its missing parents, and sync each new entry in its parent."""
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
        """Sync a folder and the three above it: the process that made them may have died before it
        synced them."""
        for folder in (path, *list(path.parents)[:3]):
            with suppress(PermissionError):
                self.sync_folder(folder)

    def create(self, path: Path) -> int:
        """Create a file and open it for appending; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, PRIVATE_FILE)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` or raise."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def sync(self, fd: int) -> None:
        """Make a file's bytes and its length durable."""
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a small file atomically, and make it durable.

        Writers of one file do not disturb each other: each has its own draft, and the last rename
        wins. A crash may leave a draft behind.
        """
        draft = path.with_name(f"{path.name}.{os.urandom(8).hex()}{DRAFT}")
        fd = self.create(draft)
        try:
            try:
                self.write(fd, data)
                self.sync(fd)
            finally:
                self.close(fd)
            self.rename(draft, path)
        except BaseException:
            with suppress(OSError):
                self.remove(draft)
            raise
        self.sync_folder(path.parent)

    def remove_drafts(self, folder: Path, of: str | None = None) -> None:
        """Remove the drafts of :meth:`write_file` that a crash left in ``folder``.

        Nothing may be writing there; with ``of``, only the file of that name must have no writer,
        and only its drafts are removed. Other files stay: a bucket's folder may hold files of its
        user.
        """
        if not folder.is_dir():
            return
        for name in self.list(folder):
            draft = _DRAFT_NAME.search(name)
            if draft is not None and of in (None, name[: draft.start()]):
                self.remove(folder / name)

    def write_note(self, path: Path, data: bytes) -> None:
        """Write a small file atomically, without a sync: power loss may take it, so nothing may
        depend on it. One writer at a time: the draft always has the same name."""
        draft = path.with_name(path.name + DRAFT)
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
        """Sync a file that was not written through this seam."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Sync the entries of a folder, so that files created, renamed or removed in it stay so."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove_all(path: Path) -> None:
    """Remove a file, or a folder with its content; of a link only the link itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def os_errors_as(action: str, path: Path) -> Iterator[None]:
    """Raise an error of the operating system as a :class:`StorageError` that says what failed."""
    try:
        yield
    except OSError as exc:
        raise StorageError(
            f"cannot {action} {path}: {exc.strerror or exc}; fix the cause and retry"
        ) from exc


_current = FileSystem()


def current() -> FileSystem:
    """Return the file system that newly opened buckets use."""
    return _current


@contextmanager
def use(replacement: FileSystem) -> Iterator[FileSystem]:
    """Let buckets that are opened within the context use ``replacement``."""
    global _current
    before, _current = _current, replacement
    try:
        yield replacement
    finally:
        _current = before
