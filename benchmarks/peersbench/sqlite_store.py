"""SQLite with a write-ahead log and full syncs, one connection and one table."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from peersbench.peer import Peer, in_process
from peersbench.record_kinds import Kind, Record, bytes_to_floats, floats_to_bytes
from peersbench.workload import Store, in_turns

_TYPES = {"value": "INTEGER", "score": "REAL", "vector": "BLOB"}


class SqliteStore(Store):
    """A transaction per batch; a single insert is a transaction of its own."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._vector = kind.has_vector
        self._db = sqlite3.connect(folder / "records.db", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        columns = ", ".join(f"{name} {_TYPES.get(name, 'TEXT')}" for name in kind.fields)
        self._db.execute(f"CREATE TABLE records ({columns})")
        self._insert = f"INSERT INTO records VALUES ({', '.join(':' + f for f in kind.fields)})"

    def ingest(self, batches: Iterable[list[Record]]) -> None:
        for batch in batches:
            self._db.execute("BEGIN")
            self._db.executemany(self._insert, map(_packed, batch) if self._vector else batch)
            self._db.execute("COMMIT")

    def singles(self, rows: Iterable[Record]) -> None:
        for row in rows:
            self._db.execute(self._insert, _packed(row) if self._vector else row)

    def many_producers(self, shares: list[Iterable[Record]]) -> None:
        """Put in one thread: SQLite has one writer at a time, so threads would only add cost."""
        self.singles(in_turns(shares))

    def drain(self) -> list[Record]:
        cursor = self._db.execute("SELECT * FROM records ORDER BY rowid")
        if self._vector:
            return [{"id": id, "vector": bytes_to_floats(vector)} for id, vector in cursor]
        return [
            {"id": id, "value": value, "text": text, "score": score}
            for id, value, text, score in cursor
        ]

    def close(self) -> None:
        self._db.close()


def _packed(row: Record) -> Record:
    return {"id": row["id"], "vector": floats_to_bytes(row["vector"])}


PEER = Peer(
    "SQLite",
    "WAL, synchronous=FULL",
    in_process(SqliteStore),
    version=lambda: f"SQLite {sqlite3.sqlite_version}",
)
