"""A bucket inside your own program: put, flush, read, follow.

    python examples/embedded_backend.py [folder]

Without a folder it works in a temporary one.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

import pyarrow as pa

from persisting.queue import LanceBackend


async def produce(backend: LanceBackend) -> None:
    await backend.put({"id": "a", "value": 1, "vector": [0.1, 0.2]})
    await backend.put_batch(
        [
            {"id": "b", "value": 2, "vector": [0.3, 0.4]},
            {"id": "c", "value": 3, "vector": [0.5, 0.6]},
        ]
    )
    await backend.put_arrow(pa.table({"id": ["d"], "value": [4], "vector": [[0.7, 0.8]]}))
    await backend.flush()


async def follow(backend: LanceBackend, count: int) -> None:
    """Print records as they arrive, waiting for those that are not stored yet."""
    async for record in backend.get_stream(limit=count, block=True):
        print("got", record)


async def main(folder: str) -> None:
    async with LanceBackend(bucket_id=0, storage_path=f"{folder}/bucket_0") as backend:
        already = backend.total_count()
        consumer = asyncio.create_task(follow(backend, already + 4))
        await produce(backend)
        await consumer

        print("page  ", await backend.get(offset=1, limit=1))
        print("column", (await backend.get_arrow())["value"].to_pylist())
        stats = await backend.stats()
        print("stats ", {key: stats[key] for key in ("total_count", "persisted_count", "version")})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            asyncio.run(main(temporary))
