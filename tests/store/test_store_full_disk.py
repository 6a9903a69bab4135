"""The disk of the server is full: errors name the cause, nothing is lost, and with room it works.

The disk is a file system in memory, which needs root.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster_join import join_cluster, leave_cluster
from support.cluster_nodes import Cluster
from support.fault_proxy import FaultProxy
from support.object_stores import SeaweedFS, environment_of, fresh_prefix, url
from support.small_disk import SmallDisk
from support.store_puts import Topic
from support.topic_places import ids, numbered, streamed

from persisting.errors import StorageError
from persisting.queue import read_queue, write_queue
from persisting.store import object_store

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

MEGABYTES = 160
PADDING = 20_000


class SmallServer(SeaweedFS):
    """SeaweedFS on a small disk of its own."""

    def __init__(self, folder: Path) -> None:
        self.disk = SmallDisk(folder / "disk", MEGABYTES)
        super().__init__(self.disk.folder / "server")

    def make_room(self) -> None:
        """Make room, and start the server again: its own journal refuses writes until then."""
        self.kill()
        self.disk.make_room()
        self.start()


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[SmallServer]:
    running = SmallServer(tmp_path)
    try:
        running.start()
        yield running
    finally:
        running.kill()
        running.disk.close()


async def test_puts_fail_with_the_cause_while_the_disk_is_full_and_nothing_is_lost(
    small_server: SmallServer,
) -> None:
    prefix = fresh_prefix()
    topic = Topic(small_server.port, prefix, padding=PADDING)
    await topic.put(10)
    await topic.flush()
    await topic.put(10)
    for _ in range(2):
        small_server.disk.fill()
        before = len(topic.failures)
        while len(topic.failures) == before:
            await topic.put(1)
        for failure in topic.failures[before:]:
            assert url(prefix) in str(failure)
            assert "500 Internal Server Error" in str(failure)
        await asyncio.to_thread(small_server.make_room)
        acknowledged = len(topic.acknowledged)
        while len(topic.acknowledged) < acknowledged + 10:
            await topic.put(1)
        await topic.flush()
    await topic.check()


async def test_put_that_waits_for_room_is_acknowledged_by_the_same_writer(
    small_server: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long the server takes to start again.
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 600.0)
    proxy = FaultProxy(small_server.port)
    try:
        topic = Topic(proxy.port, fresh_prefix(), padding=PADDING)
        await topic.put(10)
        writer = await topic.writer()
        small_server.disk.fill()
        putting = asyncio.create_task(topic.put(100))
        while proxy.statuses[500] < 3:
            assert not putting.done(), "the server stored everything on a full disk"
            await asyncio.sleep(0.02)
        assert len(topic.acknowledged) < 110
        await asyncio.to_thread(small_server.make_room)
        await putting
        assert topic.failures == []
        assert await topic.writer() is writer
        await topic.flush()
        await topic.check()
        assert len(topic.acknowledged) == 110
    finally:
        proxy.stop()


async def test_cluster_names_the_cause_while_the_disk_is_full_and_continues_with_room(
    small_server: SmallServer,
) -> None:
    """The owner gives its log up, and no node can open the bucket again until there is room."""
    cluster = Cluster(variables=environment_of(small_server.options()))
    system = None
    try:
        await asyncio.to_thread(cluster.start, 2)
        system = await join_cluster(cluster)
        options = small_server.options()
        where = {"topic": "t", "storage_path": url(fresh_prefix()), "storage_options": options}
        writer = await write_queue(
            system, **where, durable=True, num_buckets=2, writer_id="w", bucket_column="id"
        )
        stored = 0
        await writer.put(numbered(10), sequence=stored)
        for _ in range(2):
            small_server.disk.fill()
            failure: StorageError | None = None
            while failure is None:
                stored += 1
                rows = [{**row, "padding": "x" * PADDING} for row in numbered(10, 10 * stored)]
                try:
                    await writer.put(rows, sequence=stored)
                except StorageError as exc:
                    failure = exc
            assert "s3://" in str(failure)
            assert "500 Internal Server Error" in str(failure)
            await asyncio.to_thread(small_server.make_room)
            while True:
                try:
                    await writer.put(rows, sequence=stored)
                    break
                except StorageError as exc:
                    failure = exc
        reader = await read_queue(system, **where)
        assert sorted(ids(await streamed(reader))) == list(range(10 * stored + 10))
        await reader.close()
        await writer.close()
    finally:
        if system is not None:
            await leave_cluster(system)
        cluster.close()
