"""Members of a group join, leave, are killed and cancelled; every record is delivered."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.children import python, wait_for_line
from support.faults import FaultyFileSystem
from support.queue_contract import shared_out
from support.topic_places import ids, numbered
from support.waiting import SECONDS, until

from persisting import fs
from persisting.errors import StorageError
from persisting.queue import read_queue, write_queue
from persisting.topic.groups import Committed, Membership, read_committed

MEMBER = """
import asyncio, sys
from persisting.queue import read_queue
async def main():
    reader = await read_queue(topic="t", storage_path=sys.argv[1], group="g")
    while True:
        for record in await reader.get(limit=int(sys.argv[2]), wait=True, timeout=1.0):
            print(record["id"], flush=True)
        if sys.argv[3] == "commit":
            await reader.commit()
            print("committed", flush=True)
asyncio.run(main())
"""


async def filled(root: Path, count: int, buckets: int = 4) -> None:
    async with await write_queue(
        topic="t", storage_path=str(root), backend="lance", num_buckets=buckets
    ) as writer:
        await writer.put(numbered(count))


async def member(root: Path, **given: Any) -> Any:
    return await read_queue(topic="t", storage_path=str(root), group="g", **given)


async def collected(reader: Any, enough: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < enough and time.monotonic() < deadline:
        found += ids(await reader.get(wait=True, timeout=0.5))
    return found


async def test_buckets_of_a_killed_member_are_read_from_its_last_commit(
    tmp_path: Path,
) -> None:
    await filled(tmp_path, 100)
    with python(MEMBER, tmp_path, 10, "commit") as child:
        seen: list[int] = []
        line = ""
        while len(seen) < 20 or line != "committed":
            line = await asyncio.to_thread(wait_for_line, child)
            if line != "committed":
                seen.append(int(line))
        child.send_signal(signal.SIGKILL)
        # It may have read, and committed, more before it died.
        # The line that it wrote when it was killed may be incomplete.
        more = child.communicate()[0].splitlines(keepends=True)
        seen += [int(line) for line in more if line.endswith("\n") and line != "committed\n"]
    reader = await member(tmp_path)
    rest = await collected(reader, 100 - len(seen))
    rest += ids(await reader.get(limit=None))
    await reader.close()
    assert set(seen) | set(rest) == set(range(100))
    assert len(rest) <= 80


async def test_members_in_two_processes_share_buckets_without_overlap(tmp_path: Path) -> None:
    writer = await write_queue(topic="t", storage_path=str(tmp_path), backend="lance")
    await writer.put(numbered(40))
    await writer.flush()
    reader = await member(tmp_path)
    await reader.get(limit=1)
    with python(MEMBER, tmp_path, 5, "keep") as child:
        first_line = asyncio.ensure_future(asyncio.to_thread(wait_for_line, child))
        deadline = time.monotonic() + SECONDS
        while not (first_line.done() and len(reader.buckets) == 2):
            assert time.monotonic() < deadline, reader.buckets
            await reader.get(wait=True, timeout=0.2)
        theirs: set[int] = set()
        printing = threading.Thread(target=_collect_printed, args=(child, theirs))
        printing.start()
        await writer.put(numbered(400, 1000))
        await writer.flush()
        own: set[int] = set()
        deadline = time.monotonic() + SECONDS
        while len(own | theirs) < 400 and time.monotonic() < deadline:
            own.update(n for n in ids(await reader.get(wait=True, timeout=0.2)) if n >= 1000)
        child.kill()
        printing.join()
    assert own
    assert theirs
    assert not own & theirs
    assert own | theirs == set(range(1000, 1400))
    rest: set[int] = set()
    deadline = time.monotonic() + SECONDS
    while not theirs <= rest and time.monotonic() < deadline:
        rest.update(ids(await reader.get(wait=True, timeout=0.5)))
    assert theirs <= rest
    await reader.close()
    await writer.close()


def _collect_printed(child: Any, numbers: set[int]) -> None:
    """Add what a child prints, until it ends; only records of the second put count."""
    numbers.update(number for line in child.stdout if (number := int(line)) >= 1000)


async def test_every_record_is_delivered_while_members_join_and_leave(tmp_path: Path) -> None:
    await filled(tmp_path, 600, buckets=6)
    delivered: set[int] = set()

    async def short_life(seconds: float) -> None:
        reader = await member(tmp_path)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            delivered.update(ids(await reader.get(limit=7)))
            await reader.commit()
            await asyncio.sleep(0.02)
        await reader.close()

    await asyncio.gather(*(short_life(0.6 + 0.35 * n) for n in range(5)))
    reader = await member(tmp_path)
    deadline = time.monotonic() + SECONDS
    while len(delivered) < 600 and time.monotonic() < deadline:
        delivered.update(ids(await reader.get(wait=True, timeout=0.5)))
    await reader.close()
    assert delivered == set(range(600))


async def test_stream_gives_buckets_to_a_member_that_joins(tmp_path: Path, spawned: Any) -> None:
    await filled(tmp_path, 2000)
    found: list[int] = []

    async def consume(reader: Any) -> None:
        async for record in reader.get_stream(block=True):
            found.append(record["id"])
            await asyncio.sleep(0.0005)

    first = await member(tmp_path, auto_commit=True)
    spawned(consume(first))
    await asyncio.sleep(0.5)
    second = await member(tmp_path, auto_commit=True)
    spawned(consume(second))

    async def all_are_read_and_shared() -> bool:
        shared = len(first.buckets) == len(second.buckets) == 2
        return shared and set(found) == set(range(2000))

    await until(all_are_read_and_shared)
    assert len(found) < 2400


@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.001, 0.002, 0.004])
async def test_cancelled_read_loses_no_bucket_of_the_group(tmp_path: Path, delay: float) -> None:
    await filled(tmp_path, 40)
    reader = await member(tmp_path)
    task = asyncio.ensure_future(reader.get(limit=100))
    await asyncio.sleep(delay)
    task.cancel()
    found: list[Any] = []
    for part in await asyncio.gather(task, return_exceptions=True):
        found += ids(part) if isinstance(part, list) else []
    found += await collected(reader, 40 - len(found))
    await reader.close()
    assert sorted(found) == list(range(40))


async def test_dropped_members_hold_no_buckets(tmp_path: Path) -> None:
    await filled(tmp_path, 40)
    for attempt in range(20):
        task = asyncio.ensure_future(member(tmp_path))
        await asyncio.sleep(0.0003 * attempt)
        task.cancel()
        for result in await asyncio.gather(task, return_exceptions=True):
            if not isinstance(result, BaseException):
                await result.close()
    dropped = await member(tmp_path)
    await dropped.get(limit=1)
    del dropped, task, result
    await asyncio.sleep(0.1)
    gc.collect()
    reader = await member(tmp_path)
    assert sorted(await collected(reader, 40)) == list(range(40))
    await reader.close()


def test_member_is_not_considered_dead_while_it_joins(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    done = threading.Event()
    watching = Membership(tmp_path, "g", [0, 1], fs.current())

    def watch() -> None:
        while not done.is_set():
            try:
                watching.rebalance()
            except BaseException as exc:
                errors.append(exc)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(150):
            joined = Membership(tmp_path, "g", [0, 1], fs.current())
            joined.rebalance()
            assert (joined.folder / f"member-{joined.member}").exists()
            joined.leave()
    finally:
        done.set()
        thread.join()
        watching.leave()
    assert not errors


def test_late_commit_of_a_lost_bucket_changes_nothing(tmp_path: Path) -> None:
    first = Membership(tmp_path, "g", [0], fs.current())
    first.rebalance()
    generation = first.held[0].generation
    first.leave()
    second = Membership(tmp_path, "g", [0], fs.current())
    second.rebalance()
    assert second.commit({0: (second.held[0].generation, 10, 0)}) == {0: 10}
    assert first.commit({0: (generation, 5, 0)}) == {}
    assert second.commit({0: (generation, 5, 0)}) == {}
    found = read_committed(second.folder, 0, fs.current())
    assert found == Committed(10, generation + 1)
    second.leave()


def test_generation_rises_whenever_a_bucket_is_reassigned(tmp_path: Path) -> None:
    for generation in range(1, 4):
        member = Membership(tmp_path, "g", [0], fs.current())
        member.rebalance()
        assert (member.held[0].generation, member.held[0].start) == (generation, generation - 1)
        member.commit({0: (generation, generation, 0)})
        member.leave()


async def test_damaged_offset_file_is_reported(tmp_path: Path) -> None:
    await filled(tmp_path, 10, buckets=1)
    async with await member(tmp_path) as reader:
        await reader.get()
        await reader.commit()
    path = tmp_path / "t" / "groups" / "g" / "bucket_0.json"
    path.write_bytes(b"{")
    reader = await member(tmp_path)
    with pytest.raises(StorageError, match=r"bucket_0\.json"):
        await reader.get()
    path.unlink()
    await asyncio.sleep(0.4)
    assert sorted(await collected(reader, 10)) == list(range(10))
    await reader.close()


async def test_group_lag_counts_uncommitted_records(tmp_path: Path) -> None:
    await filled(tmp_path, 100)
    first, second = await member(tmp_path), await member(tmp_path)
    await shared_out(first, second, buckets=4)
    await first.get(limit=10)
    assert (await second.stats())["group_lag"] == 100
    await first.commit()
    stats = await second.stats()
    assert stats["group"] == "g"
    assert stats["group_lag"] == sum(stats["group_lags"].values()) == 90
    await first.close()
    await second.close()


async def test_explicit_offset_in_a_group_delivers_each_record_once(tmp_path: Path) -> None:
    await filled(tmp_path, 400)
    reader, other = await member(tmp_path), None
    found = []
    async for record in reader.get_stream(offset=0):
        found.append(record["id"])
        if len(found) == 50:
            other = await member(tmp_path)
            await other.get(limit=1)
            await asyncio.sleep(0.4)
    assert other is not None
    await other.close()
    await reader.close()
    assert len(found) == len(set(found))


async def test_member_whose_first_read_failed_retries_without_delay(tmp_path: Path) -> None:
    faulty = FaultyFileSystem()
    async with await write_queue(
        topic="t", storage_path=str(tmp_path), num_buckets=1, backend="persisting"
    ) as writer:
        await writer.put([{"id": str(n)} for n in range(10)])
        with fs.use(faulty):
            reader = await read_queue(topic="t", storage_path=str(tmp_path), group="g")
        async with reader:
            faulty.fail_always("write")
            with pytest.raises(StorageError):
                await reader.get(5)
            faulty.heal()
            assert len(await reader.get(5)) == 5
