"""Members of a work group that work while nodes of their cluster are killed, paused and stopped."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from typing import Any

from persisting.errors import LeaseLost, StorageError
from support.cluster_nodes import Cluster
from support.work_places import WorkPlace

BUCKETS = 4


class Workers:
    """Members that take records until all are finished, and what they saw."""

    def __init__(self, place: WorkPlace) -> None:
        self._place = place
        self.delivered: Counter[int] = Counter()
        self.acknowledged: dict[int, int] = {}
        self.rejected: set[int] = set()
        self.late: list[int] = []
        """Records that were delivered although an ack or a reject had returned."""
        self.tokens: dict[int, list[int]] = {}

    async def work(self, done: asyncio.Event, *, reject: bool = False) -> None:
        member = await self._place.member(lease=2.0, max_deliveries=1_000_000, breaker=False)
        while True:
            try:
                deliveries = await member.fetch(8, wait=True, timeout=0.5)
                for delivery in deliveries:
                    await self._handle(delivery, reject)
                if not deliveries and done.is_set():
                    if not (await member.stats())["unacknowledged"]:
                        return
            except StorageError as exc:
                if not isinstance(exc, LeaseLost):
                    await asyncio.sleep(0.2)  # no owner for a while

    async def _handle(self, delivery: Any, reject: bool) -> None:
        number, token = delivery.record["id"], delivery.key[2]
        self.delivered[number] += 1
        if token > self.acknowledged.get(number, token):
            self.late.append(number)
        try:
            if reject:
                await delivery.reject("on purpose")
                self.rejected.add(number)
            else:
                await delivery.ack()
            self.acknowledged[number] = token
        except LeaseLost:
            return


async def put_slowly(writer: Any, count: int, done: asyncio.Event) -> None:
    for first in range(0, count, 10):
        await writer.put([{"id": n} for n in range(first, first + 10)])
        await asyncio.sleep(0.02)
    done.set()


async def run(
    place: WorkPlace, cluster: Cluster, fault: str, *, reject: bool = False, **topic: Any
) -> Workers:
    """Have three members work while the owners of bucket 0 and of another bucket fail."""
    count = 400
    writer = await place.writer(num_buckets=BUCKETS, **topic)
    workers, done = Workers(place), asyncio.Event()
    tasks = [asyncio.create_task(workers.work(done, reject=reject)) for _ in range(3)]
    putting = asyncio.create_task(put_slowly(writer, count, done))
    for bucket in (0, 1):
        while len(workers.acknowledged) < (bucket + 1) * count // 4:
            await asyncio.sleep(0.05)
            for task in [*tasks, putting]:
                assert not task.done() or task.exception() is None
        owner = cluster.owner((await writer.stats())["buckets"][bucket])
        if fault == "kill":
            owner.kill()
        elif fault == "leave":
            owner.signal(signal.SIGTERM)
        else:
            owner.signal(signal.SIGSTOP)
            await asyncio.sleep(3.0)
            owner.signal(signal.SIGCONT)
        if fault != "pause" and bucket == 0:
            await asyncio.to_thread(cluster.start, 1)
    await putting
    await asyncio.gather(*tasks)
    assert set(workers.delivered) == set(range(count))
    assert workers.late == []
    return workers


async def kill_keeper_during_deliveries(place: WorkPlace, cluster: Cluster, **topic: Any) -> None:
    """Kill the node that keeps a group; check that a member goes on with the leases it has."""
    writer = await place.writer(4, num_buckets=BUCKETS, **topic)
    member = await place.member(lease=120.0)
    deliveries = await member.fetch(4)
    await deliveries[0].ack()
    cluster.owner((await writer.stats())["buckets"][0]).kill()
    await deliveries[0].ack()  # repeated, as after a lost answer
    await member.ack(deliveries[1:3])
    assert await member.fetch(4) == []
    await deliveries[3].reject("broken")
    stats = await member.stats()
    assert (stats["acknowledged"], stats["dead"], stats["unacknowledged"]) == (3, 1, 0)
