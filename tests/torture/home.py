"""Where the things of one life lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """A folder of one life."""

    folder: Path

    @property
    def disk(self) -> Path:
        """What faults strike, and what power loss takes."""
        return self.folder / "disk"

    @property
    def queues(self) -> Path:
        """The topics; the library makes this folder, so it may be lost as well."""
        return self.disk / "queues"

    @property
    def lost(self) -> Path:
        """What power loss left of the disk."""
        return self.folder / "disk.lost"

    @property
    def control(self) -> Path:
        return self.folder / "control"

    @property
    def errors(self) -> Path:
        return self.folder / "stderr.txt"
