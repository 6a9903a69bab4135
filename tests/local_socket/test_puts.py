"""Puts that reach the owner in another process: order, values, errors."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.owner_process import OwnerProcess
from support.topic_places import WAL, ids, numbered

from persisting.bucket import group_commit
from persisting.bucket.group_commit import GroupCommit
from persisting.errors import BucketLocked, SchemaError, StorageError
from persisting.local_socket.loop_topic import LoopTopic
from persisting.local_socket.owner_notes import FolderOwnerNotes
from persisting.local_socket.quick_puts import QuickPuts
from persisting.local_socket.shared_topic import SharedTopic
from persisting.queue import QueueWriter, read_queue, write_queue

LOGGED: dict[str, Any] = {"backend": "persisting", "backend_options": WAL, "num_buckets": 2}
UNLOGGED: dict[str, Any] = {"backend": "lance", "num_buckets": 2}


async def writing(folder: Path, **given: Any) -> QueueWriter:
    return await write_queue(topic="t", storage_path=str(folder), **given)


async def everything(folder: Path, **given: Any) -> list[dict[str, Any]]:
    async with await read_queue(topic="t", storage_path=str(folder), **given) as reader:
        return await reader.get(None)


def peer_of(writer: QueueWriter) -> LoopTopic:
    """Return the topic of a writer as another process reaches it."""
    topic: Any = writer._topic
    return LoopTopic(FolderOwnerNotes(topic.folder), topic.config)


async def test_single_puts_keep_the_order_of_each_producer(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)

    async def produce(producer: int) -> None:
        for number in range(40):
            await writer.put({"id": producer, "n": number})

    async with await writing(tmp_path) as writer:
        await asyncio.gather(*(produce(producer) for producer in range(16)))
    found: dict[int, list[int]] = {}
    for record in await everything(tmp_path):
        found.setdefault(record["id"], []).append(record["n"])
    assert found == {producer: list(range(40)) for producer in range(16)}


async def test_puts_of_one_task_keep_their_order_whatever_they_hold(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    async with await writing(tmp_path) as writer:
        await writer.put({"id": 1, "n": -1})
        puts = []
        for number in range(60):
            record: dict[str, Any] = {"id": 1, "n": number}
            if number % 7 == 3:
                puts.append(writer.put([{**record, "n": number + i / 1000} for i in range(100)]))
            elif number % 11 == 5:
                puts.append(writer.put({**record, "tags": ["a", "b"]}))
            else:
                puts.append(writer.put(record))
        await asyncio.gather(*puts)
    numbers = [record["n"] for record in await everything(tmp_path)]
    assert numbers == sorted(numbers)
    assert len(numbers) == 61 + 99 * len(range(3, 60, 7))


async def test_puts_that_wait_until_the_owner_is_found_are_not_overtaken(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    async with await writing(tmp_path) as writer:
        puts = [asyncio.ensure_future(writer.put({"id": 0, "n": n})) for n in range(3000)]
        await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
        puts += [asyncio.ensure_future(writer.put({"id": 0, "n": n})) for n in range(3000, 3100)]
        await asyncio.gather(*puts)
    assert [record["n"] for record in await everything(tmp_path)] == list(range(3100))


async def put_in_every_turn(writer: QueueWriter, count: int) -> None:
    """Start a put in each turn of the event loop, even while the first ones find the owner."""
    puts = []
    for number in range(count):
        puts.append(asyncio.ensure_future(writer.put({"id": 0, "n": number})))
        await asyncio.sleep(0)
    await asyncio.gather(*puts)


async def test_put_that_is_called_when_the_owner_has_just_been_found_overtakes_no_other(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    async with await writing(tmp_path) as writer:
        await put_in_every_turn(writer, 5000)
    assert [record["n"] for record in await everything(tmp_path)] == list(range(5000))


async def test_put_that_is_called_when_a_bucket_has_just_been_opened_overtakes_no_other(
    tmp_path: Path,
) -> None:
    async with await writing(tmp_path, **LOGGED) as writer:
        await writer.put({"id": 0, "n": -1})  # a put that changes the schema waits for that, too
    async with await writing(tmp_path) as writer:
        await put_in_every_turn(writer, 5000)
        assert [record["n"] for record in await everything(tmp_path)] == list(range(-1, 5000))


async def test_cancelled_put_lets_later_puts_continue_in_order(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    async with await writing(tmp_path) as writer:
        puts = [asyncio.ensure_future(writer.put({"id": 0, "n": n})) for n in range(300)]
        await asyncio.sleep(0)
        for put in puts[::3]:
            put.cancel()
        await asyncio.gather(*puts, return_exceptions=True)
        kept = [n for n in range(300) if not puts[n].cancelled()]
    stored = [record["n"] for record in await everything(tmp_path)]
    assert stored == sorted(stored)
    assert set(kept) <= set(stored)


async def test_changed_record_is_stored_as_it_was_when_it_was_put(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    async with await writing(tmp_path) as writer:
        await writer.put({"id": 0, "n": 0})
        record = {"id": 0, "n": 1}
        put = asyncio.ensure_future(writer.put(record))
        await asyncio.sleep(0)
        record["n"] = 2
        await put
    assert [found["n"] for found in await everything(tmp_path)] == [0, 1]


async def test_record_that_does_not_fit_fails_alone(tmp_path: Path, owner: OwnerProcess) -> None:
    await owner.own(tmp_path, **LOGGED)
    bad = {5: {"id": 5, "n": "text"}, 11: {"id": 11, "n": 2**70}, 17: {"id": 17, "n": "\ud800"}}
    async with await writing(tmp_path) as writer:
        await writer.put({"id": -1, "n": -1})
        puts = [writer.put(bad.get(number, {"id": number, "n": number})) for number in range(30)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        failed = {number for number, result in enumerate(results) if result is not None}
        assert failed == set(bad)
        assert all(isinstance(results[number], SchemaError) for number in failed)
    assert sorted(ids(await everything(tmp_path))) == sorted({*range(-1, 30)} - set(bad))


@pytest.mark.parametrize("backend", [LOGGED, UNLOGGED], ids=["logged", "unlogged"])
async def test_long_lists_are_stored_and_refused_as_in_one_process(
    tmp_path: Path, owner: OwnerProcess, backend: dict[str, Any]
) -> None:
    lists: list[list[dict[str, Any]]] = [
        [{"id": n, "text": f"text {n}", "f": n / 3, "b": n % 2 == 0, "raw": b"\xff"} for n in rows]
        for rows in (range(300), range(300, 400))
    ]
    lists += [
        [{"id": n, "text": None, "f": 1.0, "b": None, "raw": b""} for n in range(100)],
        [{"id": n, "new": n} for n in range(100)],
        [{"id": n, "f": n} for n in range(100)],
        [{"id": n, "f": 2**60 + 1} for n in range(100)],
        [{"id": n, "new": 2**60 + 1} for n in range(100)],
        [{"id": n, "new": 0.5} for n in range(100)],
        [{"id": n, "text": n} for n in range(100)],
        [{"id": n, "bad name\x00": n} for n in range(100)],
    ]
    outcomes: dict[str, list[str]] = {}
    for place in ("here", "there"):
        folder = tmp_path / place
        folder.mkdir()
        if place == "there":
            await owner.own(folder, **backend)
        async with await writing(folder, **backend) as writer:
            results = [(await asyncio.gather(writer.put(r), return_exceptions=True)) for r in lists]
            outcomes[place] = [f"{type(result).__name__}: {result}" for (result,) in results]
    assert outcomes["there"] == outcomes["here"]
    assert len(set(outcomes["here"])) > 2
    for bucket in range(2):
        here, there = [
            await everything(tmp_path / place, bucket_id=bucket) for place in ("here", "there")
        ]
        assert there == here


async def test_part_of_a_list_is_not_stored_twice_if_another_process_takes_a_bucket(
    tmp_path: Path, owner: OwnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await writing(tmp_path, **UNLOGGED) as writer:
        await writer.put(numbered(20))
        await owner.ask("open", args={"topic": "t", "storage_path": str(tmp_path)})
        topic = writer._topic
        assert isinstance(topic, SharedTopic)
        await topic._local.close_bucket(1)
        await owner.ask("open_here", args=1)
        with monkeypatch.context() as patch:  # as if the bucket were closed only now
            patch.setattr(SharedTopic, "is_direct", lambda self, bucket: True)
            await writer.put(numbered(20, 20))
        await writer.flush()
    assert sorted(ids(await everything(tmp_path))) == list(range(40))


async def test_locked_bucket_of_an_unlogged_topic_names_its_owner(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **UNLOGGED, local_socket=False)
    async with await writing(tmp_path, local_socket=False) as writer:
        with pytest.raises(BucketLocked, match=f"process {owner.pid} .*read_only=True"):
            await writer.put(numbered(20))


async def test_put_that_cannot_be_queued_immediately_is_stored_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore, a flush that is due or a new schema: a task waits for them."""
    asked: list[bool] = []
    enqueue = QuickPuts.enqueue

    def sometimes(self: QuickPuts, *args: Any, **words: Any) -> bool:
        asked.append(len(asked) % 2 == 0 and enqueue(self, *args, **words))
        return asked[-1]

    monkeypatch.setattr(QuickPuts, "enqueue", sometimes)
    async with await writing(tmp_path, **LOGGED) as writer:
        await writer.put([{"id": -1, "n": 0}, {"id": -2, "n": 0}])
        other = peer_of(writer)
        for number in range(40):
            await other.put_parts([(number % 2, [{"id": number, "n": number}])])
        await other.close()
    assert asked.count(True) == asked.count(False) == 20
    found = ids(await everything(tmp_path, bucket_id=0))
    assert [number for number in found if number >= 0] == list(range(0, 40, 2))


async def test_lists_are_queued_without_a_task_and_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[bool] = []
    enqueue = QuickPuts.enqueue

    def noted(self: QuickPuts, *args: Any, **words: Any) -> bool:
        queued.append(enqueue(self, *args, **words))
        return queued[-1]

    monkeypatch.setattr(QuickPuts, "enqueue", noted)
    expected: list[list[dict[str, Any]]] = [[], []]
    async with await writing(tmp_path, **LOGGED) as writer:
        other = peer_of(writer)
        lists = [[{"id": -1, "text": "first", "f": 0.5, "b": True}]]
        for number in range(12):
            made = [{"id": n, "text": f"日 {n}", "f": n / 3, "b": n % 2 == 0} for n in range(300)]
            made[number]["text"] = made[number]["f"] = None
            lists.append(made if number % 3 else made[:1])
        for bucket in range(2):
            await writer._topic.bucket(bucket).put(lists[0])
            expected[bucket] += lists[0]
        puts = []
        for rows in lists[1:]:
            parts = [(0, rows[:100]), (1, rows[100:])] if len(rows) > 1 else [(1, rows)]
            puts.append(other.put_parts(parts))
            for bucket, part in parts:
                expected[bucket] += part
        await asyncio.gather(*puts)
        await other.close()
    assert queued.count(True) >= 8
    found = [await everything(tmp_path, bucket_id=bucket) for bucket in range(2)]
    assert found == expected


async def test_socket_writes_the_log_itself_for_a_lone_peer_unless_syncs_are_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[str] = []
    write = GroupCommit._write_queue

    def noted(self: GroupCommit) -> int:
        if self._queue:
            writers.append(threading.current_thread().name)
        return write(self)

    async with await writing(tmp_path, **LOGGED) as writer:
        await writer.put([{"id": -1, "n": 0}, {"id": -2, "n": 0}])
        monkeypatch.setattr(GroupCommit, "_write_queue", noted)
        peers = [peer_of(writer) for _ in range(2)]

        async def put(numbers: range, peer: int = 0) -> set[str]:
            """Return the kinds of threads that write."""
            writers.clear()
            for number in numbers:
                await peers[peer].put_parts([(0, [{"id": number, "n": number}])])
            return {name.rstrip("-0123456789") for name in writers}

        monkeypatch.setattr(group_commit, "_QUICK_SYNC_SECONDS", 3600.0)
        await put(range(5))  # the first finds the owner
        assert await put(range(5, 10)) == {"persisting-socket"}
        monkeypatch.setattr(group_commit, "_QUICK_SYNC_SECONDS", 0.0)
        assert await put(range(10, 15)) == {"persisting-log"}
        monkeypatch.setattr(group_commit, "_QUICK_SYNC_SECONDS", 3600.0)
        await put(range(15, 20), peer=1)
        assert await put(range(20, 25)) == {"persisting-log"}, "two peers share the writes"
        for peer in peers:
            await peer.close()
    found = ids(await everything(tmp_path, bucket_id=0))
    assert [number for number in found if number >= 0] == list(range(25))


async def test_failed_log_is_reported_to_the_callers_of_queued_puts(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    async with await writing(tmp_path) as writer:
        await writer.put({"id": 0, "n": 0})
        await owner.ask("limit", args=1)
        results = await asyncio.gather(
            *(writer.put({"id": n, "n": n}) for n in range(1, 5)), return_exceptions=True
        )
        assert all(isinstance(result, StorageError) for result in results)
        await owner.ask("limit", args=None)
        await writer.put({"id": 9, "n": 9})
    assert sorted(ids(await everything(tmp_path))) == [0, 9]
