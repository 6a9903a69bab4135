"""A shared log through everything that may happen to its process, short of a crash of the machine:
dropped objects, forks, cancelled and interrupted puts, several loops, other options, a clock that
goes back."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.children import python, run, wait_for_line
from support.crash.topics import (
    INTERVAL,
    QUEUES,
    CrashableTopic,
    ExpectedTopic,
    Parts,
    RecordedTopic,
    Unrecorded,
    check_topic,
)

from persisting.bucket.log_positions import POSITIONS, POSITIONS_FILE
from persisting.errors import StorageError
from persisting.queue import PersistingBackend

pytestmark = pytest.mark.usefixtures("no_syncs")

BUCKETS = 3


def new_topic(root: Path, **options: Any) -> RecordedTopic:
    return RecordedTopic(root, buckets=BUCKETS, recorder=Unrecorded(), **options)


async def check(topic: RecordedTopic) -> None:
    await check_topic(topic.root, topic.expected, topic.expected.puts)


# Dropped objects


async def drop_bucket(topic: RecordedTopic, bucket: int) -> None:
    """Drop one backend without a close while the others continue."""
    dropped = topic.topic.topic._backends.pop(bucket)
    core = dropped.bucket.waiters
    del dropped
    for _ in range(200):
        gc.collect()
        if len(gc.get_referrers(core)) <= 1:
            return
        await asyncio.sleep(0.01)


async def test_dropped_bucket_keeps_its_records_while_others_release_the_log(
    tmp_path: Path,
) -> None:
    topic = new_topic(tmp_path)
    await topic.put()
    await drop_bucket(topic, 1)
    for _ in range(3):
        await topic.put(0, 2)
        await topic.flush(0, 2)
    await topic.topic.drop()
    await check(topic)


async def test_failed_log_waits_for_a_dropped_bucket_to_be_opened_again(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    await topic.put()
    await drop_bucket(topic, 1)
    core = (await topic.topic.backend(0)).bucket
    core.group_commit._log._failure = "a test"
    with pytest.raises(StorageError, match=r"buckets \[1\] were dropped"):
        await topic.topic.put({0: [{"id": "refused", "n": 0}]})
    del core
    await topic.put()  # opens it again
    await topic.topic.drop()
    await check(topic)


async def test_bucket_closed_by_two_concurrent_callers_keeps_later_puts(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    for _ in range(15):
        await topic.put()
        closes = [topic.topic.topic.close_bucket(1) for _ in range(3)]
        await asyncio.gather(*closes, topic.put(0, 1), topic.put(1, 2))
    await topic.topic.drop()
    topic.expected.rows = {}  # in any order
    found = await read_once(tmp_path)
    stored = {row["id"] for rows in found.values() for row in rows}
    assert sum(map(len, found.values())) == len(stored)
    for parts in topic.expected.puts.values():
        assert {row["id"] for rows in parts.values() for row in rows} <= stored


async def read_once(root: Path, buckets: int = BUCKETS) -> Parts:
    topic = CrashableTopic(root, buckets)
    found = await topic.read()
    await topic.close()
    return found


# Positions


async def test_positions_of_a_closed_log_are_written_nowhere(tmp_path: Path) -> None:
    """The number of their file may be another file's by then."""
    topic = new_topic(tmp_path)
    await topic.put()
    log = topic.topic.topic._log
    assert log is not None
    publish = log.group_commit._publish
    before = set(os.listdir("/proc/self/fd"))
    await topic.close()
    freed = [int(fd) for fd in before - set(os.listdir("/proc/self/fd"))]
    victims = [os.open(tmp_path / f"victim-{n}", os.O_RDWR | os.O_CREAT) for n in range(12)]
    assert set(freed) & set(victims)
    publish(7, 7)
    assert all(os.fstat(fd).st_size == 0 for fd in victims)
    for fd in victims:
        os.close(fd)


async def test_published_positions_never_go_back(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    await topic.put()
    log = topic.topic.topic._log
    assert log is not None
    last = log.group_commit.last_sequence
    log.group_commit._publish(1, 0)  # a sync that began before the put was acknowledged
    assert POSITIONS.unpack((log.folder / POSITIONS_FILE).read_bytes()) == (last, last)
    await topic.close()


# Forks


FORKED = """
import asyncio, os, sys
from persisting.errors import StorageError
from persisting.queue import write_queue

async def opened(folder):
    options = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}
    return await write_queue("topic", storage_path=folder, num_buckets=4, backend="persisting",
                             backend_options=options, local_socket=False)

queue = asyncio.run(opened(sys.argv[1]))
writer, how = queue.sync(), sys.argv[2]
first = {"id": "first", "n": 0}
own = queue.bucket_of(first)
writer.put(first)
if how == "flushed":
    asyncio.run(queue._topic.bucket(own).flush())
child = os.fork()
if not child:
    # First the buckets that the parent has not opened, then its own.
    for bucket in sorted(range(4), key=lambda b: b == own):
        try:
            asyncio.run(queue._topic.bucket(bucket).flush())
            asyncio.run(queue._topic.close_bucket(bucket))
            print("closed", flush=True)
        except StorageError as exc:
            print("refused", flush=True)
    if how == "exits":
        sys.exit(0)
    os._exit(0)
os.waitpid(child, 0)
for n in range(3):
    writer.put([{"id": f"list-{n}.{m}", "n": m} for m in range(8)])
print("acknowledged", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["flushed", "kept", "exits"])
async def test_forked_child_leaves_its_parents_log_alone(tmp_path: Path, how: str) -> None:
    said = run(FORKED, tmp_path / QUEUES, how).split()
    assert said == ["closed"] * 3 + ["refused", "acknowledged"]
    found = await read_once(tmp_path, 4)
    ids = {row["id"] for rows in found.values() for row in rows}
    assert ids == {"first", *(f"list-{n}.{m}" for n in range(3) for m in range(8))}


GUARD = """
import os, sys, threading
from pathlib import Path
from persisting import fs
from persisting.bucket import log_index

log_index._guard.acquire()  # as a thread that reads a log
child = os.fork()
if not child:
    try:
        log_index.index_of(Path(sys.argv[1]), fs.current())
    except Exception as exc:
        os.write(1, type(exc).__name__.encode())
    os._exit(0)
os.waitpid(child, 0)
"""


def test_forked_child_can_read_a_log_while_its_parent_did(tmp_path: Path) -> None:
    assert run(GUARD, tmp_path / "missing") == "WALError"


# Cancelled and interrupted puts


@pytest.mark.parametrize("options", [{}, INTERVAL], ids=["synced", "interval"])
async def test_cancelled_list_put_is_whole_or_absent(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    topic = CrashableTopic(tmp_path, BUCKETS, **options)
    expected, required = ExpectedTopic(BUCKETS), []
    for steps in itertools.chain(range(25), range(25)):
        name = f"put-{len(expected.puts)}"
        parts = {b: [{"id": f"{name}.{b}", "n": steps, "s": "x" * 50}] for b in range(BUCKETS)}
        expected.add(name, parts)
        sequence = ("writer", len(expected.puts)) if steps % 2 else None
        task = asyncio.ensure_future(topic.put(parts, sequence))
        for _ in range(steps):
            await asyncio.sleep(0.0005 if steps % 3 == 2 else 0)
        if task.cancel():
            await asyncio.gather(task, return_exceptions=True)
        else:
            required.append(name)
    del task
    await topic.drop()
    found = await read_once(tmp_path)
    stored = {row["id"] for rows in found.values() for row in rows}
    expected.rows = {b: [r for r in rows if r["id"] in stored] for b, rows in expected.rows.items()}
    expected.check(found, required)
    assert required


INTERRUPTED = """
import asyncio, os, signal, sys
from persisting.queue import write_queue

async def opened(folder):
    options = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}
    return await write_queue("topic", storage_path=folder, num_buckets=3, backend="persisting",
                             backend_options=options)

writer = asyncio.run(opened(sys.argv[1])).sync()
number = 0
print("open", flush=True)
while True:
    try:
        writer.put([{"id": f"{number}.{n}", "n": n} for n in range(9)])
        print("done", number, flush=True)
        number += 1
    except KeyboardInterrupt:
        print("interrupted", number, flush=True)
        number += 1
        if sys.argv[2] == "exits":
            os._exit(1)
        sys.argv[2] = "exits"
"""


async def test_interrupted_list_put_is_whole_or_absent(tmp_path: Path) -> None:
    with python(INTERRUPTED, tmp_path / QUEUES, "twice") as child:
        lines = [wait_for_line(child) for _ in range(4)]
        assert child.stdout is not None
        rest = asyncio.create_task(asyncio.to_thread(child.stdout.read))
        # Two interrupts count as one if the process is stalled meanwhile: send more if needed.
        for pause in itertools.chain([0.05, 0.05], itertools.repeat(1.0)):
            child.send_signal(signal.SIGINT)
            await asyncio.wait([rest], timeout=pause)
            if rest.done():
                break
        lines += (await rest).splitlines()
    done = [line.split()[1] for line in lines if line.startswith("done")]
    found = await read_once(tmp_path)
    ids = [row["id"] for rows in found.values() for row in rows]
    assert len(set(ids)) == len(ids)
    puts: dict[str, int] = {}
    for name in ids:
        puts[name.split(".")[0]] = puts.get(name.split(".")[0], 0) + 1
    assert set(puts.values()) == {9}
    assert set(done) <= set(puts)


# Several loops, other options, restores, clocks


async def test_threads_with_loops_of_their_own_share_a_log(tmp_path: Path) -> None:
    topic = CrashableTopic(tmp_path, BUCKETS)
    expected, failures = ExpectedTopic(BUCKETS), []

    async def produce(producer: int) -> None:
        for number in range(15):
            name = f"{producer}-{number}"
            parts = {b: [{"id": f"{name}.{b}", "n": number}] for b in range(BUCKETS)}
            expected.puts[name] = parts
            await topic.put(parts, (f"w{producer}", number) if producer % 2 else None)
            if number % 5 == producer:
                await (await topic.backend(producer % BUCKETS)).flush()

    def thread(producer: int) -> None:
        try:
            asyncio.run(produce(producer))
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=thread, args=[n]) for n in range(4)]
    for started in threads:
        started.start()
    await asyncio.gather(*(asyncio.to_thread(started.join) for started in threads))
    assert not failures
    await topic.drop()
    found = await read_once(tmp_path)
    for bucket, rows in found.items():
        for producer in range(4):
            numbers = [r["n"] for r in rows if r["id"].startswith(f"{producer}-")]
            assert numbers == list(range(15)), (bucket, producer)
        assert len(rows) == 60


@pytest.mark.parametrize("logged", [True, False], ids=["logged", "unlogged"])
async def test_list_puts_are_stored_once_while_the_options_change(
    tmp_path: Path, logged: bool
) -> None:
    topic = CrashableTopic(tmp_path, BUCKETS, enable_wal=logged)
    done: list[str] = []
    stop = False

    async def produce(producer: int) -> None:
        for number in itertools.count():
            if stop:
                return
            name = f"{producer}-{number}"
            await topic.put({b: [{"id": f"{name}.{b}", "n": number}] for b in range(BUCKETS)})
            done.append(name)

    tasks = [asyncio.ensure_future(produce(n)) for n in range(4)]
    for size in range(6):
        await asyncio.sleep(0.02)
        config = msgspec.structs.replace(topic.topic.config, batch_size=100 + size)
        await topic.topic.reconfigure(config, PersistingBackend)
    stop = True
    await asyncio.gather(*tasks)
    if not logged:
        await topic.close()
    else:
        await topic.drop()
    found = await read_once(tmp_path)
    for bucket, rows in found.items():
        assert sorted(r["id"] for r in rows) == sorted(f"{name}.{bucket}" for name in done)


async def test_list_put_is_in_one_log_after_a_change_of_options_that_failed_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(tmp_path)
    await topic.put()
    stuck = (await topic.topic.backend(1)).bucket
    monkeypatch.setattr(stuck.table, "append", _no_space)
    config = msgspec.structs.replace(topic.topic.topic.config, batch_size=7)
    with pytest.raises(StorageError, match="no space"):
        await topic.topic.topic.reconfigure(config, PersistingBackend)
    await topic.put(0, 2)
    with pytest.raises(StorageError, match="no space"):
        await topic.topic.put({0: [{"id": "refused", "n": 0}], 1: [{"id": "refused", "n": 0}]})
    monkeypatch.undo()
    del stuck
    await topic.put()
    logs = {(await topic.topic.backend(b)).bucket.group_commit for b in range(BUCKETS)}
    assert len(logs) == 1
    logs.clear()
    await topic.topic.drop()
    await check(topic)


def _no_space(*_: Any) -> None:
    raise StorageError("no space left")


async def test_restore_of_one_bucket_leaves_the_puts_around_it(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    await topic.put()
    await topic.flush(1)
    version = (await (await topic.topic.backend(1)).stats())["version"]
    await topic.put()
    restored = await topic.topic.backend(1)
    await asyncio.gather(topic.put(0, 2), restored.restore(version))
    topic.expected.rows[1] = topic.expected.rows[1][:1]
    del topic.expected.puts["put-1"]
    del restored
    await topic.put()
    await topic.single(1)
    await topic.topic.drop()
    await check(topic)


async def test_puts_that_wait_for_a_restore_are_whole(tmp_path: Path) -> None:
    topic = new_topic(tmp_path, **INTERVAL)
    await topic.put()
    await topic.flush(0, 1, 2)
    restored = await topic.topic.backend(1)
    version = (await restored.stats())["version"]
    for turn in range(5):
        puts = [topic.put() for _ in range(4)]
        await asyncio.gather(restored.restore(version), *puts)
        kept = {row["id"] for row in await restored.get(0, None)}
        # Puts before the restore are gone in bucket 1 and stay in the others.
        for name, parts in list(topic.expected.puts.items()):
            if parts[1][0]["id"] not in kept:
                del topic.expected.puts[name]
        topic.expected.rows[1] = [r for r in topic.expected.rows[1] if r["id"] in kept]
        assert len(kept) >= 1, turn
    del restored
    await topic.topic.drop()
    found = await read_once(tmp_path)
    assert [r["id"] for r in found[1]] == [r["id"] for r in topic.expected.rows[1]]
    stored = {row["id"] for rows in found.values() for row in rows}
    for parts in topic.expected.puts.values():
        assert {row["id"] for rows in parts.values() for row in rows} <= stored


async def test_clock_set_back_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    topic = new_topic(tmp_path)
    for turn in range(5):
        monkeypatch.setattr(time, "time_ns", lambda turn=turn: now - turn * 3600 * 10**9)
        await topic.put()
        await topic.single(turn % BUCKETS)
        if turn % 2:
            await topic.flush(0)
            await topic.close_bucket(1)
        else:
            await topic.reopen(cleanly=turn == 2)
    await topic.topic.drop()
    await check(topic)


async def test_log_that_cannot_be_created_holds_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(tmp_path)
    real = os.open

    def no_positions(path: Any, *args: Any, **given: Any) -> int:
        if str(path).endswith(POSITIONS_FILE):
            raise OSError(24, "Too many open files")
        return real(path, *args, **given)

    monkeypatch.setattr(os, "open", no_positions)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(StorageError):
            await topic.topic.backend(0)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the event loop's
    monkeypatch.undo()
    await topic.put()
    await topic.close()
    assert not list((topic.topic.folder / "log").iterdir())
