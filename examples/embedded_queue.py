"""A topic inside your own program: producers, a waiting reader, a seek back in time.

    python examples/embedded_queue.py [folder]

Without a folder it works in ./queue_storage. Run it twice: the topic is still there.
"""

from __future__ import annotations

import asyncio
import sys
import time

from persisting.queue import QueueReader, QueueWriter, read_queue, write_queue

TOPIC = "orders"
CUSTOMERS = ("ada", "bob", "cy")


async def produce(writer: QueueWriter, customer: str) -> None:
    for number in range(5):
        await writer.put({"customer": customer, "number": number})
        await asyncio.sleep(0.01)


async def follow(reader: QueueReader, count: int) -> None:
    """Print records as they arrive; those of one customer arrive in order."""
    async for record in reader.get_stream(limit=count, block=True):
        print("got", record)


async def main(folder: str | None) -> None:
    writer = await write_queue(
        topic=TOPIC,
        bucket_column="customer",
        storage_path=folder,
        backend="persisting",
        backend_options={"enable_wal": True, "wal_sync_interval": 0.0},
    )
    async with writer, await read_queue(topic=TOPIC, storage_path=folder) as reader:
        before = await writer.stats()
        print("stored before:", before["total_count"])

        started = time.time()
        await reader.seek(timestamp=started)
        consumer = asyncio.create_task(follow(reader, 5 * len(CUSTOMERS)))
        await asyncio.gather(*(produce(writer, customer) for customer in CUSTOMERS))
        await consumer

        await reader.seek(timestamp=started)
        table = await reader.get_arrow()
        print("read again:", table.num_rows, "rows of", table.column_names)
        stats = await writer.stats()
        print("stored now:", stats["total_count"], [b["total_count"] for b in stats["buckets"]])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
