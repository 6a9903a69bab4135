"""Clusters whose topics are in an object store: nodes that die, pause, lose the store or leave."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pulsing as pul
import pyarrow as pa
import pytest
from support.cluster_join import joining
from support.cluster_nodes import Cluster
from support.cluster_traffic import Traffic, kill_owner, owners, starting_traffic, stop_owner
from support.fault_proxy import FaultProxy
from support.object_stores import KEY, SECRET, SeaweedFS, environment_of, storage_options, url
from support.store_places import topic_store
from support.topic_places import ids, numbered, streamed
from support.waiting import until

from persisting.bucket.store_ownership import owner_register
from persisting.cluster import ClusterReader, locator, serve, store_access, wire
from persisting.cluster.host import host_here
from persisting.errors import InvalidArgument, StorageError
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import ObjectStore, open_store
from persisting.store_address import parse
from persisting.wal.lease import lease_register

LEASE = 2.0
LOGGED = {"enable_wal": True, "lease": LEASE, "flush_interval": 0.5}


@pytest.fixture
def proxied(proxy: FaultProxy) -> Iterator[Cluster]:
    """The test's own cluster, whose nodes reach the store through the proxy."""
    with Cluster(variables=environment_of(storage_options(proxy.port))) as cluster:
        yield cluster


@pytest.fixture
async def join() -> AsyncIterator[Any]:
    async with joining() as enter:
        yield enter


@pytest.fixture
async def traffic(
    cluster: Cluster, join: Any, server: SeaweedFS, prefix: str
) -> AsyncIterator[Any]:
    """Start nodes, a producer and a consumer; both are stopped at the end of the test."""
    given = {"backend_options": LOGGED, "storage_options": server.options()}
    async with starting_traffic(url(prefix), **given) as start:

        async def started(nodes: int, **more: Any) -> Traffic:
            cluster.start(nodes)
            flow: Traffic = await start(await join(cluster), **more)
            return flow

        yield started


@pytest.mark.timeout(300)
async def test_killed_owner_in_a_store_is_replaced_and_every_record_is_there_once(
    cluster: Cluster, traffic: Any
) -> None:
    flow = await traffic(2, num_buckets=3)
    await kill_owner(flow, cluster)


@pytest.mark.timeout(300)
async def test_paused_owner_in_a_store_is_replaced_and_answers_nothing_when_it_wakes(
    cluster: Cluster, traffic: Any
) -> None:
    flow = await traffic(2, num_buckets=2)
    paused = await flow.owner(cluster)
    paused.signal(signal.SIGSTOP)
    await flow.progress()
    assert paused.id not in owners(await flow.writer.stats())
    paused.signal(signal.SIGCONT)
    await flow.progress()
    await flow.check()


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_leaving_node_hands_over_without_waiting_for_a_lease(
    cluster: Cluster, traffic: Any
) -> None:
    flow = await traffic(2, num_buckets=3, backend_options={**LOGGED, "lease": 300.0})
    await stop_owner(flow, cluster)
    await flow.check()


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_buckets_in_a_store_move_to_a_joining_node_during_writes(
    cluster: Cluster, traffic: Any
) -> None:
    flow = await traffic(1, num_buckets=6)
    await flow.progress()
    await asyncio.to_thread(cluster.start, 2)
    await until(lambda: _has_several_owners(flow), seconds=90)
    await flow.progress()
    await flow.check()


async def _has_several_owners(flow: Traffic) -> bool:
    return len(set(owners(await flow.writer.stats()))) > 1


@pytest.mark.timeout(300)
async def test_put_whose_answer_is_lost_is_stored_once_through_the_next_ownership(
    proxy: FaultProxy, where: dict[str, Any], join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner cannot find out whether its slot is stored: whoever owns the bucket next can."""
    monkeypatch.setattr(store_access, "open_store", partial(open_store, retry_seconds=1.0))
    monkeypatch.setattr(store_access, "QUICK_SECONDS", 1.0)
    system = await join(Cluster(), 0)
    store = topic_store(where)
    where = {
        **where,
        "storage_options": storage_options(proxy.port, timeout="2s", connect_timeout="2s"),
    }
    writer = await write_queue(
        system,
        **where,
        durable=True,
        num_buckets=2,
        backend_options={**LOGGED, "flush_interval": None},
    )
    await writer.put(numbered(20))
    terms = [_term(store, bucket) for bucket in range(2)]
    host = host_here(system._inner)
    assert host is not None
    services = list(host.buckets.values())
    proxy.add("PUT-if-absent", also="/slots/", lose=True)
    proxy.add("GET", also="/slots/", answer=503)
    put = asyncio.ensure_future(writer.put(numbered(20, 20)))
    await until(lambda: _is_true(lambda: any(service.closed for service in services)))
    proxy.heal()
    await put
    await writer.put(numbered(20, 40))
    reader = await read_queue(system, **where)
    assert sorted(ids(await streamed(reader))) == list(range(60))
    for bucket in range(2):
        one = await read_queue(system, **where, bucket_id=bucket)
        found = ids(await streamed(one))
        assert found == sorted(found)
        await one.close()
    assert [_term(store, bucket) for bucket in range(2)] != terms
    await reader.close()
    await writer.close()


def _term(store: ObjectStore, bucket: int) -> int:
    held = owner_register(store, bucket).read()
    return 0 if held is None else held.content.term


@pytest.mark.timeout(300)
async def test_owner_that_cannot_renew_its_lease_answers_nothing_and_names_the_cause(
    proxy: FaultProxy, prefix: str, join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = await join(Cluster(), 0)
    faulty = storage_options(proxy.port, timeout="1s", connect_timeout="1s")
    where = {"topic": "t", "storage_path": url(prefix), "storage_options": faulty}
    writer = await write_queue(system, **where, durable=True, num_buckets=1, backend_options=LOGGED)
    await writer.put(numbered(10))
    reader = await read_queue(system, **where)
    assert ids(await reader.get(3)) == [0, 1, 2]
    proxy.add("", answer=503)
    host = host_here(system._inner)
    assert host is not None
    (service,) = host.buckets.values()
    await until(lambda: _is_true(lambda: bool(service.overdue)))
    monkeypatch.setattr(locator, "PATIENCE_SECONDS", 1.0)
    with pytest.raises(StorageError, match=r"lease s3://.* has not been renewed for \d+ s"):
        await reader.get(3)
    monkeypatch.undo()
    proxy.heal()
    assert ids(await reader.get(3)) == [3, 4, 5]
    await reader.close()
    await writer.close()


_WRITE = "cannot (?:write|create the table)"  # whichever request meets the fault first
FAULTS = {
    "503": ({"match": "PUT", "answer": 503}, rf"{_WRITE} s3://.*503"),
    "no answer": ({"match": "PUT", "lose": True}, rf"{_WRITE} s3://.*HTTP error"),
    "denied": ({"match": "PUT", "answer": 403}, r"S3 refuses to write s3://"),
    "no reads": ({"match": "", "answer": 503}, r"cannot read s3://.*503"),
}


async def failure_of_put(writer: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the error of a put that no node takes. A slow node may not have met the cause yet when
    the patience of the first put ends."""
    with monkeypatch.context() as impatient:
        impatient.setattr(locator, "PATIENCE_SECONDS", 4.0)
        for _ in range(10):
            with pytest.raises(StorageError, match="no owner that answers") as failed:
                await writer.put(numbered(4))
            if re.search(message, str(failed.value), re.DOTALL):
                break
    assert re.search(message, str(failed.value), re.DOTALL), str(failed.value)
    return str(failed.value)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["503", *(pytest.param(n, marks=pytest.mark.nightly) for n in list(FAULTS)[1:])]
)
async def test_put_to_a_bucket_that_no_node_can_open_fails_with_the_cause(
    name: str,
    proxy: FaultProxy,
    proxied: Cluster,
    join: Any,
    where: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node tries for longer than the client waits for its answer."""
    what, message = FAULTS[name]
    proxied.start(1)
    system = await join(proxied)
    writer = await write_queue(system, **where, durable=True, num_buckets=2, backend_options=LOGGED)
    proxy.add(**what)
    failure = await failure_of_put(writer, message, monkeypatch)
    assert proxied.nodes[0].id in failure
    assert SECRET not in failure
    proxy.heal()
    await writer.put(numbered(4, 4))
    reader = await read_queue(system, **where)
    assert {4, 5, 6, 7} <= set(ids(await streamed(reader)))
    await reader.close()
    await writer.close()


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_put_to_an_owner_whose_store_fails_names_the_cause_and_is_stored_once(
    proxy: FaultProxy,
    proxied: Cluster,
    join: Any,
    where: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxied.start(1)
    system = await join(proxied)
    writer = await write_queue(
        system, **where, durable=True, num_buckets=2, backend_options=LOGGED, writer_id="w"
    )
    await writer.put(numbered(4), sequence=1)
    proxy.add("PUT", answer=503)
    monkeypatch.setattr(locator, "PATIENCE_SECONDS", 4.0)
    with pytest.raises(StorageError, match=r"(?s)s3://.*503"):
        await writer.put(numbered(4, 4), sequence=2)
    monkeypatch.undo()
    proxy.heal()
    await writer.put(numbered(4, 4), sequence=2)
    reader = await read_queue(system, **where)
    assert sorted(ids(await streamed(reader))) == list(range(8))
    await reader.close()
    await writer.close()


async def _is_true(condition: Any) -> bool:
    return bool(condition())


@pytest.mark.timeout(300)
async def test_credentials_stay_in_the_process_that_has_them(
    cluster: Cluster,
    join: Any,
    where: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[bytes] = []
    encode = wire.encode

    def recorded(message: Any) -> bytes:
        sent.append(encode(message))
        return sent[-1]

    monkeypatch.setattr(wire, "encode", recorded)
    caplog.set_level(logging.DEBUG)
    cluster.start(1)
    system = await join(cluster)
    writer = await write_queue(system, **where, durable=True, num_buckets=1, backend_options=LOGGED)
    await writer.put(numbered(10))
    assert await writer.tag("ten")
    reader = await read_queue(system, **where, group="g")
    assert len(await reader.get(10)) == 10
    await reader.commit()
    node = cluster.nodes[0]
    store = topic_store(where)
    held = owner_register(store, 0).read()
    assert held is not None
    lease = lease_register(store, held.content.owner).read()
    assert lease is not None
    assert (lease.content.owner.node, lease.content.owner.address) == (node.id, node.address)
    await reader.close()
    await writer.close()
    assert sent
    stored = [store.get(key) for key in store.list("") if key.endswith(".json")]
    texts = [*sent, *(found.data for found in stored if found), node.output.encode()]
    texts.append(caplog.text.encode())
    for secret in (KEY, SECRET):
        assert not any(secret.encode() in text for text in texts)


@pytest.mark.timeout(300)
async def test_node_without_credentials_is_passed_over_and_named_if_there_is_no_other(
    cluster: Cluster,
    server: SeaweedFS,
    join: Any,
    where: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = {**server.options(), "aws_secret_access_key": "another-secret"}
    cluster.variables = environment_of(wrong)
    cluster.start(1)
    system = await join(cluster)
    writer = await write_queue(system, **where, durable=True, num_buckets=2, backend_options=LOGGED)
    refusal = r"S3 refuses to read .* check the credentials"
    failure = await failure_of_put(writer, refusal, monkeypatch)
    assert cluster.nodes[0].id in failure
    assert "another-secret" not in failure
    cluster.variables = environment_of(server.options())
    (second,) = await asyncio.to_thread(cluster.start, 1)
    await writer.put(numbered(4, 4))
    assert set(owners(await writer.stats())) == {second.id}
    await writer.close()


async def test_node_serves_only_topics_below_its_address(
    server: SeaweedFS, prefix: str, where: dict[str, Any]
) -> None:
    system = await pul.actor_system("127.0.0.1:0")
    host = await serve(system, url(prefix), storage_options=server.options())
    try:
        writer = await write_queue(
            system, **where, durable=True, num_buckets=1, backend_options=LOGGED
        )
        await writer.put(numbered(3))
        await writer.close()
        elsewhere = {**where, "storage_path": url(prefix + "-other")}
        other = await write_queue(
            system, **elsewhere, durable=True, num_buckets=1, backend_options=LOGGED
        )
        with pytest.raises(InvalidArgument, match="serves only topics in s3://"):
            await other.put(numbered(3))
        only = ClusterReader(system)
        reader = await only.open("t", url(prefix), storage_options=server.options())
        assert ids(await reader.get(10)) == [0, 1, 2]
        await reader.close()
    finally:
        await host.close()
        await system.shutdown()


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_spark_hands_rows_over_to_the_nodes_that_own_the_buckets(
    cluster: Cluster, join: Any, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark is not a member of the cluster: it needs nothing but the store."""
    from support.spark.writes import DirectStore

    cluster.start(2)
    system = await join(cluster)
    options = {"backend_options": {**LOGGED, "flush_interval": None}, "num_buckets": 6}
    writer = await write_queue(system, **where, durable=True, **options)
    await writer.put([{"id": n} for n in range(30)])
    assert all(owners(await writer.stats()))
    for name, value in environment_of(where["storage_options"]).items():
        monkeypatch.setenv(name, value)
    home: Any = parse(where["storage_path"])
    for _ in range(2):
        rows = pa.table({"id": range(30, 60)})
        await asyncio.to_thread(DirectStore(home).save, rows, parts=2, writeId="w")
    await writer.put([{"id": n} for n in range(60, 90)])
    reader = await read_queue(system, **where)
    assert sorted(record["id"] for record in await reader.get(limit=1000)) == list(range(90))
    assert topic_store(where).list("handover") == []
    await reader.close()
    await writer.close()
