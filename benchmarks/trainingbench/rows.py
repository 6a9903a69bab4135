"""The rows that every system stores: 1 KB each, with a vector of 128 floats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

BATCH = 256
DIMENSIONS = 128
TEXT_BYTES = 480
_STEP = 50_000
TOPIC, TAG = "rows", "v1"


def tables(rows: int) -> Iterator[pa.Table]:
    """Yield the same random rows for every system."""
    random = np.random.default_rng(0)
    for first in range(0, rows, _STEP):
        count = min(_STEP, rows - first)
        letters = random.integers(97, 122, (count, TEXT_BYTES), dtype=np.uint8)
        offsets = np.arange(0, (count + 1) * TEXT_BYTES, TEXT_BYTES, dtype=np.int32)
        text = pa.Array.from_buffers(
            pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(letters.tobytes())]
        )
        vectors = pa.array(random.random(count * DIMENSIONS, dtype=np.float32))
        yield pa.table(
            {
                "id": pa.array(np.arange(first, first + count)),
                "reward": pa.array(random.random(count)),
                "text": text,
                "embedding": pa.FixedSizeListArray.from_arrays(vectors, DIMENSIONS),
            }
        )


def store_topic(folder: Path, rows: int) -> Path:
    """Write the rows to a topic, tag it, and return its folder."""
    from persisting.queue import write_queue  # a peer's environment may not have it

    async def put() -> None:
        async with await write_queue(
            topic=TOPIC,
            storage_path=str(folder),
            num_buckets=4,
            backend="persisting",
            backend_options={"vector_type": "float32", "flush_threshold": _STEP},
        ) as writer:
            for table in tables(rows):
                await writer.put_arrow(table)
            await writer.flush()
            await writer.compact()
            await writer.tag(TAG)

    asyncio.run(put())
    return folder / TOPIC
