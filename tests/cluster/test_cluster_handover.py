"""Files handed over to the owners of a cluster, and flushes that other processes ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_nodes import Cluster
from support.cluster_traffic import Traffic
from support.handover import OWNER_POINTS, POINTS, files_of_handovers, hand_over, texts
from support.handover_kills import points
from support.held_process import Points
from support.topic_places import ids, streamed
from support.waiting import until, until_true

from persisting.queue import read_queue, write_queue
from persisting.topic import handover
from persisting.topic.topic_files import TopicFolder

LOGGED = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}


async def test_nodes_adopt_files_flush_on_request_and_may_die(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(2)
    system = await join(cluster)
    writer = await write_queue(
        system,
        topic="t",
        storage_path=str(tmp_path),
        num_buckets=4,
        backend="persisting",
        backend_options=LOGGED,
    )
    await writer.put_batch(texts(0, 40))
    topic = TopicFolder.open(tmp_path / "t")
    assert sum(topic.view(bucket).rows for bucket in topic.buckets) == 0
    await asyncio.to_thread(handover.flush, topic.folder, topic.config)
    assert sum(topic.view(bucket).rows for bucket in topic.buckets) == 40

    reader = await read_queue(system, topic="t", storage_path=str(tmp_path))
    assert len(await reader.get(None)) == 40
    waiting = asyncio.create_task(reader.get(None, wait=True, timeout=30))
    await asyncio.sleep(0.2)
    await writer.put_batch([])
    assert await asyncio.to_thread(hand_over, topic.folder, texts(40, 40)) == 40
    assert {record["id"] for record in await waiting} <= set(range(40, 80))
    await writer.put_batch(texts(80, 20))

    cluster.nodes[0].kill()
    assert await asyncio.to_thread(hand_over, topic.folder, texts(100, 40), "x") == 40
    await writer.put_batch(texts(140, 20))
    fresh = await read_queue(system, topic="t", storage_path=str(tmp_path))
    found = sorted(record["id"] for record in await fresh.get(None))
    assert found == list(range(160))

    async def is_clean() -> bool:
        return files_of_handovers(topic.folder) == []

    await until(is_clean)
    for queue in (reader, fresh, writer):
        await queue.close()


@pytest.fixture
def owner_points(tmp_path: Path) -> Points:
    """The points of a hand-over at which a node of ``held_cluster`` waits."""
    return Points(tmp_path, POINTS)


@pytest.fixture
def held_cluster(owner_points: Points) -> Iterator[Cluster]:
    with Cluster(variables=owner_points.environment) as cluster:
        yield cluster


@pytest.mark.parametrize("point", points(OWNER_POINTS, ("owner-committed",)))
async def test_node_killed_during_a_hand_over_loses_and_duplicates_nothing(
    held_cluster: Cluster, owner_points: Points, join: Any, traffic: Any, point: str, tmp_path: Path
) -> None:
    """The other node, or the driver, stores what is left; producers and consumers continue."""
    held_cluster.start(2)
    system = await join(held_cluster)
    flow: Traffic = await traffic(system, num_buckets=4)
    await flow.progress()
    owner_points.arm(point)
    handed = texts(1_000_000, 300)
    driver = asyncio.create_task(asyncio.to_thread(hand_over, tmp_path / "t", handed))
    await asyncio.to_thread(until_true, lambda: owner_points.held_at(point) or driver.done())
    (pid,) = owner_points.held_at(point)
    next(node for node in held_cluster.nodes if node.popen.pid == pid).kill()
    new_rows = await driver
    # If it had stored the rows of all buckets, the next owners answer that none is new.
    assert new_rows > 0 or point == "owner-answers"
    await flow.progress()
    await flow.check()
    for seen in (flow.consumed, ids(await streamed(await read(system, tmp_path)))):
        assert sorted(i for i in seen if i >= 1_000_000) == [record["id"] for record in handed]
    assert await asyncio.to_thread(hand_over, tmp_path / "t", handed) == 0


async def read(system: Any, folder: Path) -> Any:
    return await read_queue(system, topic="t", storage_path=str(folder))
