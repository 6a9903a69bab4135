"""Our bare backends: with a log synced at every put or every second, and without a log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import persisting
from peersbench.async_store import AsyncStore
from peersbench.peer import Peer, in_process
from peersbench.record_kinds import Kind, Record
from peersbench.workload import Opener
from persisting.queue import LanceBackend, PersistingBackend

_FLUSH = 50_000


class PersistingStore(AsyncStore):
    """One of our backends."""

    def __init__(self, kind: type[Any], folder: Path, options: dict[str, Any]) -> None:
        super().__init__()
        self._open = lambda: kind(
            bucket_id=0, storage_path=str(folder / "b"), vector_type="float32", **options
        )
        self._backend = self.run(self._opened())

    async def _opened(self) -> Any:
        return self._open()

    async def put(self, row: Record) -> None:
        await self._backend.put(row)

    async def put_batch(self, rows: list[Record]) -> None:
        await self._backend.put_batch(rows)

    def prepare_read(self) -> None:
        """Reopen the backend, so that the read comes from disk instead of memory."""
        self.run(self._backend.close())
        self._backend = self.run(self._opened())

    def drain(self) -> list[Record]:
        found: list[Record] = self.run(self._backend.get())
        return found

    def close(self) -> None:
        self.run(self._backend.close())
        super().close()


class UnloggedStore(PersistingStore):
    """A backend without a log: a record is durable when it is flushed."""

    async def put(self, row: Record) -> None:
        await self._backend.put(row)
        await self._backend.flush()

    async def finish(self) -> None:
        await self._backend.flush()


def _logged(interval: float) -> Opener:
    def opened(folder: Path, kind: Kind) -> PersistingStore:
        options = {"enable_wal": True, "wal_sync_interval": interval}
        return PersistingStore(PersistingBackend, folder, options)

    return opened


def _unlogged(folder: Path, kind: Kind) -> PersistingStore:
    return UnloggedStore(LanceBackend, folder, {"flush_threshold": _FLUSH})


def version() -> str:
    return f"persisting {persisting.__version__}"


def _peer(name: str, durability: str, opener: Opener) -> Peer:
    return Peer(name, durability, in_process(opener), version=version, ours=True)


SYNCED = _peer("backend, synced", "synced before each ack", _logged(0.0))
DEFAULT = _peer("backend, 1 s", "synced within 1 s", _logged(1.0))
UNLOGGED = _peer("backend, no log", "synced at flush", _unlogged)
PEERS = (SYNCED, DEFAULT, UNLOGGED)
