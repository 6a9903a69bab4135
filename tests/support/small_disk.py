"""A disk of a few megabytes, to be filled: a file system in memory. Needs root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_CHUNK = bytes(64 * 1024)


class SmallDisk:
    """A mounted disk. Its content is lost when it is closed."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        if os.geteuid() != 0:
            raise RuntimeError("a small disk is a file system of its own: run these tests as root")
        self.folder = folder
        folder.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "persisting-tests", str(folder))

    @property
    def free(self) -> int:
        """Bytes that can still be written."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.folder / "filler").open("ab", buffering=0) as file:
            for size in (len(_CHUNK), 1):
                try:
                    while True:
                        file.write(_CHUNK[:size])
                except OSError:
                    continue

    def make_room(self) -> None:
        (self.folder / "filler").unlink()

    def close(self) -> None:
        """Remove it; the processes that use it must have ended."""
        _run("umount", str(self.folder))


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr.strip()}")
