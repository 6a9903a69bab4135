"""Tasks may be cancelled at any time: nothing hangs, is lost or is stored twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.cluster_nodes import Cluster
from support.cluster_traffic import synced_writer
from support.topic_places import ids, numbered, streamed

from persisting.errors import StorageError
from persisting.queue import read_queue, write_queue


@pytest.fixture
async def topic(cluster: Cluster, join: Any, tmp_path: Path) -> Any:
    """A system, its storage path, and a writer that has put 200 records."""
    cluster.start(1)
    system = await join(cluster)
    writer = await synced_writer(system, tmp_path)
    await writer.put(numbered(200))
    return system, str(tmp_path), writer


async def test_a_waiting_stream_ends_whenever_it_is_cancelled(topic: Any) -> None:
    system, root, _ = topic
    for attempt in range(40):
        reader = await read_queue(system, topic="t", storage_path=root)
        task = asyncio.ensure_future(streamed(reader, block=True))
        await asyncio.sleep(0.001 * attempt)
        task.cancel()
        await asyncio.wait([task], timeout=30)
        assert task.done(), f"a stream cancelled after {attempt} ms still waits"
        await asyncio.wait_for(reader.close(), 30)


async def test_a_waiting_get_ends_whenever_it_is_cancelled(topic: Any) -> None:
    system, root, _ = topic
    reader = await read_queue(system, topic="t", storage_path=root)
    await reader.get(limit=1000)
    for attempt in range(40):
        task = asyncio.ensure_future(reader.get(wait=True))
        await asyncio.sleep(0.0007 * attempt)
        task.cancel()
        await asyncio.wait([task], timeout=30)
        assert task.done(), f"a get cancelled after {0.7 * attempt} ms still waits"


async def test_closing_a_reader_ends_its_waiting_reads(topic: Any) -> None:
    system, root, _ = topic
    for read in (lambda r: r.get(wait=True), lambda r: streamed(r, block=True)):
        reader = await read_queue(system, topic="t", storage_path=root)
        await reader.get(limit=1000)
        task = asyncio.ensure_future(read(reader))
        await asyncio.sleep(0.3)
        await asyncio.wait_for(reader.close(), 30)
        await asyncio.wait([task], timeout=30)
        assert task.done()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        assert result == [] or isinstance(result, StorageError)


async def test_a_short_wait_ends_while_a_long_one_continues(topic: Any, spawned: Any) -> None:
    system, root, writer = topic
    reader = await read_queue(system, topic="t", storage_path=root)
    await reader.get(limit=1000)
    long = spawned(reader.get(wait=True))
    await asyncio.sleep(0.1)
    assert await asyncio.wait_for(reader.get(wait=True, timeout=0.3), 30) == []
    assert await asyncio.wait_for(reader.get(), 30) == []
    await asyncio.wait_for(reader.reset(), 30)
    await writer.put({"id": -1})
    assert await asyncio.wait_for(long, 30)


async def test_a_storm_of_cancelled_puts_stores_each_acknowledged_record_once(topic: Any) -> None:
    system, root, writer = topic
    chance = random.Random(5)
    acknowledged: list[int] = []

    async def put_or_cancel(number: int) -> None:
        task = asyncio.ensure_future(writer.put({"id": number}))
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.02)
            task.cancel()
        await asyncio.wait([task], timeout=30)
        assert task.done()
        if not task.cancelled() and task.exception() is None:
            acknowledged.append(number)

    for start in range(1000, 2000, 100):
        await asyncio.gather(*(put_or_cancel(number) for number in range(start, start + 100)))
    await writer.put({"id": 5000})
    counts = Counter(ids(await streamed(await read_queue(system, topic="t", storage_path=root))))
    assert set(acknowledged) <= set(counts)
    assert max(counts.values()) == 1
    assert counts[5000] == 1


async def test_a_reader_beyond_the_end_after_data_loss_gets_new_records(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(2)
    system = await join(cluster)
    writer = await write_queue(
        system, topic="t", storage_path=str(tmp_path), backend="lance", num_buckets=1
    )
    await writer.put(numbered(100))
    reader = await read_queue(system, topic="t", storage_path=str(tmp_path))
    assert len(await reader.get(limit=1000)) == 100
    cluster.owner((await writer.stats())["buckets"][0]).kill()
    await writer.put(numbered(50, 1000))
    found: list[int] = []
    for _ in range(60):
        found += ids(await reader.get(limit=1000, wait=True, timeout=0.5))
        if len(found) >= 50:
            break
    assert sorted(found) == list(range(1000, 1050))
