"""Owners that fork, exit without closing, or have a full disk."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.owner_process import OwnerProcess
from support.small_disk import SmallDisk
from support.topic_places import WAL, ids, numbered
from support.waiting import until

from persisting.errors import StorageError
from persisting.local_socket import connection
from persisting.queue import QueueWriter, read_queue, write_queue

LOGGED: dict[str, Any] = {"backend": "persisting", "backend_options": WAL, "num_buckets": 2}

MULTIPROCESSING = """
import asyncio, multiprocessing, sys, warnings
from persisting.queue import read_queue, write_queue
warnings.simplefilter("ignore")
words = {"topic": "t", "storage_path": sys.argv[1]}

async def put(start):
    async with await write_queue(**words) as writer:
        for number in range(start, start + 20):
            await writer.put({"id": number})

def child(start):
    asyncio.run(put(start))

async def main():
    options = {"enable_wal": True, "wal_sync_interval": 0.0}
    writer = await write_queue(**words, backend="persisting", num_buckets=2,
                               backend_options=options)
    await writer.put([{"id": number} for number in range(20)])
    context = multiprocessing.get_context(sys.argv[2])
    children = [context.Process(target=child, args=[20 * n]) for n in (1, 2, 3)]
    for process in children:
        process.start()
    for process in children:
        process.join()  # blocks the event loop: the children must not need it
        assert process.exitcode == 0
    assert (await writer.stats())["total_count"] == 80
    await writer.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


async def everything(folder: Path) -> list[int]:
    async with await read_queue(topic="t", storage_path=str(folder)) as reader:
        return sorted(ids(await reader.get(None)))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
async def test_workers_of_multiprocessing_put_to_the_topic_of_their_parent(
    tmp_path: Path, method: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(MULTIPROCESSING)
    command = [sys.executable, str(program), str(tmp_path), method]
    await asyncio.to_thread(subprocess.run, command, check=True, timeout=240)
    assert await everything(tmp_path) == list(range(80))


async def test_death_of_an_owner_is_noticed_although_its_forked_child_lives(
    tmp_path: Path, owner: OwnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The put does not wait until the owner has been silent for a long time.
    monkeypatch.setattr(connection, "KEEPALIVE_SECONDS", 60.0)
    await owner.own(tmp_path, **LOGGED)
    writer = await write_queue(topic="t", storage_path=str(tmp_path))
    await writer.put(numbered(10))  # connected before the fork
    child = await owner.ask("fork", args=600)
    try:
        owner.kill()
        started = time.monotonic()
        await writer.put(numbered(10, 10))
        assert time.monotonic() - started < 60
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    await writer.close()
    assert await everything(tmp_path) == list(range(20))


async def test_forked_child_does_not_disturb_the_connections_of_its_parent(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    writer = await write_queue(topic="t", storage_path=str(tmp_path))
    await writer.put(numbered(10))
    pid = os.fork()
    if not pid:
        os._exit(0)
    await asyncio.to_thread(os.waitpid, pid, 0)
    await writer.put(numbered(10, 10))
    assert (await owner.ask("stats"))["total_count"] == 20
    await writer.close()


async def test_puts_continue_after_an_owner_left_by_os_exit(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    writer = await write_queue(topic="t", storage_path=str(tmp_path))
    await writer.put(numbered(10))
    with pytest.raises(AssertionError, match="has ended"):
        await owner.ask("exit")
    await writer.put(numbered(10, 10))
    await writer.close()
    assert await everything(tmp_path) == list(range(20))


EXITING = """
import asyncio, sys
from persisting.queue import write_queue
async def main():
    writer = await write_queue(topic="t", storage_path=sys.argv[1], backend="lance", num_buckets=2)
    await writer.put([{"id": number} for number in range(20)])
    print("ready", flush=True)
    sys.stdin.readline()
asyncio.run(main())
"""


async def test_puts_continue_while_an_owner_exits_without_closing(tmp_path: Path) -> None:
    from support.children import python, wait_for_line

    with python(EXITING, tmp_path) as child:
        assert await asyncio.to_thread(wait_for_line, child) == "ready"
        async with await write_queue(topic="t", storage_path=str(tmp_path)) as writer:
            for number in range(20, 120):
                if number == 60:
                    assert child.stdin is not None
                    child.stdin.write("\n")
                    child.stdin.flush()
                await writer.put({"id": number})
            assert await asyncio.to_thread(child.wait) == 0
            await writer.put({"id": 120})
    assert await everything(tmp_path) == list(range(121))


@pytest.mark.nightly  # mounts a file system, which needs root
async def test_owner_without_space_says_so_and_stores_again_when_there_is_room(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    disk = SmallDisk(tmp_path / "disk", 64)
    try:
        await owner.own(disk.folder, **LOGGED)
        writer = await write_queue(topic="t", storage_path=str(disk.folder))
        await writer.put(numbered(10))
        disk.fill()
        with pytest.raises(StorageError, match="No space left"):
            await writer.put([{"id": 1, "text": "x" * 100_000}])
        disk.make_room()
        await until(lambda: put_again(writer))
        await writer.close()
        assert await everything(disk.folder) == list(range(20))
    finally:
        owner.close()
        disk.close()


async def put_again(writer: QueueWriter) -> bool:
    """Whether the records 10 to 19 could be stored; a failed put stores none."""
    try:
        await writer.put(numbered(10, 10))
    except StorageError:
        return False
    return True


async def test_full_disk_of_the_owner_is_reported_to_the_caller(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    await owner.own(tmp_path, **LOGGED)
    writer = await write_queue(topic="t", storage_path=str(tmp_path))
    await writer.put(numbered(10))
    await owner.ask("limit", args=1)
    with pytest.raises(StorageError, match=r"too large|space|write"):
        await writer.put([{"id": 1, "text": "x" * 100_000}])
    await owner.ask("limit", args=0)
    stored = 0
    for attempt in range(20):
        try:
            await writer.put(numbered(10, 10))
            stored = 10
            break
        except StorageError:
            await asyncio.sleep(0.1 * attempt)
    assert stored == 10
    await writer.close()
    assert await everything(tmp_path) == list(range(20))
