"""Nodes are killed, paused, stopped and added while records are produced and consumed."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.cluster_nodes import Cluster
from support.cluster_traffic import (
    GROUP_MEMBER,
    SYNCED,
    assert_once,
    kill_owner,
    owners,
    preferred_owners,
    stop_owner,
    synced_writer,
)
from support.topic_places import ids, numbered, streamed

from persisting.cluster import locator, node_locator, pulsing_transport
from persisting.cluster.host import REBALANCE_SECONDS
from persisting.errors import StorageError
from persisting.queue import LanceBackend, read_queue, write_queue

GROUP_SYNCED = {"enable_wal": True, "wal_sync_interval": 1.0}


@pytest.mark.parametrize("options", [SYNCED, GROUP_SYNCED], ids=["wal-0.0", "wal-1.0"])
async def test_a_killed_owner_is_replaced_and_nothing_is_lost_or_duplicated(
    cluster: Cluster, join: Any, traffic: Any, options: dict[str, Any]
) -> None:
    cluster.start(3)
    flow = await traffic(await join(cluster), backend_options=options)
    await kill_owner(flow, cluster)


@pytest.mark.nightly
async def test_nothing_is_lost_when_owners_die_one_after_the_other(
    cluster: Cluster, join: Any, traffic: Any
) -> None:
    cluster.start(3)
    flow = await traffic(await join(cluster))
    for _ in range(2):
        await flow.progress()
        cluster.owner((await flow.writer.stats())["buckets"][1]).kill()
    await flow.progress()
    await flow.check()


async def test_a_bucket_that_moved_after_a_kill_is_not_moved_again(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(2)
    system = await join(cluster)
    writer = await write_queue(
        system, topic="t", storage_path=str(tmp_path), backend="persisting", num_buckets=4
    )
    await writer.put(numbered(40))
    await writer.flush()
    cluster.nodes[1].kill()
    await writer.put(numbered(40, 40))
    lock_files = [tmp_path / "t" / f"bucket_{n}" / ".lock" for n in range(4)]
    opened = [path.stat().st_mtime_ns for path in lock_files]
    await asyncio.sleep(2.25 * REBALANCE_SECONDS)
    assert [path.stat().st_mtime_ns for path in lock_files] == opened


async def test_a_paused_owner_keeps_its_bucket_and_is_named_in_the_error(
    cluster: Cluster, join: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start(3)
    system = await join(cluster)
    writer = await synced_writer(system, tmp_path, num_buckets=1)
    await writer.put(numbered(20))
    owner = cluster.owner((await writer.stats())["buckets"][0])
    monkeypatch.setattr(locator, "PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(node_locator, "OPEN_SECONDS", 1.0)
    monkeypatch.setattr(pulsing_transport, "CALL_SECONDS", 2.0)
    owner.signal(signal.SIGSTOP)
    with pytest.raises(StorageError) as caught:
        await writer.put(numbered(20, 20))
    monkeypatch.undo()
    assert owner.id in str(caught.value) or str(owner.popen.pid) in str(caught.value)
    holder = json.loads((tmp_path / "t" / "bucket_0" / ".lock").read_text())
    assert holder["pid"] == owner.popen.pid
    owner.signal(signal.SIGCONT)
    deadline = time.monotonic() + 60
    acknowledged = False
    while not acknowledged and time.monotonic() < deadline:
        try:
            await writer.put(numbered(20, 40))
            acknowledged = True
        except StorageError:
            await asyncio.sleep(0.2)
    assert acknowledged
    found = ids(await streamed(await read_queue(system, topic="t", storage_path=str(tmp_path))))
    assert_once("stored", [n for n in found if not 20 <= n < 40], [*range(20), *range(40, 60)])
    assert [n for n in found if 20 <= n < 40] in ([], list(range(20, 40)))


async def test_streams_resume_when_a_paused_owner_continues(
    cluster: Cluster, join: Any, traffic: Any
) -> None:
    cluster.start(2)
    flow = await traffic(await join(cluster), num_buckets=2)
    owner = await flow.owner(cluster)
    owner.signal(signal.SIGSTOP)
    await flow.run_for(3)
    owner.signal(signal.SIGCONT)
    await flow.progress()
    await flow.check()


async def test_sigterm_flushes_everything_and_exits_with_0(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(2)
    system = await join(cluster)
    writer = await write_queue(system, topic="t", storage_path=str(tmp_path), backend="lance")
    await writer.put(numbered(500))
    for node in cluster.nodes:
        node.signal(signal.SIGTERM)
    codes = [await node.ended() for node in cluster.nodes]
    assert codes == [0, 0], "\n".join(node.output for node in cluster.nodes)
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        assert sorted(ids(await streamed(reader))) == list(range(500))


async def test_buckets_move_to_joining_nodes_during_writes(
    cluster: Cluster, join: Any, traffic: Any, tmp_path: Path
) -> None:
    cluster.start(1)
    flow = await traffic(await join(cluster), num_buckets=8)
    await flow.progress()
    await asyncio.to_thread(cluster.start, 2)
    preferred = preferred_owners(cluster, tmp_path, 8)
    deadline = time.monotonic() + 60
    while owners(await flow.writer.stats()) != preferred and time.monotonic() < deadline:
        await flow.run_for(0.3)
    assert owners(await flow.writer.stats()) == preferred
    await flow.progress()
    await flow.check()


async def test_a_leaving_node_hands_over_its_buckets_during_writes(
    cluster: Cluster, join: Any, traffic: Any
) -> None:
    cluster.start(3)
    flow = await traffic(await join(cluster), backend="lance", backend_options=None, num_buckets=6)
    leaver = await stop_owner(flow, cluster)
    assert leaver.id not in owners(await flow.writer.stats())
    await flow.check()


async def test_a_slow_consumer_survives_a_change_of_owner(
    cluster: Cluster, join: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start(2)
    system = await join(cluster)
    writer = await synced_writer(system, tmp_path, num_buckets=1)
    text = "x" * 1000
    for start in range(0, 40_000, 4000):
        await writer.put([{"id": n, "text": text} for n in range(start, start + 4000)])
    reader = await read_queue(system, topic="t", storage_path=str(tmp_path))
    monkeypatch.setattr(locator, "PATIENCE_SECONDS", 5.0)
    found = []
    async for record in reader.get_stream():
        found.append(record["id"])
        if len(found) == 10:
            cluster.owner((await writer.stats())["buckets"][0]).kill()
            await asyncio.sleep(6)  # longer than the stream would wait for an owner
    assert found == list(range(40_000))


async def test_a_bucket_locked_by_another_process_is_opened_once_it_is_released(
    cluster: Cluster, join: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start(1)
    system = await join(cluster)
    stranger = LanceBackend(0, str(tmp_path / "t" / "bucket_0"))
    writer = await write_queue(
        system, topic="t", storage_path=str(tmp_path), backend="lance", num_buckets=1
    )
    with monkeypatch.context() as impatient:
        impatient.setattr(locator, "PATIENCE_SECONDS", 1.0)
        with pytest.raises(StorageError, match="process"):
            await writer.put(numbered(10))
    await stranger.close()
    await writer.put(numbered(10))
    assert (await writer.stats())["total_count"] == 10


async def test_a_group_member_takes_over_from_a_killed_one(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(2)
    system = await join(cluster)
    writer = await synced_writer(system, tmp_path)
    await writer.put(numbered(200))
    first = cluster.run("-c", GROUP_MEMBER, str(tmp_path), *cluster.seeds)
    await first.await_lines("GOT", 5)
    second = cluster.run("-c", GROUP_MEMBER, str(tmp_path), *cluster.seeds)
    await second.await_lines("COMMITTED", 3)
    for start in range(200, 600, 50):
        await writer.put(numbered(50, start))
        await asyncio.sleep(0.1)
    await second.await_lines("GOT", 1)
    first.kill()
    await writer.put(numbered(100, 600))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        seen = {int(line) for member in (first, second) for line in member.lines("GOT")}
        if seen == set(range(700)):
            break
        await asyncio.sleep(0.1)
    assert seen == set(range(700))


async def test_a_client_with_a_wrong_passphrase_cannot_write_to_the_topic(
    join: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locator, "PATIENCE_SECONDS", 1.5)
    with Cluster(passphrase="right") as protected:
        protected.start(1)
        inside = await join(protected, passphrase="right")
        writer = await synced_writer(inside, tmp_path, num_buckets=1)
        await writer.put(numbered(10))
        outside = await join(protected, 0, passphrase="wrong")
        stranger = await write_queue(outside, topic="t", storage_path=str(tmp_path))
        with pytest.raises(StorageError, match=str(protected.nodes[0].popen.pid)):
            await stranger.put(numbered(10, 10))
        await writer.put(numbered(10, 20))
        reader = await read_queue(inside, topic="t", storage_path=str(tmp_path))
        assert ids(await streamed(reader)) == [*range(10), *range(20, 30)]


@pytest.mark.nightly
@pytest.mark.timeout(400)
async def test_nothing_is_lost_while_nodes_die_pause_leave_and_join(
    cluster: Cluster, join: Any, traffic: Any
) -> None:
    chance = random.Random(11)
    cluster.start(4)
    flow = await traffic(await join(cluster), num_buckets=8)
    for _ in range(15):
        await flow.progress()
        living = [node for node in cluster.nodes[1:] if node.popen.poll() is None]
        node = chance.choice(living)
        fault = chance.choice(["kill", "leave", "pause"])
        if fault == "kill":
            node.kill()
        elif fault == "leave":
            node.signal(signal.SIGTERM)
            await node.ended()
        else:
            node.signal(signal.SIGSTOP)
            await flow.run_for(chance.uniform(0.5, 4))
            node.signal(signal.SIGCONT)
        if fault != "pause":
            await asyncio.to_thread(cluster.start, 1)
    await flow.progress()
    await flow.check()
