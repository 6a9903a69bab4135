"""One of several processes: puts single records, or owns a topic that others use.

The parent sends a line to start the work; the process prints when it began and ended.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from typing import Any

from persisting.queue import write_queue

TOPIC: dict[str, Any] = {
    "topic": "bench",
    "backend": "persisting",
    "num_buckets": 4,
    "backend_options": {"enable_wal": True, "wal_sync_interval": 0.0, "flush_threshold": 50_000},
}


async def own(folder: str) -> None:
    """Own every bucket until the parent ends."""
    async with await write_queue(storage_path=folder, **TOPIC) as writer:
        await writer.stats()
        print("READY", flush=True)
        await asyncio.to_thread(sys.stdin.readline)


async def produce(folder: str, producers: int, count: int, name: str) -> None:
    """Put ``count`` records by each of several producers."""
    async with await write_queue(storage_path=folder, **TOPIC) as writer:
        await asyncio.gather(*(writer.put({"id": f"{name}{n}", "n": n}) for n in range(8)))
        print("READY", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

        async def put(producer: int) -> None:
            for number in range(count):
                await writer.put({"id": f"{name}-{producer}-{number}", "n": number})

        began = time.time()
        await asyncio.gather(*(put(producer) for producer in range(producers)))
        print(began, time.time(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # an owner stays until all have ended


def sqlite(folder: str, count: int, name: str) -> None:
    """Insert records one by one into the database that all processes share."""
    database = sqlite3.connect(f"{folder}/records.db", isolation_level=None, timeout=60)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE IF NOT EXISTS records (id TEXT, n INTEGER)")
    print("READY", flush=True)
    sys.stdin.readline()
    began = time.time()
    for number in range(count):
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO records VALUES (?, ?)", (f"{name}-{number}", number))
        database.execute("COMMIT")
    print(began, time.time(), flush=True)
    sys.stdin.readline()


def main() -> None:
    role, folder, *rest = sys.argv[1:]
    if role == "own":
        asyncio.run(own(folder))
    elif role == "produce":
        asyncio.run(produce(folder, int(rest[0]), int(rest[1]), rest[2]))
    else:
        sqlite(folder, int(rest[0]), rest[1])


if __name__ == "__main__":
    main()
