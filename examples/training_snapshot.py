"""A reproducible training set: a tag on a topic while producers keep writing.

    python examples/training_snapshot.py [folder]

Without a folder it works in ./queue_storage. Producers put samples all the time. A tag pins the
state of the whole topic, across its buckets; two epochs of training read exactly the same rows,
although samples keep arriving and retention drops old ones in the meantime.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys

import pyarrow as pa

from persisting.queue import QueueReader, QueueWriter, read_queue, write_queue

TOPIC = "samples"
TAG = "train-1"
PRODUCERS = 3


class Producers:
    """Tasks that put samples until they are stopped."""

    def __init__(self, writer: QueueWriter) -> None:
        self._writer, self._running = writer, True
        self._acknowledged, self._more = 0, asyncio.Condition()
        self._tasks = [asyncio.create_task(self._produce(f"p{n}")) for n in range(PRODUCERS)]

    async def _produce(self, name: str) -> None:
        number = 0
        while self._running:
            ids = [f"{name}-{n}" for n in range(number, number + 20)]
            await self._writer.put([{"id": id_, "x": [n / 7, 1.0]} for n, id_ in enumerate(ids)])
            number += len(ids)
            async with self._more:
                self._acknowledged += len(ids)
                self._more.notify_all()

    async def reached(self, more: int) -> None:
        """Wait until ``more`` further samples are acknowledged."""
        async with self._more:
            least = self._acknowledged + more
            await self._more.wait_for(lambda: self._acknowledged >= least)

    async def stop(self) -> int:
        """Stop the producers and return how many samples they have put."""
        self._running = False
        await asyncio.gather(*self._tasks)
        return self._acknowledged


def digest(table: pa.Table) -> str:
    """Return a fingerprint of the rows and their order."""
    lines = "\n".join(map(repr, table.to_pylist()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


async def train(reader: QueueReader, epoch: int) -> str:
    table = await reader.get_arrow(version=TAG)
    print(f"epoch {epoch}: {table.num_rows} rows, digest {digest(table)}")
    return digest(table)


async def main(folder: str | None) -> None:
    writer = await write_queue(
        topic=TOPIC,
        storage_path=folder,
        backend="persisting",
        backend_options={"enable_wal": True},
    )
    async with writer, await read_queue(topic=TOPIC, storage_path=folder) as reader:
        producers = Producers(writer)
        await producers.reached(1000)
        tag = await writer.tag(TAG)
        print(f"tagged {tag['rows']} rows in {len(tag['buckets'])} buckets")
        first = await train(reader, epoch=1)

        await producers.reached(1000)
        retained = await writer.retain(rows=100)
        print(f"meanwhile {retained['dropped']} rows were dropped from the topic")
        second = await train(reader, epoch=2)

        print(f"put in this run: {await producers.stop()}")
        print("the same rows in both epochs:", first == second)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
