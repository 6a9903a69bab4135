"""A custom backend that stores each bucket in a SQLite file, embedded and on a Pulsing system.

    python examples/custom_backend.py [folder]

A backend needs only the methods of the protocol; ``close`` is optional.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pulsing as pul

from persisting.queue import (
    BucketLocked,
    SchemaError,
    StorageBackend,
    read_queue,
    register_backend,
    write_queue,
)

Record = dict[str, Any]


class SqliteBackend:
    """One bucket in one SQLite file; a put is durable when it returns."""

    def __init__(
        self, bucket_id: int, storage_path: str, batch_size: int = 100, **options: Any
    ) -> None:
        self._bucket_id = bucket_id
        self._lock = asyncio.Lock()
        folder = Path(storage_path)
        folder.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(folder / "records.db", check_same_thread=False, timeout=0)
        try:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # one owner, until close
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("CREATE TABLE IF NOT EXISTS records (place INTEGER PRIMARY KEY, text)")
            self._db.execute("BEGIN EXCLUSIVE")
            self._db.commit()
        except sqlite3.OperationalError as exc:
            self._db.close()
            raise BucketLocked(f"{folder} is open in another process: {exc}") from exc
        (self._count,) = self._db.execute("SELECT count(*) FROM records").fetchone()

    async def put(self, record: Record) -> None:
        await self.put_batch([record])

    async def put_batch(self, records: list[Record]) -> None:
        try:
            texts = [json.dumps(record) for record in records]
        except (TypeError, ValueError) as exc:
            raise SchemaError(f"the record cannot be stored as JSON: {exc}") from exc
        async with self._lock:
            await asyncio.to_thread(self._insert, list(enumerate(texts, self._count)))
            self._count += len(texts)

    def _insert(self, rows: list[tuple[int, str]]) -> None:
        with self._db:
            self._db.executemany("INSERT INTO records VALUES (?, ?)", rows)

    async def get(self, offset: int = 0, limit: int | None = None) -> list[Record]:
        async with self._lock:
            texts = await asyncio.to_thread(self._select, offset, -1 if limit is None else limit)
        return [json.loads(text) for (text,) in texts]

    def _select(self, offset: int, limit: int) -> Iterable[tuple[str]]:
        query = "SELECT text FROM records WHERE place >= ? ORDER BY place LIMIT ?"
        return self._db.execute(query, (offset, limit)).fetchall()

    async def get_stream(
        self, offset: int = 0, limit: int | None = None, block: bool = False
    ) -> AsyncIterator[Record]:
        while limit is None or limit > 0:
            page = await self.get(offset, 100 if limit is None else min(100, limit))
            if not page and not block:
                return
            if not page:
                await asyncio.sleep(0.02)
            for record in page:
                yield record
            offset, limit = offset + len(page), None if limit is None else limit - len(page)

    async def flush(self) -> None:
        """Nothing to do: every put is committed and synced."""

    async def stats(self) -> dict[str, Any]:
        return {"bucket_id": self._bucket_id, "total_count": self._count}

    def total_count(self) -> int:
        return self._count

    async def close(self) -> None:
        async with self._lock:
            self._db.close()


async def embedded(folder: str | None) -> None:
    async with await write_queue("notes", storage_path=folder, backend="sqlite") as writer:
        await writer.put([{"id": n, "text": f"note {n}"} for n in range(10)])
    async with await read_queue("notes", storage_path=folder, group="printers") as reader:
        print("embedded:", len(await reader.get()), "notes to print")
        await reader.commit()


async def on_pulsing(folder: str | None) -> None:
    system = await pul.actor_system("127.0.0.1:0")
    try:
        writer = await write_queue(system, "notes", storage_path=folder)
        await writer.put({"id": 10, "text": "one more"})
        reader = await read_queue(system, "notes", storage_path=folder, group="printers")
        print("on Pulsing:", await reader.get(wait=True), "is left to print")
        await reader.commit()
        await reader.close()
        await writer.close()
    finally:
        await system.shutdown()


async def main(folder: str | None) -> None:
    assert issubclass(SqliteBackend, StorageBackend)
    register_backend("sqlite", SqliteBackend)
    await embedded(folder)
    await on_pulsing(folder)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
