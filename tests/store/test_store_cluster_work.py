"""Work groups in an object store, on a cluster whose nodes are killed, paused and stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from support.cluster_join import joining
from support.cluster_nodes import Cluster
from support.cluster_work import BUCKETS, run
from support.object_stores import SeaweedFS, environment_of, url
from support.work_places import LOGGED, WorkPlace

TOPIC = {"backend_options": {**LOGGED, "lease": 2.0}}


@pytest.fixture
def cluster(server: SeaweedFS) -> Iterator[Cluster]:
    """A cluster of the test's own, whose nodes have credentials in their environment."""
    cluster = Cluster(variables=environment_of(server.options()))
    yield cluster
    cluster.close()


@pytest.fixture
async def place(cluster: Cluster, server: SeaweedFS, prefix: str) -> AsyncIterator[WorkPlace]:
    cluster.start(3)
    async with joining() as enter:
        place = WorkPlace(url(prefix), await enter(cluster), storage_options=server.options())
        yield place
        await place.close()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["kill", "leave", "pause"])
async def test_failing_nodes_lose_no_record_and_repeat_nothing_acknowledged(
    cluster: Cluster, place: WorkPlace, fault: str
) -> None:
    workers = await run(place, cluster, fault, **TOPIC)
    assert set(workers.acknowledged) == set(range(400))
    member = await place.member()
    assert (await member.stats())["acknowledged"] == 400


async def test_group_continues_when_the_node_that_keeps_it_is_killed(
    cluster: Cluster, place: WorkPlace
) -> None:
    options: dict[str, Any] = {"num_buckets": BUCKETS, **TOPIC}
    writer = await place.writer(4, **options)
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
