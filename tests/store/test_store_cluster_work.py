"""Work groups in an object store, on a cluster whose nodes are killed, paused and stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.cluster_join import joining
from support.cluster_nodes import Cluster
from support.cluster_work import kill_keeper_during_deliveries, run
from support.object_stores import SeaweedFS, url
from support.work_places import LOGGED, WorkPlace

TOPIC = {"backend_options": {**LOGGED, "lease": 2.0}}


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
    await kill_keeper_during_deliveries(place, cluster, **TOPIC)
