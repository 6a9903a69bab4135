"""A node of the cluster that puts trajectories and notes what was acknowledged.

    python -m persisting.demo.producer NAME SEED STORAGE NOTES SECONDS

It owns a share of the buckets. The notes are JSON lines written after each acknowledgement. They
survive a kill of the process and list the records that must be found afterwards.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from persisting import metrics
from persisting.demo.trajectories import trajectories
from persisting.queue import write_queue

TOPIC = "trajectories"
BATCH = 25
DURABLE = {"enable_wal": True, "wal_sync_interval": 0.0, "enable_metrics": True}


class Acknowledged(msgspec.Struct):
    """An acknowledged batch."""

    agent: str
    first: int
    count: int
    time: float
    """When it was acknowledged, in Unix time."""
    seconds: float
    """How long the put took."""


async def main(name: str, seed: str, storage: str, notes: IO[bytes], seconds: float) -> None:
    import pulsing

    from persisting.cluster import serve

    system = await pulsing.actor_system("127.0.0.1:0", seeds=[seed])
    host = await serve(system)
    server = metrics.serve(port=0)
    writer = await write_queue(
        system, topic=TOPIC, storage_path=storage, backend="persisting", backend_options=DURABLE
    )
    print("metrics", server.server_port, flush=True)
    await _produce(writer, name, notes, seconds)
    print("done", flush=True)
    await asyncio.to_thread(sys.stdin.readline)  # until the demo has scraped the metrics
    await writer.close()
    server.shutdown()
    await host.close()
    await system.shutdown()


async def _produce(writer: Any, name: str, notes: IO[bytes], seconds: float) -> None:
    first, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        batch = trajectories(name, first, BATCH)
        started = time.monotonic()
        await writer.put(batch)
        took = time.monotonic() - started
        note = Acknowledged(name, first, len(batch), time.time(), took)
        notes.write(msgspec.json.encode(note) + b"\n")
        first += len(batch)


if __name__ == "__main__":
    _name, _seed, _storage, _notes, _seconds = sys.argv[1:]
    with Path(_notes).open("ab", buffering=0) as _file:
        asyncio.run(main(_name, _seed, _storage, _file, float(_seconds)))
