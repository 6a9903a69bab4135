"""A bucket has one owner, in this process and across processes; readers need no lock."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.buckets import LANCE, PERSISTING, WAL_SYNCED, Kind
from support.children import python, wait_for_line

from persisting import lock
from persisting.lock import LOCK_FILE, BucketLock, briefly, owner_of
from persisting.queue import (
    BucketLocked,
    LanceBackend,
    PersistingBackend,
    StorageError,
    read_queue,
    write_queue,
)
from persisting.table.table import Table

kinds = pytest.mark.parametrize("kind", [LANCE, PERSISTING, WAL_SYNCED], ids=str)

OWNER = """
import asyncio, sys
from persisting.queue import PersistingBackend
backend = PersistingBackend(7, sys.argv[1], enable_wal=True, wal_sync_interval=0.0)
asyncio.run(backend.put({"who": "child"}))
print("open", flush=True)
sys.stdin.readline()
asyncio.run(backend.close())
print("closed", flush=True)
sys.stdin.readline()
"""


def open_(kind: Kind, folder: Path, **options: Any) -> Any:
    return kind.cls(bucket_id=0, storage_path=str(folder), **{**kind.options, **options})


@kinds
async def test_a_second_owner_in_this_process_is_refused(kind: Kind, folder: Path) -> None:
    backend = open_(kind, folder)
    await backend.put({"a": 1})
    for other in (LanceBackend, PersistingBackend):
        with pytest.raises(StorageError) as caught:
            other(0, str(folder))
        if isinstance(caught.value, BucketLocked):
            assert f"process {os.getpid()}" in str(caught.value)
            assert "this process" in str(caught.value)
            assert str(folder) in str(caught.value)
            assert str(caught.value) == f"{caught.value.summary}; {caught.value.hint}"
            assert caught.value.owner["pid"] == os.getpid()
            copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
            assert str(copy) == str(caught.value)
            assert vars(copy) == vars(caught.value)
    await backend.close()
    backend = open_(kind, folder)
    assert await backend.get() == [{"a": 1}]
    await backend.close()


async def test_two_spellings_of_a_path_share_one_lock(folder: Path) -> None:
    backend = LanceBackend(0, str(folder))
    with pytest.raises(BucketLocked):
        LanceBackend(0, str(folder.parent / "." / "x" / ".." / folder.name) + "/")
    link = folder.parent / "link"
    link.symlink_to(folder)
    with pytest.raises(BucketLocked):
        LanceBackend(0, str(link))
    await backend.close()


async def test_the_error_names_the_owning_process_and_its_death_frees_the_lock(
    folder: Path,
) -> None:
    with python(OWNER, folder) as child:
        assert wait_for_line(child) == "open"
        with pytest.raises(BucketLocked, match=f"process {child.pid}") as caught:
            PersistingBackend(0, str(folder))
        assert "bucket 7" in str(caught.value)
        assert "read_only=True" in str(caught.value)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        async with PersistingBackend(0, str(folder)) as backend:
            assert await backend.get() == [{"who": "child"}]


async def test_a_stopped_owner_keeps_its_lock_and_continues_when_resumed(folder: Path) -> None:
    with python(OWNER, folder) as child:
        assert wait_for_line(child) == "open"
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(BucketLocked, match=f"process {child.pid}"):
            PersistingBackend(0, str(folder))
        os.kill(child.pid, signal.SIGCONT)
        assert child.stdin is not None
        child.stdin.write("close\n")
        child.stdin.flush()
        assert wait_for_line(child) == "closed"
        async with PersistingBackend(0, str(folder)) as backend:
            assert backend.total_count() == 1


async def test_an_owner_in_this_process_fences_another_process(folder: Path) -> None:
    code = """
import sys
from persisting.queue import LanceBackend, BucketLocked
try:
    LanceBackend(0, sys.argv[1])
except BucketLocked as exc:
    print(exc)
"""
    backend = LanceBackend(0, str(folder))
    with python(code, folder) as child:
        assert f"process {os.getpid()}" in wait_for_line(child)
    await backend.close()


@kinds
async def test_a_failed_opening_frees_the_lock(kind: Kind, folder: Path) -> None:
    import lance
    import pyarrow as pa

    folder.mkdir(parents=True)
    lance.write_dataset(pa.table({"a": [1]}), str(folder / "data.lance"))
    for _ in range(2):
        with pytest.raises(StorageError, match="no Persisting backend wrote"):
            open_(kind, folder)
    BucketLock(folder).release(clean=False)


@kinds
async def test_a_read_only_backend_takes_no_lock(kind: Kind, folder: Path) -> None:
    backend = open_(kind, folder)
    await backend.put({"a": 1})
    await backend.flush()
    await backend.put({"a": 2})
    readers = [open_(kind, folder, read_only=True) for _ in range(3)]
    for reader in readers:
        assert reader.total_count() == 1
        assert await reader.get() == [{"a": 1}]
        assert (await reader.get_arrow()).num_rows == 1
        assert (await reader.stats())["read_only"] is True
    await backend.close()
    backend = open_(kind, folder)
    assert backend.total_count() == 2
    await backend.close()
    for reader in readers:
        await reader.close()


@kinds
async def test_a_reader_sees_new_flushes_within_100_ms(kind: Kind, folder: Path) -> None:
    backend = open_(kind, folder)
    await backend.put({"a": 0})
    await backend.flush()
    reader = open_(kind, folder, read_only=True)
    for i in range(1, 4):
        await backend.put({"a": i})
        await backend.flush()
        await asyncio.sleep(0.1)
        assert await reader.get(i) == [{"a": i}]
        assert reader.total_count() == i + 1
        assert (await reader.stats())["total_count"] == i + 1
    await reader.close()
    await backend.close()


@kinds
async def test_a_reader_opened_before_the_first_flush_sees_it(kind: Kind, folder: Path) -> None:
    folder.mkdir(parents=True)
    reader = open_(kind, folder, read_only=True)
    assert reader.total_count() == 0
    assert await reader.get() == []
    async with open_(kind, folder) as backend:
        await backend.put({"a": 0})
    await asyncio.sleep(0.1)
    assert await reader.get() == [{"a": 0}]
    await reader.close()


@kinds
async def test_a_blocking_stream_wakes_on_a_flush_and_ends_at_close(
    kind: Kind, folder: Path, spawned: Any
) -> None:
    backend = open_(kind, folder)
    await backend.put({"a": 0})
    await backend.flush()
    reader = open_(kind, folder, read_only=True)
    stream = reader.get_stream(block=True)
    assert await anext(stream) == {"a": 0}
    waiting = spawned(anext(stream, None))
    await asyncio.sleep(0.02)
    await backend.put({"a": 1})
    await backend.flush()
    assert await asyncio.wait_for(waiting, 20) == {"a": 1}
    waiting = spawned(anext(stream, None))
    await asyncio.sleep(0.02)
    await reader.close()
    assert await asyncio.wait_for(waiting, 20) is None
    await backend.close()


@kinds
async def test_a_read_only_backend_refuses_writes(kind: Kind, folder: Path) -> None:
    async with open_(kind, folder) as backend:
        await backend.put({"a": 1})
    reader = open_(kind, folder, read_only=True)
    for write in (reader.put({"a": 2}), reader.put_batch([{"a": 2}]), reader.flush()):
        with pytest.raises(StorageError, match="read_only"):
            await write
    assert await reader.get() == [{"a": 1}]
    await reader.close()


@kinds
def test_a_reader_of_a_folder_that_does_not_exist_raises(kind: Kind, folder: Path) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        open_(kind, folder, read_only=True)
    assert not folder.exists()


async def test_a_reader_refreshes_in_one_thread_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two concurrent refreshes would mix the offsets of two versions."""
    async with (
        LanceBackend(0, str(folder)) as owner,
        LanceBackend(0, str(folder), read_only=True) as reader,
    ):
        await owner.put({"n": 0})
        await owner.flush()
        inside, most, refresh = [0], [0], Table.refresh

        def counted(table: Table) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            refresh(table)
            inside[0] -= 1

        monkeypatch.setattr(Table, "refresh", counted)
        for _ in range(20):
            reader.bucket.expire_view()
            found = await asyncio.gather(*(reader.get(0, 1) for _ in range(8)))
            assert found == [[{"n": 0}]] * 8
        assert most == [1]


async def test_a_read_only_backend_changes_no_file(folder: Path) -> None:
    async with PersistingBackend(0, str(folder), enable_wal=True) as backend:
        await backend.put({"a": 1})
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    reader = PersistingBackend(0, str(folder), read_only=True)
    await reader.get()
    await reader.close()
    assert sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*")) == before


async def test_a_reader_follows_a_schema_change(folder: Path) -> None:
    backend = PersistingBackend(0, str(folder), flush_interval=None)
    await backend.put({"a": 1})
    await backend.flush()
    reader = PersistingBackend(0, str(folder), read_only=True)
    strict = LanceBackend(0, str(folder), read_only=True)
    await backend.put({"a": 1.5, "b": {"c": "new"}})
    await backend.flush()
    await asyncio.sleep(0.1)
    expected = [{"a": 1.0, "b": None}, {"a": 1.5, "b": {"c": "new"}}]
    assert await reader.get() == await strict.get() == expected
    for each in (reader, strict, backend):
        await each.close()


async def test_readers_never_fail_while_a_writer_flushes_and_evolves(folder: Path) -> None:
    backend = PersistingBackend(0, str(folder), flush_interval=None)
    await backend.put({"n": 0})
    await backend.flush()
    stop = asyncio.Event()

    async def read() -> int:
        reads = 0
        while not stop.is_set():
            reader = await asyncio.to_thread(PersistingBackend, 0, str(folder), read_only=True)
            rows = await reader.get()
            assert [int(r["n"]) for r in rows] == list(range(len(rows)))
            assert rows
            await reader.close()
            reads += 1
        return reads

    readers = [asyncio.create_task(read()) for _ in range(2)]
    for n in range(1, 25):
        await backend.put({"n": n, f"field{n % 8}": [n]} if n != 12 else {"n": 12.0, "w": 1})
        await backend.flush()
    stop.set()
    assert all([await reader for reader in readers])
    await backend.close()


def test_the_lock_file_records_whether_the_last_owner_left_cleanly(tmp_path: Path) -> None:
    first = BucketLock(tmp_path)
    assert not first.left_clean
    first.release(clean=True)
    second = BucketLock(tmp_path)
    assert second.left_clean
    second.release(clean=False)
    third = BucketLock(tmp_path)
    assert not third.left_clean
    third.release(clean=False)


@pytest.mark.parametrize("note", [b"", b"\0" * 100, b"[1]", b'{"pid": ', b"\xff\xfe"])
def test_a_damaged_lock_file_does_not_prevent_locking(tmp_path: Path, note: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(note)
    lock = BucketLock(tmp_path, bucket=3)
    assert not lock.left_clean
    with pytest.raises(BucketLocked, match="bucket 3"):
        BucketLock(tmp_path)
    lock.release(clean=False)


async def test_a_backend_dropped_without_close_does_not_leave_cleanly(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LanceBackend(0, str(folder))
    await backend.put({"a": 1})
    del backend
    gc.collect()
    # Backends of earlier tests may be collected here, too.
    messages = [record.getMessage() for record in caplog.records]
    assert [message for message in messages if str(folder) in message] == [
        f"{folder} was dropped without close(): 1 unflushed records are lost"
    ]
    lock = BucketLock(folder)
    assert not lock.left_clean
    lock.release(clean=False)


FORKING = """
import asyncio, os, sys
from persisting.lock import BucketLock
from persisting.errors import BucketLocked
from pathlib import Path
lock = BucketLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    if sys.argv[2] == "lives":
        sys.stdin.readline()
        os._exit(0)
    sys.exit(0)
if sys.argv[2] == "ends":
    os.waitpid(child, 0)
else:
    lock.release(clean=True)
try:
    BucketLock(Path(sys.argv[1]))
    print("free", flush=True)
except BucketLocked:
    print("locked", flush=True)
sys.stdin.readline()
"""


def test_a_forked_child_does_not_keep_a_lock_that_its_parent_released(tmp_path: Path) -> None:
    with python(FORKING, tmp_path, "lives") as child:
        assert wait_for_line(child) == "free"


def test_a_forked_child_that_exits_does_not_free_its_parents_lock(tmp_path: Path) -> None:
    with python(FORKING, tmp_path, "ends") as child:
        assert wait_for_line(child) == "locked"


PARENT = """
import asyncio, multiprocessing, os, signal, sys, time
from persisting.queue import read_queue, write_queue

async def main():
    storage = {"topic": "t", "storage_path": sys.argv[1]}
    writer = await write_queue(**storage, num_buckets=1, backend="lance")
    await writer.put([{"id": n} for n in range(5)])
    await writer.flush()
    reader = await read_queue(**storage, group="g")
    assert len(await reader.get(limit=2)) == 2
    await reader.commit()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    print(child.pid, flush=True)
    sys.stdin.readline()

asyncio.run(main())
"""


async def test_a_forked_child_does_not_keep_the_locks_of_a_killed_parent(
    tmp_path: Path,
) -> None:
    """Like the workers of a data loader, which outlive a trainer that was killed."""
    with python(PARENT, tmp_path) as parent:
        child = int(wait_for_line(parent))
        try:
            parent.kill()
            parent.wait()
            async with await write_queue(topic="t", storage_path=str(tmp_path)) as writer:
                await writer.put({"id": 5})
            async with await read_queue(topic="t", storage_path=str(tmp_path), group="g") as reader:
                assert [one["id"] for one in await reader.get()] == [2, 3, 4, 5]
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_program_that_exits_without_close_prints_nothing(folder: Path) -> None:
    code = """
import asyncio, sys
from persisting.queue import PersistingBackend
backend = PersistingBackend(0, sys.argv[1], enable_wal=True, flush_threshold=20,
                            flush_interval=0.01, wal_sync_interval=0.01)
async def main():
    for i in range(70):
        await backend.put({"i": i})
asyncio.run(main())
"""
    with python(code, folder) as child:
        _, complaints = child.communicate(timeout=60)
        assert (child.returncode, complaints) == (0, "")
    async with PersistingBackend(0, str(folder)) as backend:
        assert [r["i"] for r in await backend.get()] == list(range(70))


@pytest.mark.parametrize("kind", ["LanceBackend", "PersistingBackend"])
@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise KeyError('x')"])
async def test_a_program_that_exits_without_close_flushes_its_records(
    kind: str, end: str, folder: Path
) -> None:
    code = f"""
import asyncio, sys
from persisting.queue import {kind}
backend = {kind}(0, sys.argv[1])
async def main():
    for i in range(70):
        await backend.put({{"i": i}})
    {end}
asyncio.run(main())
"""
    with python(code, folder) as child:
        _, complaints = child.communicate(timeout=60)
        assert child.returncode == {"": 0, "sys.exit(3)": 3}.get(end, 1)
        assert ("KeyError" in complaints) == ("KeyError" in end)
    async with PersistingBackend(0, str(folder)) as backend:
        assert [r["i"] for r in await backend.get()] == list(range(70))


CHILDREN = """
import asyncio, multiprocessing, sys
from persisting.queue import LanceBackend

async def put(folder):
    global backend
    backend = LanceBackend(0, folder)
    await backend.put({"i": 1})

def child(folder):
    asyncio.run(put(folder))

if __name__ == "__main__":
    if sys.argv[3] == "parent-too":
        asyncio.run(put(sys.argv[1] + "-of-the-parent"))
    process = multiprocessing.get_context(sys.argv[2]).Process(target=child, args=[sys.argv[1]])
    process.start()
    process.join()
"""


@pytest.mark.parametrize("parent", ["child-only", "parent-too"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_process_that_exits_without_close_flushes_its_records(
    method: str, parent: str, tmp_path: Path
) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "b"
    program.write_text(CHILDREN)
    arguments = [sys.executable, str(program), str(folder), method, parent]
    subprocess.run(arguments, check=True, timeout=60)
    places = sorted(tmp_path.glob("b*"))
    assert len(places) == 1 + (parent == "parent-too")

    async def check(place: Path) -> None:
        async with LanceBackend(0, str(place)) as backend:
            assert await backend.get() == [{"i": 1}]

    for place in places:
        asyncio.run(check(place))


async def test_a_removed_bucket_folder_is_not_recreated_at_exit(folder: Path) -> None:
    code = """
import asyncio, shutil, sys
from persisting.queue import LanceBackend
backend = LanceBackend(0, sys.argv[1])
asyncio.run(backend.put({"i": 1}))
shutil.rmtree(sys.argv[1])
"""
    with python(code, folder) as child:
        child.communicate(timeout=60)
    assert not folder.exists()


def test_owner_of_returns_the_owners_note_and_keeps_no_lock(tmp_path: Path) -> None:
    assert owner_of(tmp_path) is None
    lock = BucketLock(tmp_path, node="n1")
    note = owner_of(tmp_path)
    assert note is not None
    assert (note["pid"], note["node"]) == (os.getpid(), "n1")
    lock.release(clean=True)
    assert owner_of(tmp_path) is None
    BucketLock(tmp_path).release(clean=True)


def test_a_new_owner_gets_the_lock_while_others_call_owner_of(tmp_path: Path) -> None:
    BucketLock(tmp_path).release(clean=True)
    stop = threading.Event()

    def probe() -> None:
        while not stop.wait(0.0005):
            owner_of(tmp_path)

    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(probe)
        try:
            for _ in range(200):
                BucketLock(tmp_path).release(clean=True)
        finally:
            stop.set()
        probing.result()


def test_a_new_owner_waits_only_for_a_brief_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_BRIEF_WAIT", 600.0)
    with briefly():
        first = BucketLock(tmp_path)
    timer = threading.Timer(0.3, first.release, kwargs={"clean": True})
    timer.start()
    second = BucketLock(tmp_path)
    timer.join()
    started = time.monotonic()
    with pytest.raises(BucketLocked):
        BucketLock(tmp_path)
    assert time.monotonic() - started < 300
    second.release(clean=True)


async def test_a_bucket_closes_even_if_the_last_note_cannot_be_written(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything is durable already: the next owner only has to check the bucket."""
    backend = open_(WAL_SYNCED, folder)
    await backend.put({"a": 1})
    await backend.flush()
    manifests = folder / "data.lance" / "_versions"
    hidden = manifests.rename(manifests.with_name("hidden"))
    await backend.close()
    await backend.close()
    assert "as after a crash" in caplog.text
    hidden.rename(manifests)
    async with open_(WAL_SYNCED, folder) as again:
        assert await again.get() == [{"a": 1}]
