"""Owners that die, close, pause or share a topic: every put is stored once and in order."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from support.owner_process import OwnerProcess
from support.socket_places import reading
from support.topic_places import WAL, ids, is_in_order, numbered, streamed

from persisting.cluster import locator
from persisting.errors import StorageError
from persisting.local_socket import connection
from persisting.lock import owner_of
from persisting.queue import QueueWriter, write_queue
from persisting.topic.spec import bucket_folder

LOGGED: dict[str, Any] = {"backend": "persisting", "backend_options": WAL, "num_buckets": 2}


async def writing(folder: Path, **given: Any) -> QueueWriter:
    return await write_queue(topic="t", storage_path=str(folder), **{**LOGGED, **given})


async def stored(folder: Path) -> dict[int, list[Any]]:
    """Return what each bucket holds, in order."""
    found = {}
    for bucket in range(2):
        async with await reading(folder, bucket_id=bucket) as reader:
            found[bucket] = ids(await reader.get(None))
    return found


def owner_pid(folder: Path, bucket: int) -> int | None:
    note = owner_of(bucket_folder(folder / "t", bucket))
    return None if note is None else note["pid"]


async def test_puts_reach_the_owner_in_the_other_process(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    async with await writing(tmp_path) as writer:
        await writer.put({"id": 0})
        await writer.put(numbered(50, 1))
        assert {owner_pid(tmp_path, b) for b in range(2)} == {owner.pid}
        assert (await owner.ask("stats"))["total_count"] == 51


async def test_puts_continue_soon_after_the_owner_was_killed(
    tmp_path: Path, owner: OwnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Puts do not wait until the owner has been silent for a long time.
    monkeypatch.setattr(connection, "KEEPALIVE_SECONDS", 60.0)
    await owner.own(tmp_path, **LOGGED)
    writer = await writing(tmp_path)
    longest = 0.0
    for number in range(200):
        if number == 100:
            owner.kill()
        started = time.monotonic()
        await writer.put({"id": number})
        longest = max(longest, time.monotonic() - started)
    await writer.close()
    assert longest < 60  # less than a second on an idle machine
    assert is_in_order(await stored(tmp_path), 200)


async def test_concurrent_puts_are_stored_once_when_the_owner_is_killed(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    writer = await writing(tmp_path)
    puts = [asyncio.ensure_future(writer.put({"id": number})) for number in range(500)]
    await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
    owner.kill()
    puts += [asyncio.ensure_future(writer.put({"id": number})) for number in range(500, 1000)]
    await asyncio.gather(*puts)
    await writer.close()
    assert is_in_order(await stored(tmp_path), 1000)


async def test_lists_are_stored_once_when_the_owner_is_killed(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    writer = await writing(tmp_path)
    for start in range(0, 20_000, 1000):
        put = asyncio.ensure_future(writer.put(numbered(1000, start)))
        if start == 10_000:
            await asyncio.sleep(0.002)
            owner.kill()
        await put
    await writer.close()
    assert is_in_order(await stored(tmp_path), 20_000)


async def test_puts_continue_when_the_owner_closes(tmp_path: Path, owner: OwnerProcess) -> None:
    await owner.own(tmp_path, **LOGGED)
    writer = await writing(tmp_path)

    closed = asyncio.Event()
    count = 0

    async def put_all() -> None:
        nonlocal count
        left = 50  # puts after the close
        while left:
            left -= closed.is_set()
            await writer.put({"id": count})
            count += 1

    putting = asyncio.ensure_future(put_all())
    while (await owner.ask("stats"))["total_count"] < 50:
        pass
    await owner.ask("close")
    closed.set()
    await putting
    assert owner_pid(tmp_path, 0) not in (None, owner.pid)
    await writer.close()
    assert is_in_order(await stored(tmp_path), count)


async def test_puts_wait_for_an_owner_that_is_stopped(tmp_path: Path, owner: OwnerProcess) -> None:
    await owner.own(tmp_path, **LOGGED)
    writer = await writing(tmp_path)
    await writer.put(numbered(10))
    owner.stop()
    put = asyncio.ensure_future(writer.put(numbered(10, 10)))
    await asyncio.sleep(0.3)
    assert not put.done()
    owner.resume()
    await put
    await writer.close()
    assert is_in_order(await stored(tmp_path), 20)


async def test_call_to_an_owner_that_stays_stopped_fails(
    tmp_path: Path, owner: OwnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    await owner.own(tmp_path, **LOGGED)
    writer = await writing(tmp_path)
    await writer.put({"id": 0})
    owner.stop()
    with monkeypatch.context() as patch:
        patch.setattr(connection, "KEEPALIVE_SECONDS", 0.1)
        patch.setattr(locator, "PATIENCE_SECONDS", 0.5)
        with pytest.raises(StorageError, match=f"process {owner.pid}, does not answer"):
            await writer.put({"id": 1})
    owner.resume()
    await writer.put({"id": 2})
    await writer.close()
    found = [number for numbers in (await stored(tmp_path)).values() for number in numbers]
    assert sorted(set(found) - {1}) == [0, 2]


async def test_different_processes_own_different_buckets(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    writer = await writing(tmp_path, bucket_column="key")
    keys = {writer.bucket_of({"key": key}): key for key in range(20)}
    await writer.put({"key": keys[0], "id": 0})
    await owner.ask("open", args={"topic": "t", "storage_path": str(tmp_path)})
    await owner.ask("open_here", args=1)
    await owner.ask("put", args=[{"key": keys[1], "id": 0}])
    assert owner_pid(tmp_path, 1) == owner.pid != owner_pid(tmp_path, 0)
    both = [{"key": keys[number % 2], "id": number} for number in range(1, 11)]
    await asyncio.gather(writer.put(both), owner.ask("put", args=[both]))
    async with await reading(tmp_path) as reader:
        assert len(await reader.get(None)) == 22
    await writer.close()


async def test_process_that_owns_bucket_0_opens_the_others(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    writer = await writing(tmp_path, bucket_column="key")
    keys = {writer.bucket_of({"key": key}): key for key in range(20)}
    await owner.ask("open", args={"topic": "t", "storage_path": str(tmp_path)})
    await owner.ask("put", args=[{"key": keys[1], "id": 0}])
    assert {owner_pid(tmp_path, bucket) for bucket in range(2)} == {owner.pid}
    await owner.ask("close")
    await writer.put({"key": keys[0], "id": 1})
    await owner.ask("open", args={"topic": "t", "storage_path": str(tmp_path)})
    await owner.ask("put", args=[{"key": keys[1], "id": 2}])
    assert len({owner_pid(tmp_path, bucket) for bucket in range(2)} - {owner.pid}) == 1
    await writer.close()


async def test_reader_sees_what_another_process_has_not_flushed(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    options = {"backend": "lance", "backend_options": {"flush_interval": None}, "num_buckets": 2}
    await owner.own(tmp_path, **options)
    async with await reading(tmp_path) as reader:
        waiting = asyncio.ensure_future(reader.get(wait=True, timeout=30))
        await asyncio.sleep(0.2)
        await owner.ask("put", args=[{"id": 1}])
        assert ids(await waiting) == [1]
        assert owner_pid(tmp_path, 0) == owner.pid


async def test_blocking_stream_continues_with_the_next_owner(
    tmp_path: Path, owner: OwnerProcess, spawned: Any
) -> None:
    await owner.own(tmp_path, **LOGGED)
    await owner.ask("put", args=[numbered(20)])
    reader = await reading(tmp_path)
    tail = spawned(streamed(reader, limit=60, block=True))
    await asyncio.sleep(0.2)
    owner.kill()
    with OwnerProcess() as heir:
        await heir.own(tmp_path)
        await heir.ask("put", args=[numbered(20, 20)])
        await heir.ask("close")
        async with await writing(tmp_path) as writer:
            await writer.put(numbered(20, 40))
            found = ids(await asyncio.wait_for(tail, 30))
    assert sorted(found) == list(range(60))
    await reader.close()


async def test_reader_that_waits_does_not_open_the_buckets_of_a_later_writer(
    tmp_path: Path, spawned: Any
) -> None:
    async with await writing(tmp_path):
        pass
    reader = await reading(tmp_path)
    tail = spawned(streamed(reader, limit=2, block=True))
    await asyncio.sleep(0.1)
    writer = await writing(tmp_path, bucket_column="id")
    await asyncio.sleep(0.2)
    assert [owner_pid(tmp_path, bucket) for bucket in range(2)] == [None, None]
    await writer.put([{"id": 1}, {"id": 2}])
    assert sorted(ids(await asyncio.wait_for(tail, 20))) == [1, 2]
    notes = [owner_of(bucket_folder(tmp_path / "t", bucket)) for bucket in range(2)]
    assert all(note is None or "socket" in note for note in notes)
    await writer.close()
    await reader.close()


async def test_reader_never_becomes_an_owner(tmp_path: Path, owner: OwnerProcess) -> None:
    await owner.own(tmp_path, **LOGGED)
    await owner.ask("put", args=[numbered(10)])
    async with await reading(tmp_path) as reader:
        assert len(await reader.get(None)) == 10
        await owner.ask("close")
        assert await reader.get() == []
        assert (await reader.stats())["total_count"] == 10
        assert [owner_pid(tmp_path, bucket) for bucket in range(2)] == [None, None]


async def test_change_of_the_options_reaches_the_owner(tmp_path: Path, owner: OwnerProcess) -> None:
    await owner.own(tmp_path, **LOGGED)
    with pytest.warns(UserWarning, match="flush_interval"):
        writer = await writing(tmp_path, backend_options={**WAL, "flush_interval": 7.0})
    await writer.put(numbered(10))
    assert owner_pid(tmp_path, 0) == owner.pid
    await writer.close()
    assert (await owner.ask("stats"))["total_count"] == 10


async def test_calls_of_several_event_loops_reach_the_owner(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    writer = await writing(tmp_path)
    await writer.put({"id": 0})

    def in_another_loop(number: int) -> None:
        asyncio.run(writer.put({"id": number}))

    for number in range(1, 4):
        await asyncio.to_thread(in_another_loop, number)
    await asyncio.to_thread(lambda: writer.sync().put({"id": 4}))
    await writer.close()
    assert is_in_order(await stored(tmp_path), 5)
