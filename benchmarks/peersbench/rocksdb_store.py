"""RocksDB: records under ascending keys, with every write synced to its log."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from peersbench.peer import Peer, in_process
from peersbench.record_kinds import Kind, Packer, Record
from peersbench.workload import Store, in_turns


class RocksStore(Store):
    """A batch is one write."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        from rocksdict import Options, Rdict, WriteBatch, WriteOptions

        self._packer, self._batch = Packer(kind), WriteBatch
        self._numbers = itertools.count()
        self._db = Rdict(str(folder / "rocks"), Options(raw_mode=True))
        synced = WriteOptions()
        synced.sync = True
        self._synced = synced
        self._db.set_write_options(synced)

    def _key(self) -> bytes:
        return next(self._numbers).to_bytes(8, "big")

    def ingest(self, batches: Iterable[list[Record]]) -> None:
        for rows in batches:
            batch = self._batch(raw_mode=True)
            for row in rows:
                batch.put(self._key(), self._packer.pack(row))
            self._db.write(batch, self._synced)

    def singles(self, rows: Iterable[Record]) -> None:
        for row in rows:
            self._db.put(self._key(), self._packer.pack(row))

    def many_producers(self, shares: list[Iterable[Record]]) -> None:
        """Put in one thread: rocksdict holds the GIL while it writes, so threads cannot share a
        sync."""
        self.singles(in_turns(shares))

    def drain(self) -> list[Record]:
        return [self._packer.unpack(value) for value in self._db.values()]

    def close(self) -> None:
        self._db.close()


PEER = Peer(
    "RocksDB",
    "sync=true",
    in_process(RocksStore),
    lambda: None if find_spec("rocksdict") else "rocksdict is not installed",
    lambda: f"rocksdict {version('rocksdict')}",
)
