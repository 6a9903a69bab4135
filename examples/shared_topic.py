"""Several processes that share one topic. Run this file twice, in two terminals:

    python examples/shared_topic.py FOLDER [COUNT]

Each process puts a record every tenth of a second and prints what the others have put. Kill one of
them with -9: the other continues, and no record is missing or stored twice.
"""

from __future__ import annotations

import asyncio
import os
import sys

from persisting.queue import read_queue, write_queue


async def put(folder: str, count: int) -> None:
    writer = await write_queue(
        "chat",
        storage_path=folder,
        backend="persisting",
        backend_options={"enable_wal": True, "wal_sync_interval": 0.0},
    )
    async with writer:
        for number in range(count):
            await writer.put({"id": f"{os.getpid()}-{number}", "by": os.getpid(), "n": number})
            await asyncio.sleep(0.1)


async def show(folder: str) -> None:
    async with await read_queue("chat", storage_path=folder, wait_for_topic=True) as reader:
        async for record in reader.get_stream(block=True):
            if record["by"] != os.getpid():
                print(f"process {record['by']} has put {record['n']}", flush=True)


async def main(folder: str, count: int) -> None:
    showing = asyncio.create_task(show(folder))
    await put(folder, count)
    showing.cancel()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 600))
