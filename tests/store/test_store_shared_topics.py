"""Several processes of one machine write to a topic in an object store, without a cluster.

One of them owns a bucket; the others reach it through its socket, which its lease names.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.fault_proxy import FaultProxy
from support.object_stores import storage_options
from support.owner_process import OwnerProcess
from support.store_places import topic_store
from support.topic_places import ids, is_in_order, numbered
from support.waiting import until_true

from persisting.bucket.store_ownership import owner_register
from persisting.errors import BucketLocked, OwnershipLost, StorageError
from persisting.local_socket import connection
from persisting.local_socket.owner_notes import StoreOwnerNotes
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import ObjectStore
from persisting.topic.live_topics import live_in_store
from persisting.wal.lease import lease_register

LEASE = 1.5
BUCKETS = 2

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("no_topic_is_left_open")]


@pytest.fixture
def owner() -> Iterator[OwnerProcess]:
    with OwnerProcess() as process:
        yield process


def new(**options: Any) -> dict[str, Any]:
    """Return how a topic is created, with further options of its backend."""
    given = {"lease": LEASE, "flush_interval": None, **options}
    return {"durable": True, "num_buckets": BUCKETS, "backend_options": given}


def owner_pids(where: dict[str, Any]) -> set[int | None]:
    """Return which processes own the buckets."""
    notes = StoreOwnerNotes(topic_store(where))
    return {(notes.read(bucket) or {}).get("pid") for bucket in range(BUCKETS)}


async def stored(where: dict[str, Any]) -> dict[int, list[Any]]:
    """Return what each bucket holds, in order."""
    found = {}
    for bucket in range(BUCKETS):
        async with await read_queue(**where, bucket_id=bucket, local_socket=False) as reader:
            found[bucket] = ids(await reader.get(None))
    return found


async def test_puts_reach_the_owner_in_the_other_process(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    await owner.ask("own", args={**where, **new()})
    async with await write_queue(**where) as writer:
        await writer.put({"id": 0})
        await writer.put(numbered(50, 1))
        await asyncio.gather(*(writer.put({"id": n}) for n in range(51, 100)))
        assert await asyncio.to_thread(owner_pids, where) == {owner.pid}
        assert (await owner.ask("stats"))["total_count"] == 100
        await owner.ask("put", args=[{"id": 100}])
    assert is_in_order(await stored(where), 101)


async def test_bucket_without_an_owner_is_opened_where_the_first_one_is(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    """So that the puts of all processes share one log and its requests."""
    await owner.ask("open", args={**where, **new()})
    await owner.ask("open_here", args=0)
    async with await write_queue(**where) as writer:
        await writer.put(numbered(20))
        assert await asyncio.to_thread(owner_pids, where) == {owner.pid}


async def test_puts_continue_after_the_owner_was_killed(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    await owner.ask("own", args={**where, **new()})
    async with await write_queue(**where) as writer:
        first = [asyncio.ensure_future(writer.put({"id": n})) for n in range(100)]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        owner.kill()
        await asyncio.gather(*first, *(writer.put({"id": n}) for n in range(100, 150)))
        await writer.put(numbered(50, 150))
        assert await asyncio.to_thread(owner_pids, where) == {os.getpid()}
    assert is_in_order(await stored(where), 200)


async def test_puts_continue_immediately_after_the_owner_has_closed(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    await owner.ask("own", args={**where, **new(lease=600.0)})  # the test does not wait for its end
    async with await write_queue(**where) as writer:
        await writer.put(numbered(20))
        putting = [asyncio.ensure_future(writer.put({"id": n})) for n in range(20, 40)]
        await owner.ask("close")
        await asyncio.gather(*putting)
        await writer.put(numbered(20, 40))
        assert await asyncio.to_thread(owner_pids, where) == {os.getpid()}
    assert is_in_order(await stored(where), 60)


async def test_owner_that_was_paused_continues_through_the_next_one(
    where: dict[str, Any], owner: OwnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE_SECONDS", 1.0)
    await owner.ask("own", args={**where, **new()})
    async with await write_queue(**where) as writer:
        await writer.put(numbered(20))
        owner.stop()
        await writer.put(numbered(20, 20))
        assert await asyncio.to_thread(owner_pids, where) == {os.getpid()}
        owner.resume()
        failures = []
        for _ in range(2):
            try:
                await owner.ask("put", args=[{"id": 40}])
                break
            except AssertionError as exc:
                failures.append(str(exc))
        # A heartbeat may have told it before the first put.
        assert len(failures) <= 1
        assert all("OwnershipLost" in failure for failure in failures)
        assert await asyncio.to_thread(owner_pids, where) == {os.getpid()}
        await owner.ask("put", args=[numbered(9, 41)])
        await owner.ask("close")
    assert is_in_order(await stored(where), 50)


async def test_put_whose_outcome_is_unknown_is_not_repeated_by_its_own_process(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await write_queue(**where, **new()) as writer:
        await writer.put(numbered(4))
        topic: Any = writer._topic
        put_parts = topic._handle.put_parts

        async def store_and_lose(parts: Any, sequence: Any = None) -> None:
            await put_parts(parts, sequence)
            raise OwnershipLost("it is unknown whether it was stored")

        monkeypatch.setattr(topic._handle, "put_parts", store_and_lose)
        with pytest.raises(OwnershipLost):
            await writer.put(numbered(4, 4))
    assert is_in_order(await stored(where), 8)


async def test_owner_takes_over_options_that_another_process_has_changed(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    await owner.ask("own", args={**where, **new()})
    async with await write_queue(**where, backend_options={"compression": "zstd"}) as writer:
        await writer.put(numbered(10))
        assert await asyncio.to_thread(owner_pids, where) == {owner.pid}
        stats = await owner.ask("stats")
        assert {bucket["compression"] for bucket in stats["buckets"]} == {"zstd"}
    assert is_in_order(await stored(where), 10)


async def test_reader_changes_a_topic_that_another_process_owns(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    await owner.ask("own", args={**where, **new()})
    await owner.ask("put", args=[numbered(20)])
    async with await read_queue(**where) as reader:
        assert (await reader.tag("first"))["rows"] == 20
        await owner.ask("put", args=[numbered(20, 20)])
        await reader.compact()
        await reader.create_index("id")
        assert sorted(ids(await reader.get(None, version="first"))) == list(range(20))
        assert ids(await reader.lookup("id", 33)) == [33]
    assert await asyncio.to_thread(owner_pids, where) == {owner.pid}


async def test_without_sockets_a_bucket_of_another_process_raises(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    await owner.ask("own", args={**where, **new()})
    async with await write_queue(**where, local_socket=False) as writer:
        with pytest.raises(BucketLocked, match=f"process {owner.pid} "):
            await writer.put(numbered(10))


async def test_owner_on_another_machine_is_named_with_what_to_do(where: dict[str, Any]) -> None:
    store = topic_store(where)
    async with await write_queue(**where, **new(lease=600.0)) as writer:
        await writer.put(numbered(4))
        held = owner_register(store, 0).read()
        assert held is not None
        lease = lease_register(store, held.content.owner).read()
        assert lease is not None
    # As if that process were on another machine, and alive.
    elsewhere = msgspec.structs.replace(lease.content.owner, host="elsewhere")
    lease_register(store, "other").create(
        msgspec.structs.replace(lease.content, owner=elsewhere, seconds=600.0)
    )
    for bucket in range(BUCKETS):
        register = owner_register(store, bucket)
        free = register.read()
        assert free is not None
        register.swap(free, msgspec.structs.replace(free.content, owner="other", log="other"))
    beating = asyncio.create_task(beat(store, "other"))
    async with await write_queue(**where) as writer:
        with pytest.raises(BucketLocked, match="elsewhere") as caught:
            await writer.put(numbered(4, 4))
    beating.cancel()
    assert "to write on several machines, pass a system of a cluster" in str(caught.value)


async def beat(store: ObjectStore, name: str) -> None:
    """Show that the owner of a log lives."""
    register = lease_register(store, name)
    while True:
        held = await asyncio.to_thread(register.read)
        assert held is not None
        beaten = msgspec.structs.replace(held.content, beat=held.content.beat + 1)
        await asyncio.to_thread(register.swap, held, beaten)
        await asyncio.sleep(0.1)


async def test_killed_owner_without_a_socket_is_waited_for(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    await owner.ask("own", args={**where, **new(), "local_socket": False})
    await owner.ask("put", args=[numbered(4)])
    owner.kill()
    async with await write_queue(**where) as writer:
        await writer.put(numbered(4, 4))
    assert is_in_order(await stored(where), 8)


def pause(where: dict[str, Any]) -> None:
    """Stop the heartbeats of this process, as if it were paused."""
    live: Any = live_in_store(topic_store(where).address)
    live._log._lease.stop()


async def test_process_that_lost_its_buckets_reads_those_of_the_next_owner(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    async with await write_queue(**where, **new()):
        pass
    early = await read_queue(**where)
    writer = await write_queue(**where)
    await writer.put(numbered(4))
    late = await read_queue(**where)
    for reader in (early, late):
        assert sorted(ids(await reader.get(None))) == list(range(4))
    streams = [asyncio.create_task(taken(reader, 12)) for reader in (early, late)]
    pause(where)
    await owner.ask("own", args=where)
    await owner.ask("put", args=[numbered(4, 4)])
    failures = 0
    for number in range(8, 12):  # one call may meet the loss
        try:
            await writer.put({"id": number})
        except OwnershipLost:
            failures += 1
            await writer.put({"id": number})
    assert failures <= BUCKETS
    for stream in streams:
        assert sorted(set(await stream)) == list(range(12))
    for handle in (early, late, writer):
        await handle.close()
    assert sorted(n for found in (await stored(where)).values() for n in found) == list(range(12))


async def taken(reader: Any, count: int) -> list[int]:
    """Return the ids that a stream from the start delivers until it has seen this many."""
    seen: list[int] = []
    async for record in reader.get_stream(0, block=True):
        seen.append(record["id"])
        if len(set(seen)) == count:
            break
    return seen


async def test_writer_can_be_closed_if_its_buckets_went_where_it_cannot_reach_them(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    writer = await write_queue(**where, **new())
    await writer.put(numbered(4))
    pause(where)
    await owner.ask("own", args={**where, "local_socket": False})
    await owner.ask("put", args=[numbered(4, 4)])
    await writer.close()
    assert is_in_order(await stored(where), 8)


async def test_store_that_cannot_be_reached_is_named_while_an_owner_is_looked_for(
    where: dict[str, Any], proxy: FaultProxy, owner: OwnerProcess
) -> None:
    await owner.ask("own", args={**where, **new()})
    options = storage_options(proxy.port, timeout="1s", connect_timeout="1s")
    async with await write_queue(**{**where, "storage_options": options}) as writer:
        proxy.add("GET", also="owner.json", answer=503)
        with pytest.raises(StorageError, match=r"s3://.*503"):
            await writer.put(numbered(4))
        proxy.heal()
        await writer.put(numbered(4))
    assert is_in_order(await stored(where), 4)


async def test_many_processes_share_one_log(where: dict[str, Any]) -> None:
    """The first one opens every bucket, whoever needs it."""
    processes = [OwnerProcess() for _ in range(3)]
    try:
        for process in processes:
            await process.ask("open", args={**where, **new()})
        for number, process in enumerate(processes):
            await process.ask("put", args=[numbered(10, 10 * number)])
        pids = await asyncio.to_thread(owner_pids, where)
        assert pids == {processes[0].pid}
        for process in reversed(processes):
            await process.ask("close")
    finally:
        for process in processes:
            process.close()
    assert is_in_order(await stored(where), 30)


async def test_processes_that_are_killed_in_turn_lose_and_duplicate_nothing(
    where: dict[str, Any],
) -> None:
    processes = [OwnerProcess() for _ in range(3)]
    acknowledged: list[int] = []
    number = 0
    try:
        for process in processes:
            await process.ask("open", args={**where, **new()})
        while processes:
            for process in [*processes, *processes]:
                await process.ask("put", args=[numbered(5, number)])
                acknowledged += range(number, number + 5)
                number += 5
            (pid,) = await asyncio.to_thread(owner_pids, where)
            (first,) = [process for process in processes if process.pid == pid]
            processes.remove(first)
            first.close()
    finally:
        for process in processes:
            process.close()
    async with await write_queue(**where) as writer:
        await writer.put(numbered(5, number))
    assert is_in_order(await stored(where), number + 5)


async def test_new_owner_is_found_while_the_lease_of_the_former_one_runs(
    where: dict[str, Any], owner: OwnerProcess
) -> None:
    """Nobody answers on the socket of a killed process; its lease still names it."""
    await owner.ask("own", args={**where, **new(lease=4.0)})
    async with await write_queue(**where) as writer:
        await writer.put(numbered(4))
        owner.kill()
        putting = asyncio.ensure_future(writer.put(numbered(4, 4)))
        await asyncio.to_thread(until_true, lambda: owner_pids(where) == {os.getpid()})
        await putting
    assert is_in_order(await stored(where), 8)
