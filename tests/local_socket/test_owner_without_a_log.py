"""An owner without a log dies, and what it had not flushed is lost: offsets are given again, in a
new epoch, and readers that had seen the lost records miss none of the new ones."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.owner_process import OwnerProcess
from support.socket_places import reading
from support.topic_places import WAL, ids, numbered

from persisting.local_socket.shared_reader import SharedReaderClient
from persisting.queue import QueueReader, QueueWriter, write_queue
from persisting.topic.topic_files import TopicFolder
from persisting.ui.screens import tail

UNLOGGED: dict[str, Any] = {"backend": "lance", "num_buckets": 1}


async def own_with_lost_tail(owner: OwnerProcess, folder: Path) -> None:
    """Have the owner flush records 0 to 9 and acknowledge 10 to 14, which its death will take."""
    await owner.own(folder, **UNLOGGED)
    await owner.ask("put", args=[numbered(10)])
    await owner.ask("flush")
    await owner.ask("put", args=[numbered(5, 10)])


async def writing(folder: Path, **given: Any) -> QueueWriter:
    return await write_queue(topic="t", storage_path=str(folder), **{**UNLOGGED, **given})


async def check_puts_after_a_loss(folder: Path, reader: QueueReader, count: int) -> None:
    """Put records as the next owner; check that the reader is delivered exactly those."""
    async with await writing(folder) as writer:
        await writer.put(numbered(count, 100))
        assert ids(await reader.get(None, wait=True)) == list(range(100, 100 + count))


async def take(stream: Any, count: int) -> list[Any]:
    return ids([await anext(stream) for _ in range(count)])


async def test_stream_delivers_all_that_is_put_after_the_loss(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await own_with_lost_tail(owner, tmp_path)
    async with (
        await reading(tmp_path) as reader,
        aclosing(reader.get_stream(block=True)) as stream,
    ):
        assert await take(stream, 15) == list(range(15))
        owner.kill()
        async with await writing(tmp_path) as writer:
            await writer.put(numbered(20, 100))
            assert await take(stream, 20) == list(range(100, 120))


async def test_get_delivers_all_that_is_put_after_the_loss(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await own_with_lost_tail(owner, tmp_path)
    async with await reading(tmp_path) as reader:
        assert ids(await reader.get(None)) == list(range(15))
        owner.kill()
        await check_puts_after_a_loss(tmp_path, reader, 20)


async def test_waiting_get_returns_what_is_put_after_the_loss(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await own_with_lost_tail(owner, tmp_path)
    async with await reading(tmp_path) as reader:
        await reader.get(None)
        waiting = asyncio.create_task(reader.get(None, wait=True))
        owner.kill()
        async with await writing(tmp_path) as writer:
            await writer.put({"id": 100})
            assert ids(await waiting) == [100]


async def test_member_of_a_group_is_delivered_all_that_is_put_after_the_loss(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await own_with_lost_tail(owner, tmp_path)
    async with await reading(tmp_path, group="g") as reader:
        assert ids(await reader.get(None)) == list(range(15))
        owner.kill()
        async with await writing(tmp_path) as writer:
            await writer.put(numbered(20, 100))
            assert ids(await reader.get(None, wait=True)) == list(range(100, 120))
            assert await reader.commit() == {0: 30}


async def test_two_losses_that_a_reader_has_slept_through_are_both_counted(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await own_with_lost_tail(owner, tmp_path)
    async with await reading(tmp_path) as reader:
        assert ids(await reader.get(None)) == list(range(15))
        owner.kill()
        with OwnerProcess() as second:
            await second.own(tmp_path, **UNLOGGED)
            await second.ask("put", args=[numbered(3, 50)])  # at offsets 10 to 12
            await second.ask("flush")
            await second.ask("put", args=[numbered(7, 60)])
        async with await writing(tmp_path) as writer:
            await writer.put(numbered(5, 70))
            assert ids(await reader.get(None)) == [50, 51, 52, 70, 71, 72, 73, 74]


async def epoch(folder: Path, **given: Any) -> int:
    async with await writing(folder, **given) as writer:
        stats = (await writer.stats())["buckets"][0]
    assert stats["end_offset"] == stats["total_count"]
    return int(stats["epoch"])


async def test_every_death_without_a_log_raises_the_epoch_once(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await own_with_lost_tail(owner, tmp_path)
    assert (await owner.ask("stats"))["buckets"][0]["epoch"] == 0
    owner.kill()
    assert [await epoch(tmp_path), await epoch(tmp_path)] == [1, 1]
    with OwnerProcess() as other:
        await other.own(tmp_path, **UNLOGGED)
    assert await epoch(tmp_path) == 2


async def test_loss_before_the_first_flush_raises_the_epoch(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **UNLOGGED)
    await owner.ask("put", args=[numbered(5)])
    async with await reading(tmp_path) as reader:
        assert ids(await reader.get(None)) == list(range(5))
        owner.kill()
        await check_puts_after_a_loss(tmp_path, reader, 7)
    assert await epoch(tmp_path) == 1


async def test_two_losses_before_the_first_flush_raise_the_epoch_twice(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **UNLOGGED)
    owner.kill()
    with OwnerProcess() as second:
        await second.own(tmp_path, **UNLOGGED)
        await second.ask("put", args=[numbered(3, 50)])
        async with await reading(tmp_path) as reader:
            assert ids(await reader.get(None)) == [50, 51, 52]
            second.close()
            await check_puts_after_a_loss(tmp_path, reader, 7)
    assert await epoch(tmp_path) == 2


async def test_epoch_after_a_loss_outlives_an_owner_that_stores_nothing(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **UNLOGGED)
    await owner.ask("put", args=[{"id": 1}])
    owner.kill()
    assert [await epoch(tmp_path), await epoch(tmp_path)] == [1, 1]


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_owner_that_loses_nothing_leaves_the_epoch_as_it_is(
    tmp_path: Path, owner: OwnerProcess, end: str
) -> None:
    logged = {"backend": "persisting", "backend_options": WAL}
    given = UNLOGGED | (logged if end == "kill" else {})
    await owner.own(tmp_path, **given)
    await owner.ask("put", args=[numbered(5)])
    if end == "kill":
        owner.kill()
    else:
        await owner.ask("close")
    assert await epoch(tmp_path, **given) == 0


async def test_log_of_a_later_owner_is_recovered_after_a_loss(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await own_with_lost_tail(owner, tmp_path)
    owner.kill()
    logged = {"backend": "persisting", "backend_options": WAL}
    with OwnerProcess() as later:
        await later.own(tmp_path, **UNLOGGED | logged)
        await later.ask("put", args=[numbered(3, 50)])
    async with await reading(tmp_path) as reader:
        assert ids(await reader.get(None)) == [*range(10), 50, 51, 52]
    async with await writing(tmp_path, **logged) as writer:
        await writer.put({"id": 53})
        async with await reading(tmp_path) as reader:
            assert ids(await reader.get(None)) == [*range(10), 50, 51, 52, 53]
    assert await epoch(tmp_path, **logged) == 1


async def test_stream_waits_quietly_at_an_empty_bucket_of_a_later_epoch(
    tmp_path: Path, owner: OwnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page has told the stream the epoch yet."""
    await owner.own(tmp_path, **UNLOGGED)
    await owner.ask("put", args=[numbered(5)])
    owner.kill()
    assert await epoch(tmp_path) == 1
    waits, wait = 0, SharedReaderClient.wait

    async def counted(self: SharedReaderClient, *place: Any) -> None:
        nonlocal waits
        waits += 1
        await wait(self, *place)

    monkeypatch.setattr(SharedReaderClient, "wait", counted)
    async with (
        await reading(tmp_path) as reader,
        aclosing(reader.get_stream(block=True)) as stream,
    ):
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(1)
        assert 0 < waits < 20
        async with await writing(tmp_path) as writer:
            await writer.put({"id": 7})
            assert (await first)["id"] == 7


async def test_live_tail_of_the_console_shows_all_that_is_put_after_the_loss(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    """The owner shows the tail records that are in no file yet, before they are lost."""
    await own_with_lost_tail(owner, tmp_path)
    following = tail._Tail([0], "", rate=1000, allowance=1000.0)
    following.places, following.epochs = {0: 15}, {0: 0}
    owner.kill()
    async with await writing(tmp_path) as writer:
        await writer.put(numbered(20, 100))
        await writer.flush()
    look = await asyncio.to_thread(tail._look, TopicFolder.open(tmp_path / "t"), following)
    assert look.restored == [0]
    assert [found.offset for found in look.shown] == list(range(10, 30))
