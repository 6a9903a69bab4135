"""A disk fault at any call makes the put or flush raise, and affects no acknowledged record.

Earlier records stay readable and are persisted once the fault is over. A put that raised is not
stored, and nothing is stored twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.crash.checks import (
    PATIENCE,
    CrashableBucket,
    ExpectedRecords,
    Open,
    check_records,
    read_checked,
    stats_when,
)
from support.crash.failing_disk import ERRORS, FaultyFileSystem
from support.crash.recording import QuickFileSystem
from support.crash.workloads import lance, leave_table_and_log, no_log, wal

from persisting import codec, fs
from persisting.errors import StorageError

pytestmark = pytest.mark.usefixtures("no_syncs")


Step = tuple[str, Callable[[Any], Awaitable[None]], list[dict[str, Any]]]


def record(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"r{number}", "n": number, **fields}


def put(*records: dict[str, Any]) -> Step:
    if len(records) == 1:
        return "put", lambda backend: backend.put(records[0]), list(records)
    return "put_batch", lambda backend: backend.put_batch(list(records)), list(records)


FLUSH: Step = ("flush", lambda backend: backend.flush(), [])

LOGGED = [
    put(record(0, v=1)),
    put(record(1, v=1)),
    FLUSH,
    put(record(2, v=1), record(3, v=1)),
    put(record(4, v=1.5, new="field")),
    FLUSH,
    put(record(5, v=2)),
    FLUSH,
]
STRICT = [
    put(record(0)),
    FLUSH,
    put(record(1), record(2)),
    put(record(3)),
    FLUSH,
    FLUSH,
]


async def run_steps(backend: Any, disk: FaultyFileSystem, steps: list[Step]) -> ExpectedRecords:
    """Run every step and heal the disk after the first error. Return the acknowledged records."""
    expected = ExpectedRecords()
    for _, step, records in steps:
        try:
            await step(backend)
        except StorageError:
            if not disk.fired:
                raise
            check_records(await read_checked(backend), expected, len(expected.records))
            disk.heal()
        else:
            if records:
                expected.add(*records)
        check_records(await read_checked(backend), expected, len(expected.records))
    return expected


async def healed_run(
    folder: Path, open_bucket: Open, steps: list[Step], index: int, code: int, *, lasting: bool
) -> bool:
    """Inject one fault; return whether the run had a call with that number."""
    disk = FaultyFileSystem()
    with fs.use(disk):
        handle = CrashableBucket(folder, open_bucket)
    disk.arm(index, code, lasting=lasting)
    expected = await run_steps(handle.backend, disk, steps)
    fired = disk.fired
    disk.heal()
    await handle.backend.flush()
    stats = await handle.backend.stats()
    assert stats["persisted_count"] == stats["total_count"] == len(expected.records)
    assert stats.get("wal_size", 0) == sum(p.stat().st_size for p in folder.glob("wal/*.wal"))
    await handle.drop()
    for _ in range(2):
        handle = CrashableBucket(folder, open_bucket)
        check_records(await read_checked(handle.backend), expected, len(expected.records))
        await handle.backend.close()
    return fired


async def every_fault(
    tmp_path: Path,
    open_bucket: Open,
    steps: list[Step],
    error: str,
    *,
    lasting: bool,
    step: int = 1,
) -> int:
    """Inject a fault at every call (or every ``step``-th) of a run; return how many there were."""
    for number, index in enumerate(range(0, 10_000, step)):
        folder = tmp_path / str(index)
        try:
            if not await healed_run(
                folder, open_bucket, steps, index, ERRORS[error], lasting=lasting
            ):
                return number
        except Exception as exc:
            raise AssertionError(f"{error} at call {index}: {exc}") from exc
    raise AssertionError("the fault was hit in every run")


async def test_fault_at_any_call_loses_nothing_with_a_log(tmp_path: Path) -> None:
    """Every seventh call; the nightly test covers every call and every error."""
    assert await every_fault(tmp_path, wal(), LOGGED, "EIO", lasting=False, step=7) > 5


@pytest.mark.parametrize(("error", "step"), [("ENOSPC", 9), ("EROFS", 11), ("EMFILE", 13)])
async def test_lasting_fault_loses_nothing_with_a_log(
    tmp_path: Path, error: str, step: int
) -> None:
    assert await every_fault(tmp_path, wal(), LOGGED, error, lasting=True, step=step) > 3


async def test_fault_at_any_call_loses_nothing_with_a_sync_interval(tmp_path: Path) -> None:
    opener = wal(wal_sync_interval=0.01)
    assert await every_fault(tmp_path, opener, LOGGED, "EIO", lasting=False, step=11) > 3


@pytest.mark.parametrize(
    ("opener", "error"),
    [
        pytest.param(lance(), "EIO", id="lance-EIO"),
        pytest.param(no_log(), "ENOSPC", id="no_log-ENOSPC"),
    ],
)
async def test_fault_at_any_call_loses_nothing_without_a_log(
    tmp_path: Path, opener: Open, error: str
) -> None:
    lasting = error == "ENOSPC"
    assert await every_fault(tmp_path, opener, STRICT, error, lasting=lasting, step=3) > 5


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("error", ERRORS)
async def test_every_fault_at_every_call_loses_nothing(
    tmp_path: Path, error: str, lasting: bool
) -> None:
    for name, opener, steps in (
        ("wal", wal(), LOGGED),
        ("zstd", wal(compression="zstd"), LOGGED),
        ("interval", wal(wal_sync_interval=0.01), LOGGED),
        ("no_log", no_log(), LOGGED),
        ("lance", lance(), STRICT),
    ):
        await every_fault(tmp_path / name, opener, steps, error, lasting=lasting)


@pytest.mark.parametrize(("error", "lasting"), [("ENOSPC", True), ("EIO", False)])
async def test_process_that_dies_at_the_fault_loses_nothing(
    tmp_path: Path, error: str, lasting: bool
) -> None:
    """The process is dropped right after the first error. The put that failed may be stored."""
    for index in range(int(lasting), 10_000, 5):
        folder = tmp_path / str(index)
        disk = FaultyFileSystem()
        with fs.use(disk):
            handle = CrashableBucket(folder, wal())
        disk.arm(index, ERRORS[error], lasting=lasting)
        expected, failed = ExpectedRecords(), []
        for _, step, records in LOGGED:
            try:
                await step(handle.backend)
            except StorageError:
                failed = records
                break
            if records:
                expected.add(*records)
        await handle.drop()
        disk.heal()
        acknowledged = len(expected.records)
        if failed and lasting:
            expected.add(*failed)
        handle = CrashableBucket(folder, wal())
        try:
            check_records(await read_checked(handle.backend), expected, acknowledged)
        except AssertionError as exc:
            raise AssertionError(f"{error} at call {index}: {exc}") from exc
        await handle.backend.close()
        if not disk.fired:
            return
    raise AssertionError("the fault was hit in every run")


# Faults during open


async def left_behind(folder: Path) -> ExpectedRecords:
    """Create a bucket with a table and a log with a torn tail."""
    expected = await leave_table_and_log(folder)
    (segment,) = folder.glob("wal/*.wal")
    segment.write_bytes(segment.read_bytes() + b"torn")
    return expected


@pytest.mark.parametrize(
    ("opener", "error", "lasting"),
    [
        pytest.param(wal(), "ENOSPC", True, id="wal-ENOSPC"),
        pytest.param(wal(), "EIO", False, id="wal-EIO"),
        pytest.param(no_log(), "EMFILE", True, id="no_log-EMFILE"),
        pytest.param(no_log(), "EIO", False, id="no_log-EIO"),
    ],
)
async def test_fault_during_open_raises_and_the_next_open_has_everything(
    tmp_path: Path, opener: Open, error: str, lasting: bool
) -> None:
    source = tmp_path / "source"
    expected = await left_behind(source)
    for index in range(10_000):
        folder = tmp_path / str(index)
        shutil.copytree(source, folder)
        disk = FaultyFileSystem()
        disk.arm(index, ERRORS[error], lasting=lasting)
        with fs.use(disk):
            try:
                handle = CrashableBucket(folder, opener)
            except StorageError:
                pass
            except Exception as exc:
                raise AssertionError(f"call {index}: {type(exc).__name__}: {exc}") from exc
            else:
                check_records(await read_checked(handle.backend), expected, 4)
                await handle.drop()
        disk.heal()
        handle = CrashableBucket(folder, opener)
        check_records(await read_checked(handle.backend), expected, 4)
        await handle.backend.close()
        shutil.rmtree(folder)
        if not disk.fired:
            assert index > 5
            return
    raise AssertionError("the fault was hit in every run")


async def test_lock_that_cannot_be_written_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match="No space left"):
            wal()(tmp_path)
    await wal()(tmp_path).close()


async def test_close_that_cannot_write_the_lock_file_releases_the_lock_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    backend = wal()(tmp_path)
    await backend.put(record(0))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with caplog.at_level("WARNING", "persisting"):
            await backend.close()
    assert "nothing is lost" in caplog.text
    again = wal()(tmp_path)
    assert [r["id"] for r in await again.get()] == ["r0"]
    await again.close()


# Calls held back at a chosen point


class Gates(QuickFileSystem):
    """Blocks calls until the test releases them, and fails calls by name."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self._reached: dict[str, threading.Event] = {}
        self._open: dict[str, threading.Event] = {}

    def hold(self, name: str) -> None:
        """Block calls of this name from now on."""
        self._reached[name], self._open[name] = threading.Event(), threading.Event()

    def release(self, *names: str) -> None:
        """Release blocked calls; later calls of these names do not block."""
        for name in names or list(self._open):
            self._open.pop(name).set()

    async def reached(self, name: str) -> None:
        """Wait until a call of this name is blocked."""
        event = self._reached[name]
        assert await asyncio.get_running_loop().run_in_executor(None, event.wait, 30)

    def _pass(self, name: str) -> None:
        gate = self._open.get(name)
        if gate is not None:
            self._reached[name].set()
            assert gate.wait(30)
        if name in self.failing:
            raise OSError(errno.EIO, "Input/output error")

    def write(self, fd: int, data: bytes | memoryview) -> None:
        self._pass("write")
        super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._pass("sync")
        super().sync(fd)

    def sync_file(self, path: Path) -> None:
        self._pass("sync_file")
        super().sync_file(path)


@pytest.fixture
def gates() -> Iterator[Gates]:
    disk = Gates()
    with fs.use(disk):
        yield disk
    disk.release()


def start(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(coroutine)


async def outcome(task: asyncio.Task[Any]) -> bool:
    """Return whether a put was acknowledged; it may fail only with a StorageError."""
    try:
        await task
    except (StorageError, asyncio.CancelledError):
        return False
    return True


async def test_put_is_not_acknowledged_before_its_sync_ends(tmp_path: Path, gates: Gates) -> None:
    backend = wal()(tmp_path)
    await backend.put(record(0))
    gates.hold("sync")
    putting = start(backend.put(record(1)))
    await gates.reached("sync")
    await asyncio.sleep(0.05)
    assert not putting.done()
    assert [r["id"] for r in await backend.get()] == ["r0"]
    assert backend.total_count() == 1
    gates.release()
    await putting
    assert backend.total_count() == 2
    await backend.close()


async def test_put_in_flight_during_close_is_stored_or_refused(
    tmp_path: Path, gates: Gates
) -> None:
    backend = wal()(tmp_path)
    await backend.put(record(0))
    gates.hold("write")
    putting = start(backend.put(record(1)))
    await gates.reached("write")
    closing = start(backend.close())
    await asyncio.sleep(0.1)
    assert not closing.done()
    gates.release()
    await closing
    expected = ["r0", "r1"] if await outcome(putting) else ["r0"]
    again = wal()(tmp_path)
    assert [r["id"] for r in await again.get()] == expected
    assert list(tmp_path.glob("wal/*.wal")) == []
    await again.close()


async def test_puts_in_flight_during_a_blocking_close_are_stored_or_refused(
    tmp_path: Path, gates: Gates
) -> None:
    """One put is being written and another is queued during a blocking close."""
    handle = CrashableBucket(tmp_path, wal())
    await handle.backend.put(record(0))
    await handle.backend.flush()
    gates.hold("write")
    puts = [start(handle.backend.put(record(1)))]
    await gates.reached("write")
    puts.append(start(handle.backend.put(record(2))))
    await asyncio.sleep(0)
    closing = asyncio.get_running_loop().run_in_executor(None, handle.backend.close_now)
    await asyncio.sleep(0.05)
    gates.release()
    try:
        await closing
    except StorageError:
        await handle.backend.close()
    handle.open()
    await handle.backend.put(record(9))
    stored = [0, *[n for n, put in zip((1, 2), puts, strict=True) if (await outcome(put))], 9]
    puts.clear()
    assert sorted(r["n"] for r in await handle.backend.get()) == stored
    await handle.drop()
    handle.open()
    assert sorted(r["n"] for r in await handle.backend.get()) == stored
    await handle.backend.close()


async def test_dropped_bucket_keeps_its_lock_until_its_last_write_ends(
    tmp_path: Path, gates: Gates
) -> None:
    handle = CrashableBucket(tmp_path, wal())
    await handle.backend.put(record(0))
    gates.hold("write")
    putting = start(handle.backend.put(record(1)))
    await gates.reached("write")
    putting.cancel()
    assert not await outcome(putting)
    del putting
    bucket = weakref.ref(handle.backend._bucket)
    handle.backend = None
    gc.collect()
    with pytest.raises(StorageError, match="open for writing"):
        wal()(tmp_path)
    gates.release()
    deadline = time.monotonic() + PATIENCE
    while bucket() is not None and time.monotonic() < deadline:
        gc.collect()
        await asyncio.sleep(0.01)
    handle.open()
    found = [r["id"] for r in await handle.backend.get()]
    assert found in (["r0"], ["r0", "r1"])
    await handle.backend.put(record(2))
    await handle.backend.close()
    handle.open()
    assert [r["id"] for r in await handle.backend.get()] == [*found, "r2"]
    await handle.backend.close()


async def test_cancelled_put_is_stored_once_or_not_at_all(tmp_path: Path, gates: Gates) -> None:
    handle = CrashableBucket(tmp_path, wal())
    await handle.backend.put(record(0))
    gates.hold("sync")
    cancelled = start(handle.backend.put(record(1)))
    await gates.reached("sync")
    behind = start(handle.backend.put(record(2)))
    await asyncio.sleep(0)
    cancelled.cancel()
    gates.release()
    assert not await outcome(cancelled)
    await behind
    del cancelled, behind
    await handle.backend.put(record(3))
    found = [r["id"] for r in await handle.backend.get()]
    assert found in (["r0", "r1", "r2", "r3"], ["r0", "r2", "r3"])
    await handle.drop()
    handle.open()
    assert [r["id"] for r in await handle.backend.get()] == found
    await handle.backend.close()


def copy_if_present(source: str, target: str) -> None:
    """Copy a file of a living bucket: a flush that is retried may remove its draft meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


@pytest.mark.parametrize("flush_fails", [False, True])
async def test_acknowledged_puts_concurrent_with_a_failing_sync_survive_a_kill(
    tmp_path: Path, gates: Gates, flush_fails: bool
) -> None:
    """With a sync interval, the sync fails while one put is being written and others are queued."""
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        handle = CrashableBucket(folder, wal(wal_sync_interval=0.02))
        gates.hold("sync")
        await handle.backend.put(record(0))
        await gates.reached("sync")
        await handle.backend.put(record(1))
        gates.hold("write")
        puts = [start(handle.backend.put(record(2)))]
        await gates.reached("write")
        puts += [start(handle.backend.put(record(n))) for n in (3, 4)]
        await asyncio.sleep(0.001)
        gates.failing = {"sync", "sync_file"} if flush_fails else {"sync"}
        gates.release("sync")
        await asyncio.sleep(0.001 * attempt)
        gates.release("write")
        stored = [0, 1]
        for number in (2, 3, 4):
            if await outcome(puts.pop(0)):
                stored.append(number)
        dead = tmp_path / f"dead-{attempt}"
        if flush_fails:  # otherwise a background flush may be running
            shutil.copytree(folder, dead, copy_function=copy_if_present)
        else:
            await handle.drop()
            folder.rename(dead)
        gates.failing = set()
        again = wal()(dead)
        found = [r["n"] for r in await again.get()]
        assert [n for n in found if n in stored] == stored
        assert found == sorted(set(found))
        await again.close()
        if handle.backend is not None:
            await handle.backend.close()


async def test_error_while_encoding_leaves_the_log_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schema that the log has recorded stays unchanged too."""
    opener = wal(compression="zstd")
    handle = CrashableBucket(tmp_path, opener)
    expected = ExpectedRecords()
    expected.add(record(0))
    await handle.backend.put(expected.records[0])

    def exhausted(*args: Any) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(codec, "compress", exhausted)
        with pytest.raises(StorageError):
            await handle.backend.put(record(1, text="a" * 2000))
    expected.add(record(2, text="b" * 2000))
    expected.add(record(3))
    for later in expected.records[1:]:
        await handle.backend.put(later)
    check_records(await read_checked(handle.backend), expected, 3)
    await handle.drop()
    handle.open()
    check_records(await read_checked(handle.backend), expected, 3)
    await handle.backend.close()


async def test_records_acknowledged_before_a_failed_put_are_flushed_in_the_background(
    tmp_path: Path, gates: Gates
) -> None:
    """With a sync interval and no further put, a background flush persists them."""
    backend = wal(wal_sync_interval=0.1)(tmp_path)
    await backend.put(record(0))
    gates.failing = {"write"}
    with pytest.raises(StorageError):
        await backend.put(record(1))
    gates.failing = set()
    await stats_when(backend, lambda stats: stats["persisted_count"] == 1)
    await backend.put(record(2))
    assert [r["id"] for r in await backend.get()] == ["r0", "r2"]
    await backend.close()


async def test_failed_interval_flush_is_retried(tmp_path: Path) -> None:
    disk = FaultyFileSystem()
    with fs.use(disk):
        backend = wal(flush_interval=0.05)(tmp_path)
    await backend.put(record(0))
    disk.arm(0, ERRORS["ENOSPC"], lasting=True)
    await stats_when(backend, lambda stats: stats["flush_error"] is not None)
    disk.heal()
    await stats_when(backend, lambda stats: stats["persisted_count"] == 1)
    await stats_when(backend, lambda stats: stats["flush_error"] is None)
    await backend.close()


async def test_recovered_records_are_flushed_after_the_interval(tmp_path: Path) -> None:
    handle = CrashableBucket(tmp_path, wal(flush_interval=0.1))
    await handle.backend.put(record(0))
    await handle.drop()
    handle.open()
    await stats_when(handle.backend, lambda stats: stats["persisted_count"] == 1)
    await handle.backend.close()


async def test_recovered_records_keep_their_arrival_times(tmp_path: Path) -> None:
    handle = CrashableBucket(tmp_path, wal())
    timestamps = []
    for number in range(3):
        await handle.backend.put(record(number))
        await asyncio.sleep(0.005)
        timestamps.append(time.time_ns() // 1000)
        await asyncio.sleep(0.005)
    expected = [await handle.backend.offset_at(timestamp) for timestamp in timestamps]
    assert expected == [1, 2, 3]
    for _ in range(2):
        await handle.drop()
        handle.open()
        assert [await handle.backend.offset_at(timestamp) for timestamp in timestamps] == expected
    await handle.backend.flush()
    assert [await handle.backend.offset_at(timestamp) for timestamp in timestamps] == expected
    await handle.backend.close()


# Limits of the operating system, which apply to Lance too

LIMITED = """
import asyncio, json, os, resource, sys

from persisting.errors import StorageError
from persisting.queue import PersistingBackend


async def main(folder, limit, options):
    backend = PersistingBackend(0, folder, **options)
    for number in range(3):
        await backend.put({"id": f"r{number}", "text": "x" * 100})
    await backend.flush()
    await backend.put({"id": "r3", "text": "x" * 100})
    raised = []
    if limit == "files":
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    try:
        await backend.put({"id": "big", "text": "x" * 5000})
        await backend.flush()
    except StorageError as exc:
        raised.append(type(exc).__name__)
    readable = [r["id"] for r in await backend.get(3)] if limit != "files" else None
    if limit == "files":
        for fd in taken:
            os.close(fd)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    after = [r["id"] for r in await backend.get()]
    await backend.put({"id": "last", "text": "y"})
    await backend.close()
    again = PersistingBackend(0, folder, **options)
    found = [r["id"] for r in await again.get()]
    await again.close()
    print(json.dumps({"raised": raised, "readable": readable, "after": after, "found": found}))


resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
"""


@pytest.mark.parametrize("limit", ["files", "size"])
@pytest.mark.parametrize("logged", [True, False], ids=["wal", "no_log"])
def test_operating_system_limits_raise_and_lose_nothing(
    tmp_path: Path, limit: str, logged: bool
) -> None:
    """No more open files, or no file may grow. Lance hits these limits outside
    ``persisting.fs``."""
    options = {"enable_wal": logged, "wal_sync_interval": 0.0, "flush_interval": None}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path), limit, json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["raised"], "nothing failed, so nothing was tested"
    assert result["after"][:4] == ["r0", "r1", "r2", "r3"]
    assert result["found"] == [*result["after"], "last"]
    assert len(set(result["found"])) == len(result["found"])
    assert result["readable"] in (None, result["after"][3:])
