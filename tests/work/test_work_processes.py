"""Members and keepers of work groups in processes that are paused, killed and forked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support import children
from support.waiting import until
from support.work_places import KEEPER, WorkPlace

from persisting.errors import StorageError, WALError
from persisting.local_socket.server import CALLS_AT_ONCE

pytestmark = pytest.mark.asyncio

MEMBER = """
import asyncio, sys
from persisting.queue import LeaseLost, read_queue

async def main():
    folder, topic, lease = sys.argv[1:]
    reader = await read_queue(
        topic, storage_path=folder, group="solvers", mode="work", lease=float(lease)
    )
    (delivery,) = await reader.fetch(1, wait=True)
    print("claimed", delivery.offset, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    try:
        await delivery.ack()
        print("acknowledged", flush=True)
    except LeaseLost as exc:
        print("lost", exc, flush=True)

asyncio.run(main())
"""
"""A member that claims one record, and acknowledges it when a line comes."""


@pytest.fixture
def start() -> Iterator:
    with ExitStack() as stack:
        yield lambda code, *args: stack.enter_context(children.python(code, *args))


async def line_of(child: subprocess.Popen[str]) -> str:
    return await asyncio.to_thread(children.wait_for_line, child)


def tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


async def test_a_paused_member_that_wakes_late_cannot_acknowledge(place: WorkPlace, start) -> None:
    await place.writer(1, num_buckets=1)
    member = await place.member(lease=60.0)
    slow = start(MEMBER, place.folder, place.topic, 0.5)
    assert await line_of(slow) == "claimed 0"
    slow.send_signal(signal.SIGSTOP)
    tell(slow)
    (again,) = await member.fetch(1, wait=True, timeout=60)
    assert (again.offset, again.attempt) == (0, 2)
    slow.send_signal(signal.SIGCONT)
    assert (await line_of(slow)).startswith("lost the lease on offset 0 of bucket 0 is lost")
    await again.ack()
    assert (await member.stats())["acknowledged"] == 1


async def test_the_record_of_a_killed_member_comes_again(place: WorkPlace, start) -> None:
    await place.writer(1, num_buckets=1)
    member = await place.member()
    doomed = start(MEMBER, place.folder, place.topic, 0.5)
    assert await line_of(doomed) == "claimed 0"
    doomed.kill()
    (again,) = await member.fetch(1, wait=True, timeout=60)
    assert again.attempt == 2


async def test_a_waiting_member_takes_over_from_a_killed_keeper(place: WorkPlace, start) -> None:
    writer = await place.writer(4, num_buckets=2)
    keeper = start(KEEPER, place.folder, place.topic, "solvers", {})
    await line_of(keeper)
    member = await place.member(lease=60.0)
    deliveries = await member.fetch(4)
    await deliveries[0].ack()
    waiting = asyncio.create_task(member.fetch(1, wait=True, timeout=60))
    await asyncio.sleep(0.2)
    keeper.kill()
    await writer.put({"id": 100})
    (new,) = await waiting
    assert new.record["id"] == 100
    await deliveries[0].ack()  # repeated, as after a lost answer
    await deliveries[1].ack()  # leases outlive their keeper
    await deliveries[2].reject("broken")
    await deliveries[3].release()
    assert (await member.stats())["acknowledged"] == 2


async def test_members_that_wait_do_not_hold_back_acknowledgements_of_their_process(
    place: WorkPlace, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persisting.work.work_reader.WAIT_SECONDS", 600.0)
    await place.writer(1, num_buckets=1)
    keeper = start(KEEPER, place.folder, place.topic, "solvers", {})
    await line_of(keeper)
    member = await place.member(lease=600.0)
    (delivery,) = await member.fetch(1)
    many = CALLS_AT_ONCE + 8
    waiting = [asyncio.create_task(member.fetch(1, wait=True)) for _ in range(many)]

    async def all_wait() -> bool:
        return len(member._waits) == many

    try:
        await until(all_wait)
        await asyncio.wait_for(delivery.ack(), 60)
        await asyncio.wait_for(member.stats(), 60)
    finally:
        keeper.kill()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_paused_keeper_continues_when_it_resumes(place: WorkPlace, start) -> None:
    await place.writer(2, num_buckets=1)
    keeper = start(KEEPER, place.folder, place.topic, "solvers", {})
    await line_of(keeper)
    member = await place.member()
    keeper.send_signal(signal.SIGSTOP)
    fetching = asyncio.create_task(member.fetch(2))
    await asyncio.sleep(1.0)
    assert not fetching.done()  # two keepers would deliver records twice
    keeper.send_signal(signal.SIGCONT)
    assert len(await fetching) == 2


async def test_a_forked_child_neither_keeps_the_group_nor_releases_it(place: WorkPlace) -> None:
    await place.writer(2, num_buckets=1)
    member = await place.member()
    (first,) = await member.fetch(1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(_fetch_in_child(place, write))
        finally:
            os._exit(0)
    os.close(write)
    said = await asyncio.to_thread(_read_all, read)
    await asyncio.to_thread(os.waitpid, child, 0)
    assert said == "1"  # the other record, from the keeper in the parent
    await first.ack()
    assert (await member.stats())["in_flight"] == 1


async def _fetch_in_child(place: WorkPlace, write: int) -> None:
    other = await WorkPlace.member(place)
    (delivery,) = await other.fetch(1)
    os.write(write, str(delivery.offset).encode())


def _read_all(fd: int) -> str:
    with os.fdopen(fd) as file:
        return file.read()


async def test_a_damaged_journal_is_refused_and_named(place: WorkPlace) -> None:
    await place.writer(50, num_buckets=1)
    member = await place.member()
    for delivery in await member.fetch(50):
        await delivery.ack()
    await member.close()
    folder = place.folder / place.topic / "groups" / "solvers" / "work"
    segment = max(folder.glob("*.wal"), key=lambda path: path.stat().st_size)
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 0xFF
    segment.write_bytes(content)
    with pytest.raises((WALError, StorageError), match="groups/solvers/work"):
        await place.member()


IMPATIENT = """
import asyncio, sys
from persisting.cluster import locator
from persisting.queue import read_queue

locator.PATIENCE_SECONDS = 0.1

async def main():
    folder, topic = sys.argv[1:]
    reader = await read_queue(topic, storage_path=folder, group="solvers", mode="work")
    print(len(await reader.fetch(5)), flush=True)
    await reader.close()

asyncio.run(main())
"""


async def test_members_wait_for_a_keeper_that_is_slow_to_start(
    place: WorkPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.writer(2)
    await place.member()
    local = place.kept_here()
    server, keeper = local._server, local._server.keeper
    asked = []
    answer = server.answer

    async def count(bucket: int, request: Any) -> Any:
        asked.append(request.op)
        return await answer(bucket, request)

    monkeypatch.setattr(server, "answer", count)
    server.keeper = None
    with children.python(IMPATIENT, place.folder, place.topic) as child:
        await until(lambda: _is_true(len(asked) > 1))
        await asyncio.sleep(0.5)  # several times its patience
        assert child.poll() is None
        server.keeper = keeper
        assert await asyncio.to_thread(children.wait_for_line, child) == "2"


async def _is_true(value: bool) -> bool:
    return value
