"""Where a topic lives: in a folder, or in the memory of a process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MEMORY = "memory:"


@dataclass(frozen=True)
class TopicAddress:
    """Identifies an open topic; written as its folder's path, or as ``memory:<name>``."""

    topic: str
    folder: Path | None
    """None for a topic in memory."""

    @classmethod
    def in_memory(cls, topic: str) -> TopicAddress:
        return cls(topic, None)

    @classmethod
    def in_folder(cls, folder: Path) -> TopicAddress:
        """Return the address of the topic in a folder; two paths to one folder are one address."""
        folder = folder.resolve()
        return cls(folder.name, folder)

    @classmethod
    def parse(cls, text: str) -> TopicAddress:
        """Read what ``str()`` wrote."""
        if text.startswith(_MEMORY):
            return cls(text.removeprefix(_MEMORY), None)
        folder = Path(text)
        return cls(folder.name, folder)

    @property
    def is_in_memory(self) -> bool:
        return self.folder is None

    def __str__(self) -> str:
        return f"{_MEMORY}{self.topic}" if self.folder is None else str(self.folder)
