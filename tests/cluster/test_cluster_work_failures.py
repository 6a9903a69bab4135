"""Work groups on a cluster whose nodes are killed, paused and stopped while members work."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_nodes import Cluster
from support.cluster_work import kill_keeper_during_deliveries, run
from support.waiting import until
from support.work_places import WorkPlace

from persisting.cluster import serve
from persisting.cluster.placement import bucket_key, ranked
from persisting.cluster.pulsing_transport import PulsingTransport
from persisting.queue import read_queue


@pytest.fixture
async def place(cluster: Cluster, join: Any, tmp_path: Path) -> AsyncIterator[WorkPlace]:
    cluster.start(3)
    place = WorkPlace(tmp_path, await join(cluster))
    yield place
    await place.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["kill", "leave", "pause"])
async def test_failing_owners_lose_no_record_and_repeat_nothing_acknowledged(
    cluster: Cluster, place: WorkPlace, fault: str
) -> None:
    workers = await run(place, cluster, fault)
    assert set(workers.acknowledged) == set(range(400))
    member = await place.member()
    assert (await member.stats())["acknowledged"] == 400


@pytest.mark.timeout(300)
async def test_killed_owners_store_every_dead_letter_once(
    cluster: Cluster, place: WorkPlace
) -> None:
    await run(place, cluster, "kill", reject=True)
    dead = await read_queue(
        place.system, topic=f"{place.topic}.dead", storage_path=str(place.folder)
    )
    stored = Counter(letter["id"] for letter in await dead.get(None))
    await dead.close()
    assert stored == Counter(range(400))
    member = await place.member(lease=60.0)
    assert await member.redrive() == 400
    again = Counter()
    while again.total() < 400:
        deliveries = await member.fetch(100, wait=True, timeout=60.0)
        assert deliveries, f"{400 - again.total()} records do not come"
        again.update(delivery.record["id"] for delivery in deliveries)
        await member.ack(deliveries)
    assert await member.fetch(100) == []
    assert again == Counter(range(400))


async def test_a_member_in_flight_keeps_its_lease_when_the_keeper_dies(
    cluster: Cluster, place: WorkPlace
) -> None:
    await kill_keeper_during_deliveries(place, cluster)


async def test_a_group_moves_while_its_dead_letters_have_no_owner(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    """A node opens no bucket while a group leaves it, so the group must not wait for one."""
    (other,) = cluster.start(1)
    system = await join(cluster)
    host = await serve(system)

    async def hosts_are_known() -> bool:
        return len(await PulsingTransport(system).hosts()) == 2

    await until(hosts_are_known)
    hosts = [host.node, other.id]

    def best_owner(topic: str) -> str:
        return ranked(bucket_key(str(tmp_path / topic), 0), hosts)[0]

    place = WorkPlace(tmp_path, system)
    while [best_owner(place.topic), best_owner(f"{place.topic}.dead")] != hosts:
        place = WorkPlace(tmp_path, system)
    await place.writer(2, num_buckets=1)
    member = await place.member(lease=120.0)
    first, second = await member.fetch(2)
    await first.reject("broken")
    other.kill()
    async with host._opening:  # as when the bucket of the group moves to a better node
        await asyncio.wait_for(host._close_bucket(bucket_key(str(tmp_path / place.topic), 0)), 20)
    await second.reject("broken too")
    assert (await member.stats())["dead"] == 2
    await place.close()
