"""Our topics as a user opens them: embedded, through ``write_queue``."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peersbench import persisting_store
from peersbench.async_store import AsyncStore
from peersbench.peer import Peer, in_process
from peersbench.record_kinds import Kind, Record
from peersbench.workload import Opener
from persisting.queue import read_queue, write_queue


class TopicStore(AsyncStore):
    """A topic whose producers are tasks of one event loop."""

    in_order = False  # a reader merges the buckets

    def __init__(self, folder: Path, buckets: int, interval: float) -> None:
        super().__init__()
        self._place: dict[str, Any] = {"topic": "t", "storage_path": str(folder)}
        options = {"enable_wal": True, "wal_sync_interval": interval, "vector_type": "float32"}
        opening = write_queue(
            **self._place, num_buckets=buckets, backend="persisting", backend_options=options
        )
        self._writer = self.run(opening)

    async def put(self, row: Record) -> None:
        await self._writer.put(row)

    async def put_batch(self, rows: list[Record]) -> None:
        await self._writer.put(rows)

    def close_writer(self) -> None:
        self.run(self._writer.close())

    def prepare_read(self) -> None:
        """Close the writer, so that the read comes from disk instead of memory."""
        self.close_writer()
        self._reader = self.run(read_queue(**self._place))

    def drain(self) -> list[Record]:
        found: list[Record] = self.run(self._reader.get(limit=None))
        self.run(self._reader.close())
        return found

    def close(self) -> None:
        self.close_writer()
        super().close()


class SyncTopicStore(TopicStore):
    """A topic whose producers are threads without an event loop."""

    def __init__(self, folder: Path, buckets: int, interval: float) -> None:
        super().__init__(folder, buckets, interval)
        self._sync_writer = self._writer.sync()

    def ingest(self, batches: Iterable[list[Record]]) -> None:
        for batch in batches:
            self._sync_writer.put(batch)

    def singles(self, rows: Iterable[Record]) -> None:
        for row in rows:
            self._sync_writer.put(row)

    def many_producers(self, shares: list[Iterable[Record]]) -> None:
        with ThreadPoolExecutor(len(shares)) as threads:
            list(threads.map(self.singles, shares))

    def close_writer(self) -> None:
        self._sync_writer.close()


def _opener(store: type[TopicStore], buckets: int, interval: float) -> Opener:
    def opened(folder: Path, kind: Kind) -> TopicStore:
        return store(folder, buckets, interval)

    return opened


def _peer(name: str, store: type[TopicStore], buckets: int, interval: float = 0.0) -> Peer:
    durability = f"synced within {interval:g} s" if interval else "synced before each ack"
    measure = in_process(_opener(store, buckets, interval))
    return Peer(name, durability, measure, version=persisting_store.version, ours=True)


ONE = _peer("topic, 1 bucket", TopicStore, 1)
FOUR = _peer("topic, 4 buckets", TopicStore, 4)
SIXTEEN = _peer("topic, 16 buckets", TopicStore, 16)
BLOCKING = _peer("topic, 4, sync API", SyncTopicStore, 4)
DEFAULT = _peer("topic, 4, 1 s", TopicStore, 4, interval=1.0)
PEERS = (ONE, FOUR, SIXTEEN, BLOCKING, DEFAULT)
