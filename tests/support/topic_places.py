"""Places for topics: this process, a Pulsing system of one process, or of several."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from persisting.queue import QueueReader, QueueWriter, read_queue, write_queue
from support.protocol_only_backend import OnlyProtocol

WAL = {"enable_wal": True, "wal_sync_interval": 0.0}
BACKENDS: dict[str, tuple[str | type, dict[str, Any] | None]] = {
    "memory": ("memory", None),
    "lance": ("lance", None),
    "persisting": ("persisting", WAL),
    "custom": (OnlyProtocol, None),
}


class Place:
    """Opens writers and readers of one backend; ``close`` closes all of them."""

    def __init__(self, kind: str, folder: Path, system: Any = None) -> None:
        self.kind, self.folder, self.system = kind, folder, system
        self.backend, self.options = BACKENDS[kind]
        self.topic = f"topic-{uuid.uuid4().hex[:8]}"
        self._open: list[Any] = []

    @property
    def persistent(self) -> bool:
        return self.kind in ("lance", "persisting")

    @property
    def evolving(self) -> bool:
        return self.kind == "persisting"

    def _where(self) -> dict[str, Any]:
        return {} if self.kind == "memory" else {"storage_path": str(self.folder)}

    async def write(self, **given: Any) -> QueueWriter:
        """Return a writer of the test's topic, by default with this place's backend."""
        arguments = {"topic": self.topic, "backend": self.backend, **self._where(), **given}
        if "backend_options" not in given and self.options and arguments["backend"] == self.backend:
            arguments["backend_options"] = self.options
        writer = await write_queue(self.system, **arguments)
        self._open.append(writer)
        return writer

    async def read(self, **given: Any) -> QueueReader:
        arguments = {"topic": self.topic, **self._where(), **given}
        if self.kind == "custom":
            arguments.setdefault("backend", self.backend)
        reader = await read_queue(self.system, **arguments)
        self._open.append(reader)
        return reader

    async def filled(self, count: int = 40, **given: Any) -> QueueWriter:
        """Return a writer that has put ``{"id": 0}`` to ``{"id": count - 1}``."""
        writer = await self.write(**given)
        await writer.put(numbered(count))
        return writer

    async def close(self) -> None:
        for handle in reversed(self._open):
            await handle.close()


def numbered(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": number} for number in range(start, start + count)]


def ids(records: Any) -> list[Any]:
    return [record["id"] for record in records]


async def streamed(reader: Any, **window: Any) -> list[dict[str, Any]]:
    return [record async for record in reader.get_stream(**window)]


async def drained(reader: Any, page: int = 50) -> list[dict[str, Any]]:
    """Return all records that ``get`` still delivers."""
    found: list[dict[str, Any]] = []
    while records := await reader.get(page):
        found += records
    return found


def is_in_order(found: dict[int, list[int]], count: int) -> bool:
    """Whether buckets hold the numbers below ``count``, each once, in rising order."""
    everything = sorted(number for numbers in found.values() for number in numbers)
    in_order = all(numbers == sorted(numbers) for numbers in found.values())
    return everything == list(range(count)) and in_order
