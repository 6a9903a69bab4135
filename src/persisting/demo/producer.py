"""An agent that puts trajectories through a cluster and notes what was acknowledged.

    python -m persisting.demo.producer NAME SEED STORAGE NOTES SECONDS

The notes are JSON lines written after each acknowledgement. They list the records that must be
found afterwards.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from persisting.demo.trajectories import trajectories
from persisting.queue import write_queue

TOPIC = "trajectories"
BATCH = 25
NODES = 3
"""Storage nodes of the cluster."""


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

    from persisting.cluster.pulsing_transport import PulsingTransport

    system = await pulsing.actor_system("127.0.0.1:0", seeds=[seed])
    while True:
        if len(await PulsingTransport(system).hosts()) >= NODES:
            break
        await asyncio.sleep(0.05)
    writer = await write_queue(
        system,
        topic=TOPIC,
        storage_path=storage,
        durable=True,
        backend_options={"enable_metrics": True},
    )
    print("putting", flush=True)
    await _produce(writer, name, notes, seconds)
    await writer.close()
    print("done", flush=True)
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
