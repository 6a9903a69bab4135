"""The files of a backup, in a folder or below a prefix of an object store, and copying them.

Both places hold the same files under the same names. Blocking.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import msgspec

from persisting import fs as filesystem
from persisting.errors import InvalidArgument, StorageError, TableError
from persisting.store.object_store import LARGEST_COPY, ObjectExists, ObjectStore, StoreError

Place: TypeAlias = "Path | ObjectStore"
Blocks: TypeAlias = "Iterator[bytes | memoryview]"
Counter = Callable[[int], None]
"""Called with the number of bytes just copied or checked."""

_BLOCK = 1 << 20
_PARALLEL = 8


class Copied(msgspec.Struct):
    """A file of a backup."""

    bytes: int
    crc32: str


class FolderFiles:
    """Files below a folder, by their paths in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fs = filesystem.current()
        self._folders: set[Path] = set()

    @property
    def place(self) -> str:
        return str(self.folder)

    def names(self, below: str) -> list[str]:
        """Return the files below a folder, as paths relative to it."""
        folder, paths = self.folder / below, []
        for place, _, names in os.walk(folder):
            paths += [os.path.relpath(os.path.join(place, name), folder) for name in names]
        return paths

    def blocks(self, name: str) -> Blocks:
        """Yield the content of a file; raise FileNotFoundError if there is none."""
        with (self.folder / name).open("rb") as file:
            while block := file.read(_BLOCK):
                yield block

    def write(self, name: str, content: Callable[[], Blocks]) -> None:
        """Write one file; ``content`` may be called several times."""
        path = self.folder / name
        self._fs.make_folder(path.parent)
        self._folders.add(path.parent)
        blocks = content()
        first = next(blocks, b"")  # before the file is created: there may be none to copy
        self._fs.remove(path)
        fd = self._fs.create(path)
        try:
            self._fs.write(fd, first)
            for block in blocks:
                self._fs.write(fd, block)
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)

    def write_last(self, name: str, data: bytes) -> None:
        """Write a file that is there whole or not at all."""
        self._fs.write_file(self.folder / name, data)

    def remove(self, name: str) -> None:
        self._fs.remove(self.folder / name)

    def check_absent_or_empty(self) -> None:
        """Raise unless the place can become a new copy."""
        folder = self.folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidArgument(f"{folder} already exists; choose a folder that does not exist")

    def finish(self, files: dict[str, Copied]) -> None:
        """Make the directory entries of all files durable."""
        for folder in self._folders:
            self._fs.sync_folder(folder)


class StoreFiles:
    """Objects below the address of a store. An object is stored whole and durably, or not."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    @property
    def place(self) -> str:
        return str(self.store.address)

    def names(self, below: str) -> list[str]:
        return [key.removeprefix(f"{below}/") for key in self.store.list(below)]

    def blocks(self, name: str) -> Blocks:
        return self.store.parts(name)

    def write(self, name: str, content: Callable[[], Blocks]) -> None:
        blocks = content()
        first = next(blocks, b"")
        if next(blocks, None) is not None:
            self.store.upload(name, content)
            return
        try:
            self.store.create(name, bytes(first))
        except ObjectExists:
            raise StorageError(
                f"{self.store.address / name} already exists; another program writes there. Choose "
                "another address"
            ) from None

    def write_last(self, name: str, data: bytes) -> None:
        self.write(name, lambda: iter([data]))

    def remove(self, name: str) -> None:
        self.store.delete([name])

    def check_absent_or_empty(self) -> None:
        if self.store.list(""):
            raise InvalidArgument(
                f"there are objects below {self.place}; choose an address without any"
            )

    def finish(self, files: dict[str, Copied]) -> None:
        """Raise unless every object is there with its size."""
        stored = self.store.entries("")
        for name, copied in files.items():
            size = stored[name].size if name in stored else None
            if size != copied.bytes:
                raise StoreError(
                    f"{self.store.address / name} has {size} bytes after copying, not "
                    f"{copied.bytes}; remove the copy and try again"
                )


def files_at(place: Place) -> FolderFiles | StoreFiles:
    return StoreFiles(place) if isinstance(place, ObjectStore) else FolderFiles(place)


class Copy:
    """Copies files from one place to the same paths at another, and records their checksums."""

    def __init__(
        self, source: FolderFiles | StoreFiles, target: FolderFiles | StoreFiles, count: Counter
    ) -> None:
        self.source, self.target, self._count = source, target, count
        self.files: dict[str, Copied] = {}
        self._guard = threading.Lock()

    def tree(self, place: str) -> None:
        """Copy everything below a folder, except locks and files that disappear meanwhile.

        Of a pipeline's checkpoint, ``commits`` come first: a plan without its commit is repeated,
        a commit without its plan would be wrong.
        """
        for name in sorted(self.source.names(place), key=lambda n: "/commits/" not in f"/{n}"):
            if not name.endswith(("lock", ".tmp")) and not Path(name).name.startswith("member-"):
                self.file(f"{place}/{name}", optional=True)

    def all(self, names: Iterable[str]) -> None:
        """Copy files."""
        self.each(self.file, names)

    def each(self, work: Callable[[str], None], names: Iterable[str]) -> None:
        """Do some work for each file, several in parallel if one of the places is an object
        store."""
        if isinstance(self.source, FolderFiles) and isinstance(self.target, FolderFiles):
            for name in names:
                work(name)
            return
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="persisting-backup") as threads:
            waiting = [threads.submit(work, name) for name in names]
            try:
                for done in waiting:
                    done.result()
            finally:
                for other in waiting:
                    other.cancel()

    def file(self, name: str, *, optional: bool = False) -> None:
        """Copy one file; a missing file raises unless it is ``optional``."""
        measured = _Measured(lambda: self.source.blocks(name), self._counted)
        try:
            if not self._copied_by_the_store(name, measured):
                self.target.write(name, measured)
        except FileNotFoundError:
            if optional:
                return
            raise
        self._note(name, measured.result)

    def _copied_by_the_store(self, name: str, measured: _Measured) -> bool:
        """Have the store copy an object; return whether it did. Its bytes are read for the
        checksum, but need not be sent."""
        source, target = self.source, self.target
        if not (isinstance(source, StoreFiles) and isinstance(target, StoreFiles)):
            return False
        if not target.store.can_copy_from(source.store):
            return False
        size = source.store.size(name)
        if size is None:
            raise FileNotFoundError(f"there is no object {source.store.address / name}")
        if size > LARGEST_COPY:
            return False
        for _ in measured():
            pass
        target.store.copy_from(source.store, name, name)
        return True

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write one file with this content."""
        measured = _Measured(lambda: iter([data]), self._counted)
        self.target.write(name, measured)
        self._note(name, measured.result)

    def _note(self, name: str, copied: Copied) -> None:
        with self._guard:
            self.files[name] = copied

    def _counted(self, size: int) -> None:
        with self._guard:
            self._count(size)

    def forget(self, place: str) -> None:
        """Remove what was copied at a path or below it."""
        for name in [n for n in self.files if n == place or n.startswith(f"{place}/")]:
            del self.files[name]
            self.target.remove(name)

    def checked(self, name: str, expected: Copied) -> None:
        """Copy a file of a backup; raise if it is not the one that was copied then."""
        try:
            self.file(name)
        except FileNotFoundError:
            raise self._lacking(name) from None
        if self.files[name] != expected:
            raise self._changed(name)

    def checked_content(self, name: str, expected: Copied) -> bytes:
        """Return the content of a small file of a backup; raise if it has changed."""
        measured = _Measured(lambda: self.source.blocks(name), self._counted)
        try:
            data = b"".join(measured())
        except FileNotFoundError:
            raise self._lacking(name) from None
        if measured.result != expected:
            raise self._changed(name)
        return data

    def _lacking(self, name: str) -> TableError:
        return TableError(
            f"the backup {self.source.place} lacks {name}; use another backup. "
            f"{self.target.place} is incomplete and can be removed"
        )

    def _changed(self, name: str) -> TableError:
        return TableError(
            f"{name} in the backup {self.source.place} has changed since it was copied; use "
            f"another backup. {self.target.place} is incomplete and can be removed"
        )

    def finish(self) -> None:
        """Make everything durable that was copied."""
        self.target.finish(self.files)


class _Measured:
    """The content of a file, measured while it is read: the last complete reading counts."""

    def __init__(self, content: Callable[[], Blocks], count: Counter) -> None:
        self._content, self._count = content, count
        self._counted = 0
        self.result = Copied(0, "00000000")

    def __call__(self) -> Blocks:
        blocks = self._content()
        size, crc = 0, 0
        for block in blocks:
            size, crc = size + len(block), zlib.crc32(block, crc)
            if size > self._counted:  # a second attempt is not counted again
                self._count(size - self._counted)
                self._counted = size
            yield block
        self.result = Copied(size, f"{crc:08x}")


def read_whole(files: FolderFiles | StoreFiles, name: str) -> bytes:
    """Return a small file; raise FileNotFoundError if there is none."""
    return b"".join(files.blocks(name))


def crc_of(files: FolderFiles | StoreFiles, name: str, count: Counter) -> Copied:
    measured = _Measured(lambda: files.blocks(name), count)
    for _ in measured():
        pass
    return measured.result
