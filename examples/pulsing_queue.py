"""Durable producers and a consumer group on a Pulsing system, in one process.

    python examples/pulsing_queue.py [folder]

Two producers number their puts, so that a retry is stored once. Two consumers share the buckets
as a group and commit what they have handled; one leaves half-way and the other takes over. The
same code runs on a cluster: pass the address of a node as a seed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

import pulsing as pul

from persisting.queue import read_queue, write_queue

TOPIC = "rollouts"
DURABLE = {"enable_wal": True, "wal_sync_interval": 0.0}
BATCHES, ROWS = 10, 50


async def produce(system: Any, name: str, folder: str | None) -> None:
    writer = await write_queue(
        system,
        topic=TOPIC,
        storage_path=folder,
        backend="persisting",
        backend_options=DURABLE,
        writer_id=name,
    )
    async with writer:
        for number in range(await writer.last_sequence() + 1, BATCHES):
            batch = [{"id": f"{name}/{number}/{n}", "reward": n / ROWS} for n in range(ROWS)]
            await writer.put(batch, sequence=number)
            await writer.put(
                batch, sequence=number
            )  # a retry, as after a timeout: it is stored once


async def consume(
    system: Any,
    folder: str | None,
    handled: Counter[str],
    producing: asyncio.Future[Any],
    most: float = float("inf"),
) -> int:
    """Handle about ``most`` records, or all that are produced; return how many."""
    count = 0
    async with await read_queue(
        system, topic=TOPIC, storage_path=folder, group="trainers", wait_for_topic=60
    ) as reader:
        while count < most:
            all_are_put = producing.done()
            batch = await reader.get(limit=40, wait=True, timeout=1.0)
            if not batch and all_are_put and (await reader.stats())["group_lag"] == 0:
                break
            handled.update(record["id"] for record in batch)
            await reader.commit()
            count += len(batch)
    return count


async def main(folder: str | None) -> None:
    system = await pul.actor_system("127.0.0.1:0")
    handled: Counter[str] = Counter()
    try:
        producing = asyncio.gather(
            produce(system, "actor-1", folder), produce(system, "actor-2", folder)
        )
        _, first, second = await asyncio.gather(
            producing,
            consume(system, folder, handled, producing, most=200),
            consume(system, folder, handled, producing),
        )
        async with await read_queue(system, topic=TOPIC, group="trainers") as reader:
            stats = await reader.stats()
    finally:
        await system.shutdown()  # flushes every bucket
    print("stored: ", stats["total_count"])
    print("handled:", len(handled), "by one consumer", first, "by the other", second)
    print("lag:    ", stats["group_lag"])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
