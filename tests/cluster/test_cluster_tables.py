"""Tables of topics on a cluster: the contracts, the wire format, and owners that die."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.cluster_join import joining
from support.cluster_nodes import Cluster
from support.cluster_traffic import GROUP_MEMBER, synced_writer
from support.restore_contract import LoggedRestoreContract, RestoreContract
from support.retention_contract import RetentionContract, SlowContract
from support.table_contract import (
    AccessContract,
    EvolvingContract,
    MaintenanceContract,
    SearchContract,
    VersionContract,
    one_per_bucket,
)
from support.tag_contract import TagContract
from support.tasks import spawning
from support.topic_homes import Following, Home, flat, taken
from support.topic_places import drained, ids, numbered
from support.values import EVERY_TYPE
from support.waiting import until

from persisting.bucket.snapshot import Page
from persisting.cluster import client, locator, node_locator, pulsing_transport, watcher
from persisting.errors import InvalidArgument, OffsetOutOfRange, StorageError, TableError
from persisting.queue import read_queue, write_queue

SYNCED = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}
_ON_MODULE = pytest.mark.asyncio(loop_scope="module")
_NIGHTLY = pytest.mark.nightly
READS = ("tag", "query")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def member_of_three(three: Cluster) -> AsyncIterator[Any]:
    async with joining() as enter:
        yield await enter(three)


@pytest_asyncio.fixture(loop_scope="module")
async def spawned() -> AsyncIterator[Any]:
    async with spawning() as spawn:
        yield spawn


@pytest_asyncio.fixture(loop_scope="module")
async def home(member_of_three: Any, tmp_path: Path) -> AsyncIterator[Home]:
    made = Home("persisting", tmp_path / "queues", member_of_three)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def evolving_home(member_of_three: Any, tmp_path: Path) -> AsyncIterator[Home]:
    made = Home("persisting", tmp_path / "queues", member_of_three)
    yield made
    await made.close()


@_ON_MODULE
@_NIGHTLY
class TestVersions(VersionContract):
    pass


@_ON_MODULE
@_NIGHTLY
class TestAccess(AccessContract):
    pass


@_ON_MODULE
@_NIGHTLY
class TestSearch(SearchContract):
    pass


@_ON_MODULE
class TestEvolving(EvolvingContract):
    pass


@_ON_MODULE
@_NIGHTLY
class TestMaintenance(MaintenanceContract):
    pass


@_ON_MODULE
@_NIGHTLY
class TestTags(TagContract):
    pass


@_ON_MODULE
@_NIGHTLY
class TestRestore(RestoreContract):
    pass


@_ON_MODULE
@_NIGHTLY
class TestLoggedRestore(LoggedRestoreContract):
    pass


@_ON_MODULE
@_NIGHTLY
class TestRetention(RetentionContract):
    pass


@_ON_MODULE
@_NIGHTLY
class TestSlow(SlowContract):
    pass


@_ON_MODULE
class TestWire:
    """Values, errors and results cross to another process unchanged."""

    async def test_errors_keep_their_class_across_processes(self, home: Home) -> None:
        writer = await home.open()
        first, second, _ = one_per_bucket()
        await writer.put({"id": first, "a": 1})
        await writer.put([{"id": second, "b": "x"}] * 5)
        await writer.flush()
        reader = await home.read()
        for call, kind, mentioned in (
            (reader.query("nope > 1"), InvalidArgument, "nope"),
            (reader.query("b = 'x' AND nope > 1"), InvalidArgument, "nope"),
            (reader.query("a >"), InvalidArgument, "where"),
            (reader.query(columns=["nope"]), InvalidArgument, "nope"),
            (reader.search(vector=[1.0]), InvalidArgument, "vector"),
            (reader.take([(0, 77)]), OffsetOutOfRange, "77"),
            (reader.create_index("nope"), InvalidArgument, "nope"),
            (reader.get(version={0: 99}), InvalidArgument, "99"),
            (reader.restore({0: 99}), InvalidArgument, "99"),
            (reader.tag("a b"), InvalidArgument, "a b"),
            (reader.retain(), InvalidArgument, "retain"),
        ):
            with pytest.raises(kind, match=mentioned) as caught:
                await call
            assert type(caught.value) is kind

    async def test_a_damaged_table_raises_table_error_at_the_client(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(60))
        await writer.flush()
        for path in (home.folder / home.topic / "bucket_1" / "data.lance" / "data").glob("*"):
            path.write_bytes(b"\0" * path.stat().st_size)
        reader = await home.read()
        with pytest.raises(TableError):
            await reader.query("id >= 0")
        report = await reader.verify()
        assert {damage["bucket"] for damage in report["damaged"]} == {1}

    async def test_arguments_that_cannot_be_sent_raise_invalid_argument(self, home: Home) -> None:
        writer = await home.open()
        await writer.put([{"id": n, "v": [1.0, float(n)], "text": "t"} for n in range(9)])
        reader = await home.read()
        wrong: list[dict[str, Any]] = [
            {"vector": object()},
            {"vector": [1.0, "a"]},
            {"vector": [1.0, 2.0], "k": np.float64(3)},
            {"vector": [1.0, 2.0], "where": object()},
            {"vector": [1.0, 2.0], "columns": [object()]},
            {"vector": [1.0, 2.0], "metric": object()},
            {"vector": [1.0, 2.0], "column": object()},
            {"text": object()},
        ]
        for arguments in wrong:
            with pytest.raises(InvalidArgument):
                await reader.search(**arguments)
        for call in (
            reader.query(where=5),
            reader.query(limit=object()),
            reader.create_index(object()),
            reader.create_index("id", object()),
            reader.drop_index(object()),
            reader.retain(rows=object()),
            reader.lookup("id", object()),
            reader.take([(0, object())]),
            reader.get(version={0: object()}),
            reader.restore({0: object()}),
        ):
            with pytest.raises(InvalidArgument):
                await call

    async def test_results_may_be_larger_than_a_message(self, home: Home) -> None:
        writer = await home.open()
        rows = [{"id": n, "text": f"{n} " + "x" * 60_000, "v": [float(n), 0.0]} for n in range(240)]
        await writer.put(rows[:200])
        await writer.tag("t")
        await writer.put(rows[200:])
        reader = await home.read()
        by_id = {row["id"]: row for row in rows}
        found = await reader.query()
        assert {r["id"]: r for r in found} == by_id
        at_tag = await reader.get(None, version="t")
        assert {r["id"]: r for r in at_tag} == {n: by_id[n] for n in range(200)}
        table = await reader.get_arrow(version="t")
        assert table.nbytes > 2 * 4 * 1024 * 1024
        assert table.to_pylist() == at_tag
        hits = await reader.search(vector=[100.2, 0.0], k=150)
        assert [h["text"] for h in hits] == [by_id[h["id"]]["text"] for h in hits]
        assert ids(hits)[:3] == [100, 101, 99]
        pairs = [(h["_bucket"], h["_offset"]) for h in hits]
        assert await reader.take(pairs) == [by_id[h["id"]] for h in hits]

    async def test_a_single_row_may_be_larger_than_a_message(self, home: Home) -> None:
        writer = await home.open()
        text = "y" * 9_000_000
        await writer.put([{"id": 1, "text": text}, {"id": 2, "text": "small"}])
        await writer.tag("t")
        reader = await home.read()
        assert (await reader.lookup("id", 1))[0]["text"] == text
        assert {len(r["text"]) for r in await reader.get(version="t")} == {5, 9_000_000}
        assert (await reader.get_arrow(version="t")).num_rows == 2

    async def test_values_of_every_type_round_trip_through_a_cluster(self, home: Home) -> None:
        record = {**EVERY_TYPE, "float": -0.5}
        writer = await home.open()
        await writer.put(record)
        await writer.tag("t")
        reader = await home.read()
        (hit,) = await reader.search(vector=[0.1, 0.2, 0.3])
        bucket, offset = hit["_bucket"], hit["_offset"]
        for found in (
            await reader.query(),
            await reader.get(version="t"),
            await reader.take([(bucket, offset)]),
            await reader.lookup("id", "x"),
            (await reader.get_arrow(version="t")).to_pylist(),
            [{n: v for n, v in hit.items() if not n.startswith("_")}],
        ):
            assert found == [record]
            assert list(found[0]) == list(record)
        for name in ("naive", "aware", "date", "flag", "bytes", "float"):
            assert len(await reader.lookup(name, record[name])) == 1, name

    async def test_a_naive_datetime_is_in_the_callers_time_zone(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer = await home.open()
        reader = await home.read()
        await writer.put(numbered(30))
        await writer.flush()
        flushed_at = max(v["timestamp"] for v in await reader.versions())
        await asyncio.sleep(0.01)
        await writer.put(numbered(30, 30))
        await writer.flush()
        # The nodes stay in the time zone that they were started in.
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        try:
            naive = flushed_at.astimezone().replace(tzinfo=None)
            assert naive != flushed_at.replace(tzinfo=None)
            assert sorted(ids(await reader.get(None, version=naive))) == list(range(30))
            assert sorted(ids(await reader.get(None, version=flushed_at))) == list(range(30))
            each = dict.fromkeys(range(3), naive)
            assert sorted(ids(await reader.get(None, version=each))) == list(range(30))
            await writer.restore(naive)
            assert sorted(ids(await reader.query())) == list(range(30))
        finally:
            monkeypatch.undo()
            time.tzset()

    @pytest.mark.parametrize("kind", ["memory", "custom"])
    async def test_table_calls_on_a_backend_without_tables_name_those_with_tables(
        self, member_of_three: Any, tmp_path: Path, kind: str
    ) -> None:
        from support.protocol_only_backend import OnlyProtocol
        from support.topic_places import Place

        from persisting.queue import register_backend

        register_backend("custom", OnlyProtocol)
        place = Place(kind, tmp_path / "queues", member_of_three)
        await place.filled(20)
        reader = await place.read()
        for call in (
            reader.versions(),
            reader.tag("t"),
            reader.restore({0: 1}),
            reader.search(vector=[1.0]),
            reader.create_index("id"),
            reader.take([(0, 0)]),
            reader.query("id > 1"),
            reader.compact(),
            reader.retain(rows=1),
            reader.verify(),
            reader.get(version={0: 1}),
        ):
            with pytest.raises(StorageError, match="'lance' or 'persisting'"):
                await call
        assert len(await drained(reader)) == 20
        await place.close()

    async def test_a_wait_for_the_first_record_of_emptied_buckets_does_not_poll_the_owner(
        self, home: Home, monkeypatch: pytest.MonkeyPatch, spawned: Any
    ) -> None:
        writer = await home.open()
        await writer.put(numbered(30))
        await writer.flush()
        await writer.retain(rows=0)
        reader = await home.read()
        assert await _reads_of_a_wait(reader, writer, 30, monkeypatch, spawned) < 30

    @_NIGHTLY
    async def test_a_wait_after_a_restore_does_not_poll_the_owner(
        self, home: Home, monkeypatch: pytest.MonkeyPatch, spawned: Any
    ) -> None:
        monkeypatch.setattr(watcher, "IDLE_SECONDS", 0.1)
        writer = await home.open()
        await writer.put(numbered(30))
        await writer.tag("t")
        await writer.put(numbered(30, 30))
        reader = await home.read()
        assert len(await drained(reader)) == 60
        assert await reader.get(wait=True, timeout=0.3) == []

        async def nobody_watches() -> bool:
            return not any(p._watcher.is_watching for p in reader._topic._clients.values())

        # A watcher checks at each of the owner's replies whether it is still needed.
        await until(nobody_watches)
        await writer.restore("t")
        assert await _reads_of_a_wait(reader, writer, 100, monkeypatch, spawned) < 60


async def _reads_of_a_wait(
    reader: Any, writer: Any, first: int, monkeypatch: pytest.MonkeyPatch, spawned: Any
) -> int:
    """Return how many times a reader asks the owners while it waits a second for records; then put
    five with ids from ``first`` on. Each check reads three buckets; a loop without a pause would
    read hundreds of times."""
    reads = 0
    read = client.RemoteBucketClient.read

    async def counted(client: Any, offset: int, limit: int | None) -> Page:
        nonlocal reads
        reads += 1
        return await read(client, offset, limit)

    monkeypatch.setattr(client.RemoteBucketClient, "read", counted)
    waiting = spawned(taken(reader, 5))
    await asyncio.sleep(1.0)
    found = reads
    await writer.put(numbered(5, first))
    assert sorted(await waiting) == list(range(first, first + 5))
    return found


async def _filled(system: Any, folder: Path, **options: Any) -> Any:
    """Return a writer of one bucket: records 0 to 29 tagged "t", and 30 more."""
    writer = await synced_writer(system, folder, {**SYNCED, **options}, num_buckets=1)
    await writer.put(numbered(30))
    await writer.tag("t")
    await writer.put(numbered(30, 30))
    return writer


async def _owner(cluster: Cluster, writer: Any) -> Any:
    return cluster.owner((await writer.stats())["buckets"][0])


@pytest.mark.parametrize("op", ["restore", *(pytest.param(o, marks=_NIGHTLY) for o in READS)])
async def test_a_call_whose_owner_dies_is_carried_out_by_the_next_owner(
    cluster: Cluster, join: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    monkeypatch.setattr(node_locator, "OPEN_SECONDS", 1.0)
    cluster.start(2)
    system = await join(cluster)
    writer = await _filled(system, tmp_path)
    calls = {
        "restore": lambda: writer.restore("t"),
        "tag": lambda: writer.tag("u"),
        "query": lambda: writer.query("id >= 0"),
    }
    owner = await _owner(cluster, writer)
    owner.signal(signal.SIGSTOP)
    task = asyncio.create_task(calls[op]())
    await asyncio.sleep(0.3)
    assert not task.done()
    owner.kill()
    found = await asyncio.wait_for(task, 60)
    kept = 30 if op == "restore" else 60
    if op == "restore":
        assert found["buckets"][0]["end_offset"] == 30
    elif op == "tag":
        assert found["rows"] == 60
        reader = await read_queue(system, topic="t", storage_path=str(tmp_path))
        assert ids(await reader.get(None, version="u")) == list(range(60))
    else:
        assert ids(found) == list(range(60))
    assert (await writer.stats())["buckets"][0]["epoch"] == (1 if op == "restore" else 0)
    assert ids(await writer.query()) == list(range(kept))


@_NIGHTLY
@pytest.mark.timeout(400)
@pytest.mark.parametrize("op", ["compact", "create_index", "retain", "verify", "drop_index"])
async def test_maintenance_whose_owner_dies_is_carried_out_by_the_next_owner(
    cluster: Cluster, join: Any, tmp_path: Path, op: str
) -> None:
    cluster.start(3)
    writer = await _filled(await join(cluster), tmp_path, compaction=False)
    await writer.create_index("id")
    calls = {
        "compact": lambda: writer.compact(),
        "create_index": lambda: writer.create_index("id"),
        "retain": lambda: writer.retain(rows=10**6),
        "verify": lambda: writer.verify(),
        "drop_index": lambda: writer.drop_index("id"),
    }
    for _ in range(2):
        owner = await _owner(cluster, writer)
        owner.signal(signal.SIGSTOP)
        task = asyncio.create_task(calls[op]())
        await asyncio.sleep(0.3)
        owner.kill()
        await asyncio.wait_for(task, 60)
    assert ids(await writer.query()) == list(range(60))
    assert (await writer.verify())["ok"]


@_NIGHTLY
@pytest.mark.timeout(600)
@pytest.mark.parametrize("op", ["restore", "tag", "compact", "create_index"])
async def test_a_call_is_applied_once_if_its_owner_is_killed_at_any_point(
    cluster: Cluster, join: Any, tmp_path: Path, op: str
) -> None:
    cluster.start(1, "--idle")  # it never dies: the other nodes find each other through it
    cluster.start(2)
    system = await join(cluster, 2)
    writer = await _filled(system, tmp_path, compaction=False)
    for step in range(8):
        await writer.put(numbered(400, 1000 + 400 * step))
        await writer.flush()
    expected = [*range(60), *range(1000, 4200)]
    epoch = 0
    for attempt, wait in enumerate((0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12)):
        await writer.put(numbered(20, 10_000 + 100 * attempt))
        expected += range(10_000 + 100 * attempt, 10_020 + 100 * attempt)
        calls = {
            "restore": lambda: writer.restore("t"),
            "tag": lambda: writer.tag("u"),
            "compact": lambda: writer.compact(),
            "create_index": lambda: writer.create_index("id"),
        }
        owner = await _owner(cluster, writer)
        task = asyncio.create_task(calls[op]())
        await asyncio.sleep(wait)
        owner.kill()
        found = await asyncio.wait_for(task, 60)
        if op == "restore":
            epoch += 1
            expected = list(range(30))
            assert (await writer.stats())["buckets"][0]["epoch"] == epoch
        if op == "tag":
            assert found["rows"] == len(expected)
            reader = await read_queue(system, topic="t", storage_path=str(tmp_path))
            assert ids(await reader.get(None, version="u")) == expected
        assert ids(await writer.query()) == expected
        await asyncio.to_thread(cluster.start, 1)
    assert (await writer.verify())["ok"]


@_NIGHTLY
async def test_table_calls_name_a_paused_owner_and_succeed_once_it_continues(
    cluster: Cluster, join: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start(2)
    writer = await _filled(await join(cluster), tmp_path)
    owner = await _owner(cluster, writer)
    monkeypatch.setattr(locator, "PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(node_locator, "OPEN_SECONDS", 1.0)
    monkeypatch.setattr(pulsing_transport, "CALL_SECONDS", 2.0)
    owner.signal(signal.SIGSTOP)
    results = await asyncio.gather(
        writer.query("id > 1"), writer.tag("u"), writer.compact(), return_exceptions=True
    )
    monkeypatch.undo()
    for exc in results:
        assert isinstance(exc, StorageError)
        assert owner.id in str(exc) or str(owner.popen.pid) in str(exc)
    owner.signal(signal.SIGCONT)
    deadline = time.monotonic() + 60
    made = None
    while made is None:
        try:
            made = await writer.tag("u")
        except StorageError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
    assert made["rows"] == 60
    assert ids(await writer.query()) == list(range(60))


@_NIGHTLY
async def test_a_stream_that_loses_its_owner_follows_the_restore_at_the_next_owner(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(3)
    system = await join(cluster)
    writer = await _filled(system, tmp_path)
    reader = await read_queue(system, topic="t", storage_path=str(tmp_path))
    async with aclosing(Following(reader.get_stream(block=True))) as tail:
        await tail.reaches(60)
        (await _owner(cluster, writer)).kill()
        await writer.restore("t")
        await writer.put(numbered(7, 100))
        assert (await tail.reaches(67, 60))[60:] == list(range(100, 107))
        await writer.put(numbered(40, 200))
        assert (await tail.reaches(107))[67:] == list(range(200, 240))


@_NIGHTLY
async def test_a_group_in_another_process_continues_after_a_restore(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(2)
    system = await join(cluster)
    writer = await _filled(system, tmp_path)
    member = cluster.run("-c", GROUP_MEMBER, str(tmp_path), *cluster.seeds)
    await member.await_lines("GOT", 60)
    reader = await read_queue(system, topic="t", storage_path=str(tmp_path), group="other")
    assert len(await drained(reader)) == 60
    await reader.commit()
    done = await writer.restore("t")
    assert {"group": "other", "bucket": 0, "committed": 60, "end": 30} in done["groups"]
    await writer.put(numbered(50, 100))
    found = [int(line) for line in await member.await_lines("GOT", 110)]
    assert sorted(set(found)) == [*range(60), *range(100, 150)]
    assert found[-50:] == list(range(100, 150))
    member.kill()
    heir = await read_queue(system, topic="t", storage_path=str(tmp_path), group="g")
    await writer.put(numbered(5, 500))
    rest: list[int] = []
    while 504 not in rest:
        more = await taken(heir, 5)
        assert more
        rest += more
    # Records that the member had read and not committed come again; none is left out.
    assert rest == [*range(100, 150), *range(500, 505)][-len(rest) :]
    assert len(rest) >= 5
    for handle in (reader, heir, writer):
        await handle.close()


@_NIGHTLY
async def test_tags_of_several_clients_are_consistent_while_nodes_join_and_leave(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(2)
    first, second = await join(cluster), await join(cluster)
    place = {"topic": "t", "storage_path": str(tmp_path)}
    writer = await write_queue(
        first, **place, backend="persisting", num_buckets=3, backend_options=SYNCED
    )
    other = await write_queue(second, **place)
    done: set[int] = set()
    begun: set[int] = set()
    stop = asyncio.Event()

    async def produce(lane: int, to: Any) -> None:
        number = lane
        while not stop.is_set():
            begun.add(number)
            await to.put({"id": number})
            done.add(number)
            number += 2

    lanes = [asyncio.create_task(produce(n, to)) for n, to in enumerate((writer, other))]
    bounds = []
    for round_ in range(6):
        if round_ == 2:
            await asyncio.to_thread(cluster.start, 1)
        if round_ == 4:
            cluster.nodes[1].signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        least = set(done)
        tagging = (writer, other)[round_ % 2]
        made = await tagging.tag(f"t{round_}")
        bounds.append((f"t{round_}", least, set(begun), made["rows"]))
    stop.set()
    await asyncio.gather(*lanes)
    reader = await read_queue(second, **place)
    for name, least, most, rows in bounds:
        found = ids(await reader.get(None, version=name))
        assert len(found) == len(set(found)) == rows
        assert least <= set(found) <= most
    assert sorted(ids(flat({0: await reader.query()}))) == sorted(done)


@_NIGHTLY
async def test_an_owner_finishes_its_calls_before_it_leaves(
    cluster: Cluster, join: Any, tmp_path: Path
) -> None:
    cluster.start(2)
    writer = await _filled(await join(cluster), tmp_path, compaction=False)
    await writer.put([{"id": n, "v": [float(n % 97), float(n)]} for n in range(100, 5100)])
    owner = await _owner(cluster, writer)
    indexing = asyncio.create_task(writer.create_index("v"))
    await asyncio.sleep(0.02)
    owner.signal(signal.SIGTERM)
    made = await asyncio.wait_for(indexing, 60)
    assert made["column"] == "v"
    assert await owner.ended() == 0, owner.output
    found = await writer.search(vector=[3.0, 100.0], k=5)
    assert len(found) == 5
    assert [i["column"] for i in await writer.indexes()] == ["v"]
