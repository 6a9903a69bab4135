"""Where a topic is: in a folder, in an object store, or in the memory of a process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from persisting.store_address import StoreAddress, is_store_address
from persisting.store_address import parse as parse_url

_MEMORY = "memory:"


@dataclass(frozen=True)
class TopicAddress:
    """Identifies an open topic; written as its folder's path, as the URL of its prefix in an object
    store, or as ``memory:<name>``."""

    topic: str
    folder: Path | None
    """None for a topic in memory or in an object store."""
    store: StoreAddress | None = None
    """The prefix of a topic in an object store."""

    @classmethod
    def in_memory(cls, topic: str) -> TopicAddress:
        return cls(topic, None)

    @classmethod
    def in_folder(cls, folder: Path) -> TopicAddress:
        """Return the address of the topic in a folder; two paths to one folder are one address."""
        folder = folder.resolve()
        return cls(folder.name, folder)

    @classmethod
    def in_store(cls, address: StoreAddress) -> TopicAddress:
        return cls(address.name, None, address)

    @classmethod
    def parse(cls, text: str) -> TopicAddress:
        """Read what ``str()`` wrote."""
        if text.startswith(_MEMORY):
            return cls(text.removeprefix(_MEMORY), None)
        if is_store_address(text):
            return cls.in_store(parse_url(text))
        folder = Path(text)
        return cls(folder.name, folder)

    @property
    def is_in_memory(self) -> bool:
        return self.folder is None and self.store is None

    def __str__(self) -> str:
        if self.store is not None:
            return str(self.store)
        return f"{_MEMORY}{self.topic}" if self.folder is None else str(self.folder)
