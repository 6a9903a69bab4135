"""Topics shared between processes: ownership, reading, and recovery after a kill -9."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.children import python, run, tell
from support.topic_places import ids, numbered, streamed

from persisting.errors import BucketLocked
from persisting.queue import read_queue, write_queue

WRITER = """
import asyncio, json, sys
from persisting.queue import write_queue
async def main():
    root, options = sys.argv[1], json.loads(sys.argv[2])
    writer = await write_queue(topic="t", storage_path=root, writer_id="w", **options)
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "close":
            await writer.close()
        elif word == "flush":
            await writer.flush()
        else:
            start, count = map(int, numbers)
            records = [{"id": n} for n in range(start, start + count)]
            await writer.put(records, sequence=start)
        print("done", flush=True)
asyncio.run(main())
"""
LOGGED = '{"backend": "persisting", "num_buckets": %d, "backend_options": %s}'
SYNCED = '{"enable_wal": true, "wal_sync_interval": 0.0, "flush_interval": null}'
LATER = '{"enable_wal": true, "wal_sync_interval": 1.0, "flush_interval": null}'


async def everything(root: Path) -> list[int]:
    async with await read_queue(topic="t", storage_path=str(root)) as reader:
        return sorted(ids(await streamed(reader)))


async def test_reader_of_the_files_of_another_process_sees_flushed_rows(tmp_path: Path) -> None:
    with python(WRITER, tmp_path, '{"backend": "lance"}') as child:
        tell(child, "put 0 100")
        tell(child, "flush")
        reader = await read_queue(topic="t", storage_path=str(tmp_path), local_socket=False)
        assert sorted(ids(await streamed(reader))) == list(range(100))
        tell(child, "put 100 50")
        assert await reader.get() == []
        tell(child, "flush")
        started, found = time.monotonic(), []
        while len(found) < 50 and time.monotonic() - started < 60:
            found += ids(await reader.get(wait=True, timeout=5))
        assert sorted(found) == list(range(100, 150))
        await reader.close()


async def test_blocking_stream_follows_another_process(tmp_path: Path, spawned: Any) -> None:
    with python(WRITER, tmp_path, '{"backend": "lance"}') as child:
        tell(child, "put 0 10")
        tell(child, "flush")
        reader = await read_queue(topic="t", storage_path=str(tmp_path))
        tail = spawned(streamed(reader, limit=60, block=True))
        for start in range(10, 60, 10):
            tell(child, f"put {start} 10")
            tell(child, "flush")
        assert sorted(ids(await asyncio.wait_for(tail, 30))) == list(range(60))
        await reader.close()


@pytest.mark.parametrize("without", ["owner", "writer"])
async def test_error_of_a_second_writing_process_without_the_socket_names_the_owner(
    tmp_path: Path, without: str
) -> None:
    options = '{"backend": "lance", "local_socket": %s}'
    with python(WRITER, tmp_path, options % str(without != "owner").lower()) as child:
        tell(child, "put 0 100")
        writer = await write_queue(
            topic="t", storage_path=str(tmp_path), local_socket=without != "writer"
        )
        with pytest.raises(BucketLocked, match=str(child.pid)):
            await writer.put(numbered(10))
        tell(child, "close")
        await writer.put(numbered(10, 100))
        await writer.close()
    assert await everything(tmp_path) == list(range(110))


@pytest.mark.parametrize("options", [SYNCED, LATER], ids=["wal-0.0", "wal-1.0"])
@pytest.mark.parametrize("heir", ["reader", "writer"])
async def test_acknowledged_records_survive_the_kill_of_the_writer(
    tmp_path: Path, options: str, heir: str
) -> None:
    with python(WRITER, tmp_path, LOGGED % (4, options)) as child:
        tell(child, "put 0 100")
        tell(child, "flush")
        tell(child, "put 100 100")
        tell(child, "put 200 1")
        child.send_signal(signal.SIGKILL)
        child.wait()
    if heir == "writer":
        async with await write_queue(topic="t", storage_path=str(tmp_path)) as writer:
            assert (await writer.stats())["total_count"] == 201
    assert await everything(tmp_path) == list(range(201))


async def test_reader_recovers_all_buckets_of_a_killed_writer(tmp_path: Path) -> None:
    with python(WRITER, tmp_path, LOGGED % (24, SYNCED)) as child:
        tell(child, "put 0 500")
        child.send_signal(signal.SIGKILL)
        child.wait()
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        stats = await asyncio.wait_for(reader.stats(), 60)
        assert stats["total_count"] == 500
    assert await everything(tmp_path) == list(range(500))


async def test_retry_after_a_kill_is_stored_once(tmp_path: Path) -> None:
    for _ in range(3):
        with python(WRITER, tmp_path, LOGGED % (4, SYNCED)) as child:
            tell(child, "put 0 100")
            tell(child, "put 100 50")
            child.send_signal(signal.SIGKILL)
            child.wait()
    with python(WRITER, tmp_path, LOGGED % (4, SYNCED)) as child:
        tell(child, "put 100 50")
        tell(child, "flush")
        tell(child, "put 100 50")
        tell(child, "close")
    assert await everything(tmp_path) == list(range(150))


async def test_retry_completes_a_put_that_was_killed_midway(tmp_path: Path) -> None:
    for attempt in range(6):
        with python(WRITER, tmp_path, LOGGED % (4, SYNCED)) as child:
            tell(child, "put 0 10")
            child.stdin.write("put 10 4000\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]
            await asyncio.sleep(0.004 * attempt)
            child.send_signal(signal.SIGKILL)
            child.wait()
    with python(WRITER, tmp_path, LOGGED % (4, SYNCED)) as child:
        tell(child, "put 10 4000")
        tell(child, "close")
    assert await everything(tmp_path) == list(range(4010))


async def test_missing_custom_backend_is_named_in_the_error(tmp_path: Path) -> None:
    code = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from support.protocol_only_backend import OnlyProtocol
from persisting.queue import write_queue
async def main():
    async with await write_queue(topic="t", storage_path=sys.argv[1], backend=OnlyProtocol) as w:
        await w.put([{"id": n} for n in range(10)])
asyncio.run(main())
"""
    run(code, tmp_path, TESTS)
    with pytest.raises(ValueError, match="OnlyProtocol"):
        await read_queue(topic="t", storage_path=str(tmp_path))
    from support.protocol_only_backend import OnlyProtocol

    async with await read_queue(
        topic="t", storage_path=str(tmp_path), backend=OnlyProtocol
    ) as reader:
        assert sorted(ids(await streamed(reader))) == list(range(10))


async def test_two_processes_creating_one_topic_concurrently_agree(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from persisting.queue import write_queue
async def main():
    try:
        writer = await write_queue(topic="t", storage_path=sys.argv[1], backend="lance",
                                   num_buckets=int(sys.argv[2]))
        print("made", writer._topic.num_buckets, flush=True)
        await writer.close()
    except ValueError as exc:
        print("refused", flush=True)
asyncio.run(main())
"""
    with python(code, tmp_path, 3) as first, python(code, tmp_path, 5) as second:
        printed = {first.communicate()[0].strip(), second.communicate()[0].strip()}
    assert printed in ({"made 3", "refused"}, {"made 5", "refused"})


FORKING = """
import asyncio, os, signal, sys, traceback
from persisting.queue import read_queue, write_queue
words = {"topic": "t", "storage_path": sys.argv[1]}
async def begin():
    writer = await write_queue(**words, backend="persisting", num_buckets=1)
    await writer.put([{"id": n} for n in range(10)])
    await writer.flush()
    return writer
async def child():
    async with await read_queue(**words) as reader:
        assert len(await reader.get()) == 10
    async with await write_queue(**words) as own:
        await own.put({"id": 10})
async def end(writer):
    await writer.put({"id": 11})
    await writer.close()
writer = asyncio.run(begin())
pid = os.fork()
if not pid:
    try:
        asyncio.run(child())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
asyncio.run(end(writer))
if status == -signal.SIGSEGV:
    print("crashed")
else:
    assert status == 0
"""


async def test_forked_child_reads_and_writes_the_topic_of_its_parent(tmp_path: Path) -> None:
    # Lance is not fork-safe, as it warns itself: it sometimes crashes in a child.
    for attempt in range(4):
        answer = run(FORKING, tmp_path / str(attempt))
        if "crashed" not in answer:
            assert await everything(tmp_path / str(attempt)) == list(range(12))
            return
    pytest.fail("the child of a fork crashed in Lance every time")
