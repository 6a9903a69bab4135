"""A producer and a consumer that run while nodes fail, and a check of what they saw."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from persisting.cluster.placement import bucket_key, ranked
from persisting.queue import read_queue, write_queue
from support.cluster_nodes import Cluster, Node
from support.waiting import until

SYNCED = {"enable_wal": True, "wal_sync_interval": 0.0}
GROUP_MEMBER = """
import asyncio, sys
import pulsing as pul
from persisting.queue import read_queue
async def main():
    root, *seeds = sys.argv[1:]
    system = await pul.actor_system("127.0.0.1:0", seeds=seeds)
    reader = await read_queue(system, topic="t", storage_path=root, group="g", wait_for_topic=10)
    while True:
        for record in await reader.get(limit=10, wait=True, timeout=1.0):
            print(f"GOT {record['id']}", flush=True)
        print("COMMITTED", len(await reader.commit()), flush=True)
asyncio.run(main())
"""
"""A program that reads "t" as a member of the group "g"; arguments: storage path and seeds."""

PROGRESS_SECONDS = 120.0


async def synced_writer(
    system: Any, folder: Path, options: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    """Open the topic "t" for writing; each put is synced before it is acknowledged."""
    return await write_queue(
        system,
        topic="t",
        storage_path=str(folder),
        backend="persisting",
        backend_options={**SYNCED, **(options or {})},
        **arguments,
    )


class Traffic:
    """A producer and a blocking consumer of one topic, with every id they saw."""

    def __init__(self, system: Any, folder: Path | str, **options: Any) -> None:
        """``folder`` may also be an address in an object store; its storage_options are in
        ``options``."""
        self.system, self.folder = system, folder
        self._read_options = {k: v for k, v in options.items() if k == "storage_options"}
        self._options = {"backend": "persisting", "backend_options": SYNCED, **options}
        self.acknowledged: list[int] = []
        self.consumed: list[int] = []
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []
        self.writer: Any = None

    async def start(self) -> None:
        self.writer = await write_queue(
            self.system, topic="t", storage_path=str(self.folder), **self._options
        )
        await self._put()
        reader = await self._reader()
        self._tasks = [
            asyncio.create_task(self._produce()),
            asyncio.create_task(self._consume(reader)),
        ]

    async def _reader(self) -> Any:
        return await read_queue(
            self.system, topic="t", storage_path=str(self.folder), **self._read_options
        )

    async def _put(self) -> None:
        first = len(self.acknowledged)
        await self.writer.put([{"id": number} for number in range(first, first + 20)])
        self.acknowledged += range(first, first + 20)

    async def _produce(self) -> None:
        while not self._stop:
            await self._put()
            await asyncio.sleep(0.01)

    async def _consume(self, reader: Any) -> None:
        async for record in reader.get_stream(block=True):
            self.consumed.append(record["id"])

    async def run_for(self, seconds: float) -> None:
        """Let both run; raise what one of them raises."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._raise_failures()
            await asyncio.sleep(0.05)

    async def progress(self) -> None:
        """Wait until 10 more puts are acknowledged and consumed."""
        target = len(self.acknowledged) + 200
        await self._until(lambda: min(len(self.acknowledged), len(self.consumed)) >= target)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async def is_true() -> bool:
            self._raise_failures()
            return condition()

        await until(is_true, PROGRESS_SECONDS, 0.05, lambda: self)

    def _raise_failures(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def owner(self, cluster: Cluster) -> Node:
        """Wait for progress; return the node that owns bucket 0 then."""
        await self.progress()
        return cluster.owner((await self.writer.stats())["buckets"][0])

    async def check(self) -> None:
        """Stop, and check that every acknowledged record is stored and was consumed once."""
        self._stop = True
        await asyncio.wait_for(self._tasks[0], PROGRESS_SECONDS)
        await self._until(lambda: len(self.consumed) >= len(self.acknowledged))
        reader = await self._reader()
        stored = [record["id"] async for record in reader.get_stream()]
        await reader.close()
        await self.close()
        assert_once("stored", stored, self.acknowledged)
        assert_once("consumed", self.consumed, self.acknowledged)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __str__(self) -> str:
        return f"{len(self.acknowledged)} acknowledged, {len(self.consumed)} consumed"


@asynccontextmanager
async def starting_traffic(
    folder: Path | str, **defaults: Any
) -> AsyncIterator[Callable[..., Awaitable[Traffic]]]:
    """Start producers and consumers of a topic with these options; stop them at the end."""
    running: list[Traffic] = []

    async def start(system: Any, **options: Any) -> Traffic:
        running.append(Traffic(system, folder, **{**defaults, **options}))
        await running[-1].start()
        return running[-1]

    yield start
    for flow in running:
        await flow.close()


async def kill_owner(flow: Traffic, cluster: Cluster) -> None:
    """Kill the owner of bucket 0; check that another node replaces it and nothing is lost."""
    victim = await flow.owner(cluster)
    victim.kill()
    await flow.progress()
    assert victim.id not in owners(await flow.writer.stats())
    await flow.check()


async def stop_owner(flow: Traffic, cluster: Cluster) -> Node:
    """Have the owner of bucket 0 leave; return it when others go on without it."""
    leaver = await flow.owner(cluster)
    leaver.signal(signal.SIGTERM)
    assert await leaver.ended() == 0, leaver.output
    await flow.progress()
    return leaver


def owners(stats: dict[str, Any]) -> list[str]:
    """Return the nodes that own the buckets."""
    return [bucket["node"] for bucket in stats["buckets"]]


def preferred_owners(cluster: Cluster, folder: Path, buckets: int) -> list[str]:
    """Return the nodes that own the buckets of the topic "t" once all have moved."""
    names = [node.id for node in cluster.nodes]
    place = str((folder / "t").resolve())
    return [ranked(bucket_key(place, bucket), names)[0] for bucket in range(buckets)]


def assert_once(what: str, found: list[int], expected: list[int]) -> None:
    missing = sorted(set(expected) - set(found))
    repeated = sorted(number for number, count in Counter(found).items() if count > 1)
    assert (missing, repeated) == ([], []), (
        f"{what}: missing {missing[:20]}, more than once {repeated[:20]}"
    )
