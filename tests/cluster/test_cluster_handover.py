"""Files handed over to the owners of a cluster, and flushes that other processes ask for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from support.cluster_nodes import Cluster
from support.handover import files_of_handovers, hand_over, texts
from support.waiting import until

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
