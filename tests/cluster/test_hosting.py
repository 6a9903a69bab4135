"""Serving buckets: opening and closing, message sizes, file descriptors, exit codes."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.cluster_join import join_cluster, leave_cluster
from support.cluster_nodes import Cluster, Process
from support.cluster_traffic import synced_writer
from support.descriptors import open_descriptors
from support.topic_places import ids, numbered, streamed
from support.waiting import until

from persisting.cluster import locator, wire
from persisting.cluster.host import host_here, serve
from persisting.cluster.pulsing_transport import PulsingConnection
from persisting.errors import BucketLocked, InvalidArgument, StorageError
from persisting.queue import LanceBackend, read_queue, write_queue
from persisting.topic import registry
from persisting.topic.live_topics import live_topic

MIB = 1 << 20


async def test_serving_leaks_no_file_descriptors() -> None:
    counts = []
    for _ in range(4):
        system = await join_cluster(Cluster(), 0)
        await serve(system)
        await leave_cluster(system)
        await asyncio.sleep(0.3)
        counts.append(open_descriptors())

    async def has_few() -> bool:  # some are closed later on a busy machine
        return open_descriptors() - counts[0] < 15

    await until(has_few)


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01, 0.03])
async def test_a_cancelled_first_put_leaves_a_working_bucket(tmp_path: Path, delay: float) -> None:
    system = await join_cluster(Cluster(), 0)
    try:
        writer = await write_queue(
            system, topic="t", storage_path=str(tmp_path), backend="lance", num_buckets=1
        )
        task = asyncio.ensure_future(writer.put({"id": 0}))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(writer.put({"id": 1}), 60)
        found = ids(await streamed(await read_queue(system, topic="t")))
        assert found in ([1], [0, 1])
    finally:
        await leave_cluster(system)


async def test_process_outside_the_cluster_reads_and_is_told_how_to_write(
    tmp_path: Path, cluster: Cluster, join: Any
) -> None:
    (node,) = cluster.start(1)
    system = await join(cluster)
    inside = await write_queue(
        system, topic="t", storage_path=str(tmp_path), durable=True, num_buckets=1
    )
    await inside.put(numbered(20))
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        assert ids(await reader.get()) == list(range(20))
    async with await write_queue(topic="t", storage_path=str(tmp_path)) as outside:
        with pytest.raises(BucketLocked, match="pass a system of the cluster to write_queue") as no:
            await outside.put({"id": 20})
        assert f"process {node.popen.pid} on " in str(no.value)
    await inside.put({"id": 20})
    assert ids(await streamed(await read_queue(system, topic="t"))) == list(range(21))


async def test_a_closed_host_gets_no_requests_and_can_serve_again(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(1)
    system = await join(cluster)
    host = await serve(system)
    writer = await write_queue(
        system, topic="t", storage_path=str(tmp_path), backend="lance", num_buckets=8
    )
    await writer.put(numbered(100))
    await host.close()
    await writer.put(numbered(100, 100))
    stats = await writer.stats()
    assert {bucket["node"] for bucket in stats["buckets"]} == {cluster.nodes[0].id}
    assert stats["total_count"] == 200
    again = await serve(system)
    assert again is not host
    await writer.put(numbered(100, 200))
    assert (await writer.stats())["total_count"] == 300


async def test_stats_name_the_owner_even_in_its_own_process(tmp_path: Path) -> None:
    system = await join_cluster(Cluster(), 0)
    try:
        writer = await write_queue(
            system, topic="t", storage_path=str(tmp_path), backend="lance", num_buckets=1
        )
        await writer.put({"id": 1})
        node = (await writer.stats())["buckets"][0]["node"]
        assert node == str(system.node_id.id)
    finally:
        await leave_cluster(system)


async def test_a_client_does_not_become_a_host_while_it_joins(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start(1)
    for _ in range(3):
        system = await join_cluster(cluster, 0)
        writer = await write_queue(system, topic="t", storage_path=str(tmp_path), backend="lance")
        await writer.put(numbered(10))
        assert host_here(system._inner) is None
        await leave_cluster(system)


async def test_a_backend_upgrade_reaches_buckets_that_are_already_open(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(2)
    system = await join(cluster)
    old = await write_queue(system, topic="t", storage_path=str(tmp_path), backend="lance")
    await old.put(numbered(40))
    with pytest.warns(UserWarning, match="from now on"):
        new = await synced_writer(system, tmp_path)
    await new.put([{"id": n, "new": n} for n in range(40, 80)])
    stats = await new.stats()
    assert stats["wal_enabled"] is True
    assert all(bucket["wal_enabled"] for bucket in stats["buckets"])
    await old.put(numbered(40, 80))
    cluster.nodes[0].kill()
    await old.put(numbered(40, 120))
    assert (await new.stats())["wal_enabled"] is True
    assert sorted(ids(await streamed(await read_queue(system, topic="t")))) == list(range(160))


async def test_calls_wait_while_another_process_holds_a_bucket_closed_for_new_options(
    tmp_path: Path, spawned: Any
) -> None:
    system = await join_cluster(Cluster(), 0)
    try:
        writer = await write_queue(
            system, topic="t", storage_path=str(tmp_path), backend="lance", num_buckets=1
        )
        await writer.put(numbered(10))
        live = live_topic(tmp_path / "t")
        assert live is not None
        readers = [await read_queue(system, topic="t") for _ in range(3)]
        await live.close_buckets()  # as new options do; the next use reopens the bucket
        other = LanceBackend(0, str(tmp_path / "t" / "bucket_0"))
        calls = [
            spawned(writer.put(numbered(10, 10))),
            spawned(writer.stats()),
            spawned(writer.query("id < 3")),
            spawned(readers[0].get(limit=5)),
            spawned(readers[1].get(limit=20, wait=True, timeout=60)),
            spawned(streamed(readers[2], limit=20, block=True)),
        ]
        await asyncio.sleep(1)
        assert [call for call in calls if call.done()] == []
        await other.close()
        await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert sorted(ids(calls[2].result())) == [0, 1, 2]
        assert ids(calls[3].result()) == [0, 1, 2, 3, 4]
        assert ids(calls[5].result()) == list(range(20))
        assert (await writer.stats())["total_count"] == 20
    finally:
        await leave_cluster(system)


async def test_a_node_without_the_backend_is_named_in_the_error(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    class Own(LanceBackend):
        pass

    cluster.start(1)
    system = await join(cluster)
    try:
        writer = await write_queue(system, topic="t", storage_path=str(tmp_path), backend=Own)
        with pytest.raises(InvalidArgument, match=rf"node {cluster.nodes[0].id} does not know"):
            await writer.put({"id": 1})
    finally:
        registry._registered.pop("Own")


async def test_storage_path_selects_one_of_two_topics_of_the_same_name(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(1)
    system = await join(cluster)
    for number, name in enumerate("ab"):
        writer = await write_queue(
            system, topic="t", storage_path=str(tmp_path / name), backend="lance"
        )
        await writer.put({"id": number})
    again = await write_queue(system, topic="t", storage_path=str(tmp_path / "b"))
    await again.put({"id": 2})
    reader = await read_queue(system, topic="t", storage_path=str(tmp_path / "b"))
    assert sorted(ids(await streamed(reader))) == [1, 2]
    for opening in (read_queue, write_queue):
        with pytest.raises(InvalidArgument, match="several"):
            await opening(system, topic="t")


async def test_puts_to_a_memory_topic_raise_after_its_node_died(
    cluster: Cluster, join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locator, "PATIENCE_SECONDS", 2.0)
    cluster.start(2)
    system = await join(cluster)
    writer = await write_queue(system, topic="m", backend="memory")
    await writer.put(numbered(10))
    home = cluster.owner((await writer.stats())["buckets"][0])
    home.kill()
    with pytest.raises(StorageError, match="topic 'm'"):
        await writer.put({"id": 1})


async def test_messages_stay_below_16_mib_for_large_batches(
    cluster: Cluster, join: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode, decode = wire.encode, wire.decode_reply

    def encoded(message: Any) -> bytes:
        sizes.append(len(data := encode(message)))
        return data

    def decoded(data: bytes) -> Any:
        sizes.append(len(data))
        return decode(data)

    monkeypatch.setattr(wire, "encode", encoded)
    monkeypatch.setattr(wire, "decode_reply", decoded)
    cluster.start(1)
    system = await join(cluster)
    writer = await write_queue(
        system, topic="t", storage_path=str(tmp_path), backend="persisting", num_buckets=1
    )
    await writer.put([{"id": n, "data": os.urandom(MIB)} for n in range(24)])
    await asyncio.gather(*(writer.put({"id": n, "data": bytes(MIB)}) for n in range(24, 44)))
    assert max(sizes) < 16 * MIB
    reader = await read_queue(system, topic="t", storage_path=str(tmp_path))
    assert ids(await streamed(reader)) == list(range(44))
    await reader.reset()
    found: list[Any] = []
    while page := await reader.get(limit=1000):
        found += ids(page)
    assert found == list(range(44))
    assert (await reader.get_arrow(offset=0)).num_rows == 44
    assert max(sizes) < 16 * MIB


async def test_concurrent_single_puts_share_calls(
    cluster: Cluster, join: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    send = PulsingConnection._send

    async def counted(connection: Any, request: Any, timeout: float) -> Any:
        calls.append(request.op)
        return await send(connection, request, timeout)

    monkeypatch.setattr(PulsingConnection, "_send", counted)
    cluster.start(1)
    system = await join(cluster)
    writer = await synced_writer(system, tmp_path)
    await writer.put(numbered(8))
    calls.clear()
    await asyncio.gather(*(writer.put({"id": n}) for n in range(1000)))
    assert calls.count("put") + calls.count("put_parts") <= 20
    assert (await writer.stats())["total_count"] == 1008


async def test_a_slow_consumer_holds_back_the_sender(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(1)
    system = await join(cluster)
    writer = await write_queue(
        system, topic="t", storage_path=str(tmp_path), backend="lance", num_buckets=2
    )
    text = "x" * 10_000
    for start in range(0, 10_000, 2000):
        await writer.put([{"id": n, "text": text} for n in range(start, start + 2000)])
    await writer.flush()
    reader = await read_queue(system, topic="t", storage_path=str(tmp_path))
    before = _resident()
    stream = reader.get_stream()
    await anext(stream)
    await asyncio.sleep(1.5)
    assert _resident() - before < 70 * MIB
    count = 1
    async for _ in stream:
        count += 1
    assert count == 10_000


def _resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGESIZE")


async def test_two_nodes_that_create_a_memory_topic_concurrently_share_it(
    cluster: Cluster, join: Any
) -> None:
    program = """
import asyncio, sys
import pulsing as pul
from persisting.cluster import serve
from persisting.cluster.pulsing_transport import PulsingTransport
from persisting.queue import write_queue
async def main():
    system = await pul.actor_system("127.0.0.1:0", seeds=sys.argv[1:])
    await serve(system)
    while len(await PulsingTransport(system).hosts()) < 3:
        await asyncio.sleep(0.02)
    print("HERE", flush=True)
    await asyncio.sleep(1 - __import__("time").time() % 1)
    writer = await write_queue(system, topic="m", backend="memory")
    await writer.put([{"id": n} for n in range(20)])
    print("PUT", (await writer.stats())["buckets"][0]["node"], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    cluster.start(1)
    children = [cluster.run("-c", program, *cluster.seeds) for _ in range(2)]
    homes = {(await child.await_lines("PUT"))[0] for child in children}
    system = await join(cluster)
    reader = await read_queue(system, topic="m")
    assert len(await streamed(reader)) == 40
    assert len(homes) == 1


PROGRAM = """
import asyncio, sys
import pulsing as pul
from persisting.queue import read_queue, write_queue
async def main():
    system = await pul.actor_system("127.0.0.1:0")
    writer = await write_queue(system, topic="t", storage_path=sys.argv[1], backend="lance")
    await writer.put([{"id": n} for n in range(100)])
    reader = await read_queue(system, topic="t")
    assert len([r async for r in reader.get_stream()]) == 100
    await writer.close()
    await system.shutdown()
asyncio.run(main())
print("DONE")
sys.exit(int(sys.argv[2]))
"""
SERVING = """
import asyncio, sys
import pulsing as pul
from persisting.cluster import serve
async def main():
    system = await pul.actor_system("127.0.0.1:0")
    await serve(system)
    await system.shutdown()
asyncio.run(main())
print("DONE")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("program", "runs"), [(PROGRAM, 10), (SERVING, 2)], ids=["queues", "serving"]
)
async def test_a_program_that_used_a_cluster_keeps_its_exit_code(
    cluster: Cluster, tmp_path: Path, program: str, runs: int
) -> None:
    for start in range(0, runs, 2):
        running: list[tuple[int, Process]] = []
        for number in range(start, start + 2):
            code = 0 if number % 2 else 3
            child = cluster.run("-c", program, str(tmp_path / str(number)), str(code))
            running.append((code, child))
        for code, child in running:
            assert await child.ended() == code, child.output
            assert child.lines("DONE")


async def test_a_node_listens_on_the_loopback_interface_only(cluster: Cluster) -> None:
    node = cluster.start(1)[0]
    listening = set()
    inodes = set()
    for link in Path(f"/proc/{node.popen.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            listening.add(fields[1].split(":")[0])
    assert listening == {"0100007F"}
