"""Opening, closing and cancelling lose no handle, lock or record."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from support.buckets import until_freed
from support.children import python
from support.faults import FaultyFileSystem
from support.topic_places import WAL, ids, numbered, streamed
from support.waiting import SECONDS, until

from persisting.errors import BucketClosed, StorageError
from persisting.queue import LanceBackend, PersistingBackend, read_queue, write_queue
from persisting.topic import live_topics, local_handle


async def lock_is_free(root: Path) -> int:
    """Open and close the topic's only bucket; return the number of its records."""
    backend = PersistingBackend(0, str(root / "t" / "bucket_0"))
    count = backend.total_count()
    await backend.close()
    return count


async def _no_topic_is_open() -> bool:
    """Cancelled calls close their handles in the background."""
    return live_topics.live_named("t") == []


async def opened(root: Path, **given: Any) -> Any:
    words = {"backend": "lance", "num_buckets": 1, **given}
    return await write_queue(topic="t", storage_path=str(root), **words)


async def test_closed_writer_does_not_open_its_buckets_again(tmp_path: Path) -> None:
    writer = await opened(tmp_path)
    await writer.put({"id": 1})
    await writer.close()
    for use in (writer.stats(), writer.last_sequence()):
        with pytest.raises(BucketClosed):
            await use
    assert await lock_is_free(tmp_path) == 1


@pytest.mark.parametrize("delay", [0, 0.001, 0.003, 0.006, 0.01])
async def test_put_concurrent_with_close_is_stored_or_refused(tmp_path: Path, delay: float) -> None:
    writer = await opened(tmp_path)
    putting = asyncio.ensure_future(writer.put({"id": 1}))
    await asyncio.sleep(delay)
    await writer.close()
    result = (await asyncio.gather(putting, return_exceptions=True))[0]
    assert result is None or isinstance(result, BucketClosed)
    assert await lock_is_free(tmp_path) == (1 if result is None else 0)


async def test_topic_that_closes_while_it_is_opened_again_serves_the_new_writer(
    tmp_path: Path,
) -> None:
    for round_ in range(10):
        first = await opened(tmp_path)
        await first.put(numbered(10))
        closing = asyncio.ensure_future(first.close())
        await asyncio.sleep(0.001 * (round_ % 5))
        second = await opened(tmp_path)
        await second.put(numbered(10))
        await closing
        await second.put({"id": 0})
        await second.close()
    assert await lock_is_free(tmp_path) == 210


async def test_cancelled_write_queue_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening: set[object] = set()
    run = local_handle.in_thread_or_undo

    async def counted(undo: Any, call: Any, *args: Any) -> Any:
        token = object()
        opening.add(token)

        def call_and_count(*given: Any) -> Any:
            try:
                return call(*given)
            finally:
                opening.discard(token)

        return await run(undo, call_and_count, *args)

    async def closed_after_all() -> bool:
        return not opening and await _no_topic_is_open()

    monkeypatch.setattr(local_handle, "in_thread_or_undo", counted)
    for attempt in range(20):
        task = asyncio.ensure_future(opened(tmp_path / str(attempt)))
        await asyncio.sleep(0.0005 * attempt)
        task.cancel()
        for result in await asyncio.gather(task, return_exceptions=True):
            if not isinstance(result, BaseException):
                await result.close()
    await until(closed_after_all)


async def test_cancelled_read_queue_leaves_nothing_open(tmp_path: Path) -> None:
    writer = await opened(tmp_path)
    await writer.put(numbered(10))
    for attempt in range(20):
        task = asyncio.ensure_future(read_queue(topic="t", storage_path=str(tmp_path)))
        await asyncio.sleep(0.0002 * attempt)
        task.cancel()
        for result in await asyncio.gather(task, return_exceptions=True):
            if not isinstance(result, BaseException):
                await result.close()
    await writer.close()
    await until(_no_topic_is_open)


async def test_cancelled_put_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    writer = await opened(tmp_path, backend="persisting", backend_options=WAL)
    for attempt in range(20):
        task = asyncio.ensure_future(writer.put(numbered(10, 10 * attempt)))
        await asyncio.sleep(0.0005 * attempt)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await writer.put(numbered(10, 1000))
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        found = ids(await streamed(reader))
    await writer.close()
    assert found[-10:] == list(range(1000, 1010))
    assert len(found) % 10 == 0
    assert found == sorted(found)


async def test_reader_keeps_the_topic_open_and_the_last_handle_closes_it(tmp_path: Path) -> None:
    writer = await opened(tmp_path)
    await writer.put({"id": 1})
    reader = await read_queue(topic="t", storage_path=str(tmp_path))
    await writer.close()
    assert await reader.get() == [{"id": 1}]
    await reader.close()
    assert await lock_is_free(tmp_path) == 1


async def test_records_of_a_closed_writer_are_on_disk_while_a_reader_is_open(
    tmp_path: Path,
) -> None:
    writer = await opened(tmp_path)
    reader = await read_queue(topic="t", storage_path=str(tmp_path))
    await reader.get()
    await writer.put(numbered(5))
    await writer.close()
    outside = LanceBackend(0, str(tmp_path / "t" / "bucket_0"), read_only=True)
    assert outside.total_count() == 5
    await outside.close()
    await reader.close()


@pytest.mark.parametrize("last", ["writer", "reader"])
async def test_close_that_fails_can_be_repeated(
    tmp_path: Path, faults: FaultyFileSystem, last: str
) -> None:
    writer = await opened(tmp_path)
    reader = await read_queue(topic="t", storage_path=str(tmp_path))
    await writer.put({"id": 1})
    handles = [reader, writer] if last == "writer" else [writer, reader]
    failures = 0
    for handle in handles:
        faults.fail_always("sync_file", "sync_folder", "rename", "create", "write")
        try:
            await handle.close()
        except StorageError:
            failures += 1
        faults.heal()
        await handle.close()
    assert failures
    assert await lock_is_free(tmp_path) == 1


async def test_reader_opened_before_the_writer_wakes_on_put(tmp_path: Path, spawned: Any) -> None:
    async with await opened(tmp_path) as writer:
        await writer.put({"id": 0})
    reader = await read_queue(topic="t", storage_path=str(tmp_path))
    assert await reader.get() == [{"id": 0}]
    waiting = spawned(reader.get(wait=True, timeout=SECONDS))
    await asyncio.sleep(0.2)
    writer = await opened(tmp_path)
    await writer.put({"id": 1})
    assert await asyncio.wait_for(waiting, SECONDS) == [{"id": 1}]
    tail = spawned(streamed(reader, limit=2, block=True))
    await asyncio.sleep(0.1)
    await writer.put([{"id": 2}, {"id": 3}])
    assert ids(await asyncio.wait_for(tail, SECONDS)) == [2, 3]
    await writer.close()
    writer = await opened(tmp_path)
    await writer.put({"id": 4})
    assert await reader.get(wait=True, timeout=SECONDS) == [{"id": 4}]
    await writer.close()
    await reader.close()


async def test_dropped_backend_releases_its_lock(tmp_path: Path) -> None:
    backend = LanceBackend(0, str(tmp_path / "t" / "bucket_0"))
    await backend.put({"id": 1})
    await backend.flush()
    del backend
    await until_freed(tmp_path / "t" / "bucket_0")
    assert await lock_is_free(tmp_path) == 1


def test_synchronous_code_can_use_a_queue_whose_event_loop_has_ended(tmp_path: Path) -> None:
    writer = asyncio.run(opened(tmp_path, backend="persisting", backend_options=WAL)).sync()
    with writer:
        writer.put(numbered(10))
        writer.flush()
        reader = asyncio.run(read_queue(topic="t", storage_path=str(tmp_path))).sync()
        with reader:
            assert ids(reader.get(limit=4)) == [0, 1, 2, 3]
            assert ids(reader.get_stream()) == [4, 5, 6, 7, 8, 9]
            assert reader.get(wait=True, timeout=0.1) == []
            assert reader.topic == "t"
    with pytest.raises(BucketClosed):
        writer.put({"id": 1})


async def test_slow_consumer_keeps_a_bounded_number_of_records_in_memory(tmp_path: Path) -> None:
    writer = await opened(tmp_path, num_buckets=4)
    text = "x" * 1000
    for start in range(0, 20_000, 2000):
        await writer.put([{"id": n, "text": text} for n in range(start, start + 2000)])
    await writer.close()
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        stream = reader.get_stream()
        await anext(stream)
        await asyncio.sleep(0.5)
        gc.collect()
        held = sum(1 for o in gc.get_objects() if type(o) is dict and o.get("text") == text)
        await stream.aclose()  # type: ignore[attr-defined]
    assert held < 5000


INTERRUPTED = """
import asyncio, os, signal, sys, threading
from persisting.queue import read_queue, write_queue

storage = {"topic": "t", "storage_path": sys.argv[1]}

async def opened():
    writer = await write_queue(**storage, num_buckets=1, backend="lance")
    return writer.sync(), (await read_queue(**storage, group="g")).sync()

def interrupted(call):
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    try:
        call()
    except KeyboardInterrupt:
        return
    raise AssertionError("was not interrupted")

writer, reader = asyncio.run(opened())
interrupted(lambda: reader.get(wait=True))
interrupted(lambda: list(reader.get_stream(block=True)))
writer.put({"id": 1})
writer.put({"id": 2})
print([one["id"] for one in reader.get(wait=True)], flush=True)
reader.close()
writer.close()
"""


def test_interrupted_blocking_call_does_not_move_the_cursor(tmp_path: Path) -> None:
    with python(INTERRUPTED, tmp_path) as child:
        out, errors = child.communicate(timeout=60)
    assert (out, errors, child.returncode) == ("[1, 2]\n", "", 0)
