"""Bucket folders that a test opens and reopens with any backend."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from persisting.lock import owner_of
from persisting.queue import LanceBackend, MemoryBackend, PersistingBackend


@dataclass(frozen=True)
class Kind:
    """A backend with its options."""

    name: str
    cls: type
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def persistent(self) -> bool:
        return self.cls is not MemoryBackend

    @property
    def evolving(self) -> bool:
        return self.cls is not LanceBackend

    @property
    def logged(self) -> bool:
        return bool(self.options.get("enable_wal"))

    def __str__(self) -> str:
        return self.name


MEMORY = Kind("memory", MemoryBackend)
LANCE = Kind("lance", LanceBackend)
QUIET = {"flush_interval": None}
"""By default a flush happens 5 seconds after a put: at any moment of a test on a slow machine."""
PERSISTING = Kind("persisting", PersistingBackend, QUIET)
WAL_SYNCED = Kind(
    "wal-synced", PersistingBackend, {**QUIET, "enable_wal": True, "wal_sync_interval": 0.0}
)
WAL_ZSTD = Kind(
    "wal-zstd",
    PersistingBackend,
    {**QUIET, "enable_wal": True, "wal_sync_interval": 1.0, "compression": "zstd"},
)

TABLES = (LANCE, PERSISTING, WAL_SYNCED, WAL_ZSTD)
ALL = (MEMORY, *TABLES)


class Bucket:
    """One bucket folder; every backend opened on it is closed at the end of the test."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self._opened: list[Any] = []

    def open(self, **options: Any) -> Any:
        given = {**self.kind.options, **options}
        backend = self.kind.cls(bucket_id=0, storage_path=str(self.folder), **given)
        self._opened.append(backend)
        return backend

    async def reopen(self, backend: Any, **options: Any) -> Any:
        """Close and reopen; a backend without storage is returned unchanged."""
        if not self.kind.persistent:
            return backend
        await backend.close()
        return self.open(**options)

    async def close(self) -> None:
        for backend in self._opened:
            await backend.close()


async def until_freed(folder: Path) -> None:
    """Wait until the bucket is free: a thread may use a dropped backend a while longer."""
    attempts = 0
    while owner_of(folder) is not None:
        if attempts % 50 == 0:  # collecting is slow
            gc.collect()
        attempts += 1
        await asyncio.sleep(0.005)


async def read_all(backend: Any) -> list[dict[str, Any]]:
    """Read all records through the stream."""
    return [record async for record in backend.get_stream()]
