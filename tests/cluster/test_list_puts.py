"""Puts to several buckets on real nodes: one call per owner, through moves, kills and retries."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.cluster_nodes import Cluster
from support.cluster_traffic import owners, preferred_owners, synced_writer
from support.topic_places import ids, numbered, streamed

from persisting.cluster import wire
from persisting.cluster.host import serve
from persisting.cluster.pulsing_transport import PulsingConnection
from persisting.errors import SchemaError
from persisting.queue import read_queue

MIB = 1 << 20
PUTS = ("put", "put_parts")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The node and the operation of every call that this process sends."""
    calls: list[tuple[str, str]] = []
    send = PulsingConnection._send

    async def counted(connection: Any, request: Any, timeout: float) -> Any:
        calls.append((connection.node, request.op))
        return await send(connection, request, timeout)

    monkeypatch.setattr(PulsingConnection, "_send", counted)
    return calls


async def stored(system: Any, folder: Path) -> list[int]:
    return ids(await streamed(await read_queue(system, topic="t", storage_path=str(folder))))


async def test_list_put_costs_one_call_per_owner(
    cluster: Cluster, join: Any, tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    cluster.start(3)
    system = await join(cluster)
    writer = await synced_writer(system, tmp_path, num_buckets=12)
    await writer.put(numbered(100))
    nodes = set(owners(await writer.stats()))
    assert len(nodes) > 1
    for put in (
        lambda: writer.put(numbered(1000, 100)),
        lambda: writer.put(numbered(1000, 1100), sequence=1),
        lambda: writer.put_arrow(pa.table({"id": range(2100, 3100)})),
    ):
        calls.clear()
        await put()
        assert {op for _, op in calls} <= set(PUTS)
        assert Counter(node for node, _ in calls) == dict.fromkeys(nodes, 1)
    assert sorted(await stored(system, tmp_path)) == list(range(3100))


async def test_concurrent_single_puts_to_different_buckets_share_calls(
    cluster: Cluster, join: Any, tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    cluster.start(1)
    system = await join(cluster)
    writer = await synced_writer(system, tmp_path, num_buckets=16)
    await writer.put(numbered(64))
    calls.clear()
    await asyncio.gather(*(writer.put({"id": n}) for n in range(64, 1064)))
    assert len([op for _, op in calls if op in PUTS]) <= 10
    assert sorted(await stored(system, tmp_path)) == list(range(1064))


async def test_list_put_goes_to_buckets_of_this_process_and_of_another_node(
    cluster: Cluster, join: Any, tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    cluster.start(1)
    system = await join(cluster)
    host = await serve(system)
    writer = await synced_writer(system, tmp_path, num_buckets=16)
    await writer.put(numbered(100))
    other = cluster.nodes[0].id
    assert set(owners(await writer.stats())) == {host.node, other}
    calls.clear()
    await writer.put(numbered(100, 100))
    await writer.put(numbered(100, 200), sequence=1)
    await writer.put(numbered(100, 200), sequence=1)
    assert [node for node, op in calls if op in PUTS] == [other] * 3
    await host.close()
    await writer.put(numbered(100, 300))
    assert sorted(await stored(system, tmp_path)) == list(range(400))


class OrderedPuts:
    """Producers that start lists and single puts without waiting for the previous ones."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.acknowledged = 0
        self._next = 0
        self._running: set[asyncio.Task[None]] = set()

    async def run_until(self, target: int) -> None:
        """Put until this many records are acknowledged, with up to 12 puts under way."""
        while self.acknowledged < target:
            while len(self._running) < 12:
                count = (1, 1, 8, 40)[self._next % 4]
                rows = numbered(count, self._next)
                self._next += count
                task = asyncio.create_task(self._put(rows))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)

    async def _put(self, rows: list[dict[str, Any]]) -> None:
        await self._writer.put(rows if len(rows) > 1 else rows[0])
        self.acknowledged += len(rows)

    async def check(self, system: Any, folder: Path) -> None:
        """Check that every record is stored once and each bucket has them in call order."""
        await asyncio.gather(*self._running)
        found: list[int] = []
        for bucket in range(8):
            reader = await read_queue(
                system, topic="t", storage_path=str(folder), bucket_ids=[bucket]
            )
            part = ids(await streamed(reader))
            assert part == sorted(part)
            found += part
        assert sorted(found) == list(range(self._next))


@pytest.fixture
async def putting(cluster: Cluster, join: Any, tmp_path: Path) -> Any:
    """Start nodes and producers of a topic; return the client's system, the writer and the puts."""

    async def started(nodes: int) -> tuple[Any, Any, OrderedPuts]:
        cluster.start(nodes)
        system = await join(cluster)
        writer = await synced_writer(system, tmp_path, num_buckets=8)
        puts = OrderedPuts(writer)
        await puts.run_until(500)
        return system, writer, puts

    return started


async def test_order_holds_while_buckets_move_to_joining_nodes(
    cluster: Cluster, putting: Any, tmp_path: Path
) -> None:
    system, writer, puts = await putting(1)
    await asyncio.to_thread(cluster.start, 2)
    preferred = preferred_owners(cluster, tmp_path, 8)
    deadline = time.monotonic() + 60
    while owners(await writer.stats()) != preferred and time.monotonic() < deadline:
        await puts.run_until(puts.acknowledged + 200)
    assert owners(await writer.stats()) == preferred
    await puts.run_until(puts.acknowledged + 500)
    await puts.check(system, tmp_path)


async def test_order_holds_when_an_owner_is_killed_during_list_puts(
    cluster: Cluster, putting: Any, tmp_path: Path
) -> None:
    system, writer, puts = await putting(3)
    victim = cluster.owner((await writer.stats())["buckets"][0])
    running = asyncio.create_task(puts.run_until(puts.acknowledged + 1500))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(victim.kill)
    await asyncio.wait_for(running, 60)
    assert victim.id not in owners(await writer.stats())
    await puts.check(system, tmp_path)


async def test_numbered_list_put_repeated_after_a_move_is_stored_once(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(3)
    system = await join(cluster)
    writer = await synced_writer(system, tmp_path, num_buckets=6)
    await writer.put(numbered(200), sequence=1)
    leaver = cluster.owner((await writer.stats())["buckets"][0])
    leaver.signal(signal.SIGTERM)
    assert await leaver.ended() == 0, leaver.output
    await writer.put(numbered(200), sequence=1)
    await writer.put(numbered(200, 200), sequence=2)
    assert sorted(await stored(system, tmp_path)) == list(range(400))
    assert await writer.last_sequence() == 2


async def test_schema_error_fails_only_the_put_that_has_it(
    cluster: Cluster, join: Any, tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    cluster.start(1)
    system = await join(cluster)
    writer = await synced_writer(system, tmp_path)
    await writer.put([{"id": n, "size": n} for n in range(40)])
    calls.clear()
    records: list[dict[str, Any]] = [{"id": n, "size": n} for n in range(40, 80)]
    records[17]["size"] = "large"
    results = await asyncio.gather(*map(writer.put, records), return_exceptions=True)
    assert [n for n, result in enumerate(results) if result is not None] == [17]
    assert isinstance(results[17], SchemaError)
    assert calls[0][1] == "put_parts"
    assert sorted(await stored(system, tmp_path)) == [n for n in range(80) if n != 57]


async def test_list_put_larger_than_a_message_reaches_several_buckets(
    cluster: Cluster,
    join: Any,
    tmp_path: Path,
    calls: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    encode = wire.encode

    def encoded(message: Any) -> bytes:
        sizes.append(len(data := encode(message)))
        return data

    monkeypatch.setattr(wire, "encode", encoded)
    cluster.start(1)
    system = await join(cluster)
    writer = await synced_writer(system, tmp_path)
    await writer.put(numbered(20))
    calls.clear()
    await writer.put([{"id": n, "data": os.urandom(MIB)} for n in range(20, 44)])
    operations = Counter(op for _, op in calls)
    assert operations["put_parts"] == 1
    assert operations["stage"] >= 5
    assert max(sizes) < 8 * MIB
    assert sorted(await stored(system, tmp_path)) == list(range(44))
