"""A file system that records every call as a moment at which the power may go."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from persisting.fs import FileSystem
from support.crash.disk import Disk, Folder
from support.filesystems import QuickFileSystem


@dataclass(frozen=True)
class Moment:
    """The disk between two calls, and what had been promised by then."""

    label: str
    disk: Folder
    promised: int
    """How many of the promises of the recording had been made."""


@dataclass
class Recording:
    """Moments in order, and the promises in order."""

    moments: list[Moment] = field(default_factory=list)
    promises: list[Hashable] = field(default_factory=list)


class RecordingFileSystem(QuickFileSystem):
    """Keeps a :class:`Recording`. Every call is one step of the disk, whichever thread makes it.

    What others write past the seam (Lance, the lock's note) is noticed at the next call and counts
    as unsynced until a call syncs it.
    """

    def __init__(self, root: Path) -> None:
        self.recording = Recording()
        self.disk = Disk(root)
        self.guard = threading.RLock()
        self.on_moment: Callable[[], None] = lambda: None
        self._record("start")

    def promise(self, *what: Hashable) -> None:
        """From now on, power loss must not take these away."""
        with self.guard:
            self.recording.promises += what
            self._look("promise")
            self._record(f"promised {what}")

    def _record(self, label: str) -> None:
        self.recording.moments.append(
            Moment(label, self.disk.freeze(), len(self.recording.promises))
        )

    def _look(self, before: str) -> None:
        if self.disk.observe():
            self._record(f"before {before}")

    def _step(self, label: str, call: Callable[[], Any], model: Callable[[], None]) -> Any:
        with self.guard:
            self._look(label)
            result = call()
            model()
            self.disk.observe()
            self._record(label)
            self.on_moment()
            return result

    def create(self, path: Path) -> int:
        return self._step(
            f"create {path.name}",
            lambda: FileSystem.create(self, path),
            lambda: self.disk.replaced(path),
        )

    def write(self, fd: int, data: bytes | memoryview) -> None:
        self._step(f"write {path_of(fd).name}", lambda: FileSystem.write(self, fd, data), _nothing)

    def truncate(self, fd: int, size: int) -> None:
        self._step(
            f"truncate {path_of(fd).name}", lambda: FileSystem.truncate(self, fd, size), _nothing
        )

    def rename(self, old: Path, new: Path) -> None:
        self._step(
            f"rename {old.name} {new.name}",
            lambda: FileSystem.rename(self, old, new),
            lambda: self.disk.moved(old, new),
        )

    def remove(self, path: Path) -> None:
        self._step(f"remove {path.name}", lambda: FileSystem.remove(self, path), _nothing)

    def sync(self, fd: int) -> None:
        path = path_of(fd)
        self._step(f"sync {path.name}", _nothing, lambda: self.disk.sync_file(path))

    def sync_file(self, path: Path) -> None:
        self._step(
            f"sync_file {path.name}",
            lambda: QuickFileSystem.sync_file(self, path),
            lambda: self.disk.sync_file(path),
        )

    def sync_folder(self, path: Path) -> None:
        self._step(
            f"sync_folder {path.name}",
            lambda: QuickFileSystem.sync_folder(self, path),
            lambda: self.disk.sync_folder(path),
        )


def _nothing() -> None:
    pass


def path_of(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


def promised_by(recording: Recording, moment: Moment) -> Iterable[Hashable]:
    return recording.promises[: moment.promised]
