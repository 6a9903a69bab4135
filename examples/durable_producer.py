"""A producer that can be killed at any time and continues where it stopped.

    python examples/durable_producer.py FOLDER [COUNT]

It numbers its puts, prints each number when the record survives power loss, and asks the bucket for
the last number when it starts. Kill it with -9 and start it again: no number is missing and none is
stored twice.
"""

from __future__ import annotations

import asyncio
import sys

from persisting.queue import PersistingBackend

WRITER = "durable-producer"


async def main(folder: str, count: int) -> None:
    backend = await asyncio.to_thread(
        PersistingBackend,
        bucket_id=0,
        storage_path=f"{folder}/bucket_0",
        enable_wal=True,
        wal_sync_interval=0.0,  # synced before each acknowledgement
    )
    async with backend:
        for number in range(backend.last_number(WRITER) + 1, count):
            record = {"number": number, "text": f"record {number}"}
            await backend.put_once([record], writer=WRITER, number=number)
            print(number, flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000))
