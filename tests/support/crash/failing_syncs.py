"""A recorded disk whose syncs fail on demand.

After a failed sync the kernel may drop the dirty pages, and the next sync of the file succeeds.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from support.crash.disk_model import Disk
from support.crash.recording import RecordingFileSystem


class PageDroppingDisk(Disk):
    """A disk that drops dirty pages when a sync fails: they are clean afterwards, but not
    durable."""

    def __init__(self, root: Path) -> None:
        self._dropped: dict[int, list[tuple[int, int]]] = {}
        super().__init__(root)

    def drop_dirty_pages(self, path: Path) -> None:
        file = self._find(path)
        assert file is not None
        durable = file.durable or b""
        unchanged = next(
            (i for i, (a, b) in enumerate(zip(durable, file.data, strict=False)) if a != b),
            min(len(durable), len(file.data)),
        )
        self._dropped.setdefault(file.number, []).append((unchanged, len(file.data)))

    def sync_file(self, path: Path) -> None:
        file = self._find(path)
        super().sync_file(path)
        if file is not None and file.durable is not None:
            kept = bytearray(file.durable)
            for start, end in self._dropped.get(file.number, []):
                kept[start:end] = bytes(len(kept[start:end]))
            file.durable = bytes(kept)


class FailingSyncs(RecordingFileSystem):
    """Fails the sync with a given number, of a file or a folder."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.disk: PageDroppingDisk = PageDroppingDisk(root)
        self.index: int | None = None
        self.lasting = False
        self.syncs = 0

    def _fails(self) -> bool:
        self.syncs += 1
        if self.index is None or self.syncs <= self.index:
            return False
        return self.lasting or self.syncs - 1 == self.index

    def remove(self, path: Path) -> None:
        """Fail too while a lasting fault is active."""
        if self.lasting and self.index is not None and self.syncs > self.index:
            raise OSError(errno.EIO, "Input/output error")
        super().remove(path)

    def sync(self, fd: int) -> None:
        self._sync(
            Path(f"/proc/self/fd/{fd}").readlink(), lambda: RecordingFileSystem.sync(self, fd)
        )

    def sync_file(self, path: Path) -> None:
        self._sync(path, lambda: RecordingFileSystem.sync_file(self, path))

    def _sync(self, path: Path, real: Any) -> None:
        with self.guard:
            if self._fails():
                self.disk.observe()
                self.disk.drop_dirty_pages(path)
                raise OSError(errno.EIO, "Input/output error")
            real()

    def sync_folder(self, path: Path) -> None:
        with self.guard:
            if self._fails():
                raise OSError(errno.EIO, "Input/output error")
            super().sync_folder(path)
