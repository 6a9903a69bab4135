"""The paths of one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workspace:
    """The folder of one run."""

    folder: Path

    @property
    def disk(self) -> Path:
        """The disk that faults and power loss affect."""
        return self.folder / "disk"

    @property
    def queues(self) -> Path:
        """The topics. The library creates this folder, so power loss may remove it."""
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
