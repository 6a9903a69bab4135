"""A file system that records the disk after every call: the points at which power may be lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from persisting.fs import FileSystem
from support.crash.disk_model import Disk, Folder
from support.filesystems import QuickFileSystem


@dataclass(frozen=True)
class CrashPoint:
    """The disk between two calls, and the number of promises made so far."""

    label: str
    disk: Folder
    promised: int
    """How many promises of the recording had been made."""


@dataclass
class Recording:
    """Crash points and promises, both in order."""

    crash_points: list[CrashPoint] = field(default_factory=list)
    promises: list[Hashable] = field(default_factory=list)


class RecordingFileSystem(QuickFileSystem):
    """Keeps a :class:`Recording`. Every call is one step of the disk, in whatever thread.

    What is written without this file system (by Lance, or to the lock file) is observed at the next
    call and counts as unsynced until a call syncs it.
    """

    def __init__(self, root: Path, before: Folder | None = None) -> None:
        self.recording = Recording()
        self.disk = Disk(root, before)
        self.guard = threading.RLock()
        self.on_crash_point: Callable[[], None] = lambda: None
        self._record("start")

    def promise(self, *what: Hashable) -> None:
        """Record that power loss must not remove these from now on."""
        with self.guard:
            self.recording.promises += what
            self._record_other_writes("promise")
            self._record(f"promised {what}")

    def _record(self, label: str) -> None:
        self.recording.crash_points.append(
            CrashPoint(label, self.disk.freeze(), len(self.recording.promises))
        )

    def _record_other_writes(self, before: str) -> None:
        if self.disk.observe():
            self._record(f"before {before}")

    def _step(self, label: str, call: Callable[[], Any], model: Callable[[], None]) -> Any:
        with self.guard:
            self._record_other_writes(label)
            result = call()
            model()
            self.disk.observe()
            self._record(label)
            self.on_crash_point()
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


def promises_before(recording: Recording, point: CrashPoint) -> Iterable[Hashable]:
    return recording.promises[: point.promised]
