"""The disk fails at any call: the put or flush raises, and nothing that was acknowledged suffers.

Earlier records stay readable at once and are persisted once the fault is gone; a put that raised
is not stored; nothing is doubled.
"""

from __future__ import annotations

import asyncio
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
from support.crash.checking import Handle, Open, Story, check_story, read_checked
from support.crash.faulty import ERRORS, FaultyFileSystem
from support.crash.recording import QuickFileSystem
from support.crash.workloads import lance, no_log, wal

from persisting import codec, fs
from persisting.errors import StorageError


@pytest.fixture(autouse=True)
def _no_syncs() -> Iterator[None]:
    with fs.use(QuickFileSystem()):
        yield


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


async def run_steps(backend: Any, disk: FaultyFileSystem, steps: list[Step]) -> Story:
    """Every step, healing the disk after the first that raised; what was acknowledged."""
    story = Story()
    for _, step, records in steps:
        try:
            await step(backend)
        except StorageError:
            if not disk.fired:
                raise
            check_story(await read_checked(backend), story, len(story.records))
            disk.heal()
        else:
            if records:
                story.tell(*records)
        check_story(await read_checked(backend), story, len(story.records))
    return story


async def healed_run(
    folder: Path, open_bucket: Open, steps: list[Step], index: int, code: int, *, lasting: bool
) -> bool:
    """One fault in one run; whether there was a call with that number."""
    disk = FaultyFileSystem()
    with fs.use(disk):
        handle = Handle(folder, open_bucket)
    disk.arm(index, code, lasting=lasting)
    story = await run_steps(handle.backend, disk, steps)
    fired = disk.fired
    disk.heal()
    await handle.backend.flush()
    stats = await handle.backend.stats()
    assert stats["persisted_count"] == stats["total_count"] == len(story.records)
    assert stats.get("wal_size", 0) == sum(p.stat().st_size for p in folder.glob("wal/*.wal"))
    await handle.drop()
    for _ in range(2):
        handle = Handle(folder, open_bucket)
        check_story(await read_checked(handle.backend), story, len(story.records))
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
    """A fault at every call (or every ``step``-th) of a run; how many there were."""
    for number, index in enumerate(range(0, 10_000, step)):
        folder = tmp_path / str(index)
        try:
            if not await healed_run(
                folder, open_bucket, steps, index, ERRORS[error], lasting=lasting
            ):
                return number
        except Exception as exc:
            raise AssertionError(f"{error} at call {index}: {exc}") from exc
    raise AssertionError("the run never ended")


async def test_a_fault_at_any_call_loses_nothing_with_a_log(tmp_path: Path) -> None:
    """Every third call here; every call of every kind by night."""
    assert await every_fault(tmp_path, wal(), LOGGED, "EIO", lasting=False, step=3) > 13


@pytest.mark.parametrize(("error", "step"), [("ENOSPC", 4), ("EROFS", 9), ("EMFILE", 9)])
async def test_a_lasting_fault_loses_nothing_with_a_log(
    tmp_path: Path, error: str, step: int
) -> None:
    assert await every_fault(tmp_path, wal(), LOGGED, error, lasting=True, step=step) > 4


async def test_a_fault_at_any_call_loses_nothing_with_an_interval(tmp_path: Path) -> None:
    opener = wal(wal_sync_interval=0.01)
    assert await every_fault(tmp_path, opener, LOGGED, "EIO", lasting=False, step=5) > 7


@pytest.mark.parametrize(
    ("opener", "error"),
    [
        pytest.param(lance(), "EIO", id="lance-EIO"),
        pytest.param(no_log(), "ENOSPC", id="no_log-ENOSPC"),
    ],
)
async def test_a_fault_at_any_call_loses_nothing_without_a_log(
    tmp_path: Path, opener: Open, error: str
) -> None:
    lasting = error == "ENOSPC"
    assert await every_fault(tmp_path, opener, STRICT, error, lasting=lasting) > 15


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
async def test_a_process_that_dies_with_the_fault_loses_nothing(
    tmp_path: Path, error: str, lasting: bool
) -> None:
    """Dropped right after the first error. A put whose outcome nobody was told may be there."""
    for index in range(int(lasting), 10_000, 5):
        folder = tmp_path / str(index)
        disk = FaultyFileSystem()
        with fs.use(disk):
            handle = Handle(folder, wal())
        disk.arm(index, ERRORS[error], lasting=lasting)
        story, failed = Story(), []
        for _, step, records in LOGGED:
            try:
                await step(handle.backend)
            except StorageError:
                failed = records
                break
            if records:
                story.tell(*records)
        await handle.drop()
        disk.heal()
        acknowledged = len(story.records)
        if failed and lasting:
            story.tell(*failed)
        handle = Handle(folder, wal())
        try:
            check_story(await read_checked(handle.backend), story, acknowledged)
        except AssertionError as exc:
            raise AssertionError(f"{error} at call {index}: {exc}") from exc
        await handle.backend.close()
        if not disk.fired:
            return
    raise AssertionError("the run never ended")


# Faults while opening


async def left_behind(folder: Path) -> Story:
    """A bucket with a table and a log whose tail is torn."""
    story = Story()
    handle = Handle(folder, wal())
    for number in range(4):
        story.tell(record(number))
        await handle.backend.put(story.records[-1])
        if number == 1:
            await handle.backend.flush()
    await handle.drop()
    (segment,) = folder.glob("wal/*.wal")
    segment.write_bytes(segment.read_bytes() + b"torn")
    return story


@pytest.mark.parametrize(
    ("opener", "error", "lasting"),
    [
        pytest.param(wal(), "ENOSPC", True, id="wal-ENOSPC"),
        pytest.param(wal(), "EIO", False, id="wal-EIO"),
        pytest.param(no_log(), "EMFILE", True, id="no_log-EMFILE"),
        pytest.param(no_log(), "EIO", False, id="no_log-EIO"),
    ],
)
async def test_a_fault_while_opening_raises_and_the_next_opening_has_everything(
    tmp_path: Path, opener: Open, error: str, lasting: bool
) -> None:
    source = tmp_path / "source"
    story = await left_behind(source)
    for index in range(10_000):
        folder = tmp_path / str(index)
        shutil.copytree(source, folder)
        disk = FaultyFileSystem()
        disk.arm(index, ERRORS[error], lasting=lasting)
        with fs.use(disk):
            try:
                handle = Handle(folder, opener)
            except StorageError:
                pass
            except Exception as exc:
                raise AssertionError(f"call {index}: {type(exc).__name__}: {exc}") from exc
            else:
                check_story(await read_checked(handle.backend), story, 4)
                await handle.drop()
        disk.heal()
        handle = Handle(folder, opener)
        check_story(await read_checked(handle.backend), story, 4)
        await handle.backend.close()
        shutil.rmtree(folder)
        if not disk.fired:
            assert index > 5
            return
    raise AssertionError("the opening never ended")


async def test_a_lock_that_cannot_be_written_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match="No space left"):
            wal()(tmp_path)
    await wal()(tmp_path).close()


async def test_a_close_that_cannot_write_its_note_gives_the_bucket_back_and_says_so(
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


# Between any two lines


class Gates(QuickFileSystem):
    """Holds calls back until the test lets them go, and fails those that it names."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self._reached: dict[str, threading.Event] = {}
        self._open: dict[str, threading.Event] = {}

    def hold(self, name: str) -> None:
        """Calls of this name wait from now on."""
        self._reached[name], self._open[name] = threading.Event(), threading.Event()

    def let_go(self, *names: str) -> None:
        """They go on, and later ones do not wait."""
        for name in names or list(self._open):
            self._open.pop(name).set()

    async def reached(self, name: str) -> None:
        """Return when a call of this name waits."""
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
    disk.let_go()


def start(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(coroutine)


async def outcome(task: asyncio.Task[Any]) -> bool:
    """Whether a put was acknowledged; it may only fail with our errors."""
    try:
        await task
    except (StorageError, asyncio.CancelledError):
        return False
    return True


async def test_nothing_is_acknowledged_before_its_sync_ended(tmp_path: Path, gates: Gates) -> None:
    backend = wal()(tmp_path)
    await backend.put(record(0))
    gates.hold("sync")
    putting = start(backend.put(record(1)))
    await gates.reached("sync")
    await asyncio.sleep(0.05)
    assert not putting.done()
    assert [r["id"] for r in await backend.get()] == ["r0"]
    assert backend.total_count() == 1
    gates.let_go()
    await putting
    assert backend.total_count() == 2
    await backend.close()


async def test_a_put_under_way_when_the_bucket_is_closed_is_stored_or_refused(
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
    gates.let_go()
    await closing
    expected = ["r0", "r1"] if await outcome(putting) else ["r0"]
    again = wal()(tmp_path)
    assert [r["id"] for r in await again.get()] == expected
    assert list(tmp_path.glob("wal/*.wal")) == []
    await again.close()


async def test_puts_under_way_when_the_bucket_is_closed_at_once_are_stored_or_refused(
    tmp_path: Path, gates: Gates
) -> None:
    """The blocking close: one put is being written, another waits behind it."""
    handle = Handle(tmp_path, wal())
    await handle.backend.put(record(0))
    await handle.backend.flush()
    gates.hold("write")
    puts = [start(handle.backend.put(record(1)))]
    await gates.reached("write")
    puts.append(start(handle.backend.put(record(2))))
    await asyncio.sleep(0)
    closing = asyncio.get_running_loop().run_in_executor(None, handle.backend.close_now)
    await asyncio.sleep(0.05)
    gates.let_go()
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


async def test_a_dropped_bucket_keeps_its_lock_until_its_last_write_is_done(
    tmp_path: Path, gates: Gates
) -> None:
    handle = Handle(tmp_path, wal())
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
    gates.let_go()
    for _ in range(500):
        gc.collect()
        await asyncio.sleep(0.01)
        if bucket() is None:
            break
    handle.open()
    found = [r["id"] for r in await handle.backend.get()]
    assert found in (["r0"], ["r0", "r1"])
    await handle.backend.put(record(2))
    await handle.backend.close()
    handle.open()
    assert [r["id"] for r in await handle.backend.get()] == [*found, "r2"]
    await handle.backend.close()


async def test_a_cancelled_put_is_stored_once_or_not_at_all(tmp_path: Path, gates: Gates) -> None:
    handle = Handle(tmp_path, wal())
    await handle.backend.put(record(0))
    gates.hold("sync")
    cancelled = start(handle.backend.put(record(1)))
    await gates.reached("sync")
    behind = start(handle.backend.put(record(2)))
    await asyncio.sleep(0)
    cancelled.cancel()
    gates.let_go()
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


@pytest.mark.parametrize("flush_fails", [False, True])
async def test_puts_beside_a_failing_sync_survive_a_kill_if_they_were_acknowledged(
    tmp_path: Path, gates: Gates, flush_fails: bool
) -> None:
    """At an interval: the sync fails while one put is being written and another one waits."""
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        handle = Handle(folder, wal(wal_sync_interval=0.02))
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
        gates.let_go("sync")
        await asyncio.sleep(0.001 * attempt)
        gates.let_go("write")
        stored = [0, 1]
        for number in (2, 3, 4):
            if await outcome(puts.pop(0)):
                stored.append(number)
        dead = tmp_path / f"dead-{attempt}"
        if flush_fails:  # else the flush that brings them to the table may be at work
            shutil.copytree(folder, dead)
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


async def test_an_error_while_encoding_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the log knows of the schema."""
    opener = wal(compression="zstd")
    handle = Handle(tmp_path, opener)
    story = Story()
    story.tell(record(0))
    await handle.backend.put(story.records[0])

    def exhausted(*args: Any) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(codec, "compress", exhausted)
        with pytest.raises(StorageError):
            await handle.backend.put(record(1, text="a" * 2000))
    story.tell(record(2, text="b" * 2000))
    story.tell(record(3))
    for told in story.records[1:]:
        await handle.backend.put(told)
    check_story(await read_checked(handle.backend), story, 3)
    await handle.drop()
    handle.open()
    check_story(await read_checked(handle.backend), story, 3)
    await handle.backend.close()


async def test_records_acknowledged_before_a_failed_put_reach_the_disk_by_themselves(
    tmp_path: Path, gates: Gates
) -> None:
    """At an interval, with no further put: a flush brings them to the table."""
    backend = wal(wal_sync_interval=0.1)(tmp_path)
    await backend.put(record(0))
    gates.failing = {"write"}
    with pytest.raises(StorageError):
        await backend.put(record(1))
    gates.failing = set()
    for _ in range(100):
        if (await backend.stats())["persisted_count"] == 1:
            break
        await asyncio.sleep(0.05)
    assert (await backend.stats())["persisted_count"] == 1
    await backend.put(record(2))
    assert [r["id"] for r in await backend.get()] == ["r0", "r2"]
    await backend.close()


async def test_a_flush_that_failed_is_tried_again_by_itself(tmp_path: Path) -> None:
    disk = FaultyFileSystem()
    with fs.use(disk):
        backend = wal(flush_interval=0.05)(tmp_path)
    await backend.put(record(0))
    disk.arm(0, ERRORS["ENOSPC"], lasting=True)
    for _ in range(100):
        await asyncio.sleep(0.02)
        if (await backend.stats())["flush_error"]:
            break
    assert (await backend.stats())["flush_error"]
    disk.heal()
    for _ in range(200):
        await asyncio.sleep(0.02)
        if (await backend.stats())["persisted_count"] == 1:
            break
    stats = await backend.stats()
    assert (stats["persisted_count"], stats["flush_error"]) == (1, None)
    await backend.close()


async def test_recovered_records_are_flushed_by_the_interval(tmp_path: Path) -> None:
    handle = Handle(tmp_path, wal(flush_interval=0.1))
    await handle.backend.put(record(0))
    await handle.drop()
    handle.open()
    for _ in range(100):
        await asyncio.sleep(0.02)
        if (await handle.backend.stats())["persisted_count"] == 1:
            break
    assert (await handle.backend.stats())["persisted_count"] == 1
    await handle.backend.close()


async def test_recovered_records_keep_their_times_of_arrival(tmp_path: Path) -> None:
    handle = Handle(tmp_path, wal())
    between = []
    for number in range(3):
        await handle.backend.put(record(number))
        await asyncio.sleep(0.005)
        between.append(time.time_ns() // 1000)
        await asyncio.sleep(0.005)
    expected = [await handle.backend.offset_at(moment) for moment in between]
    assert expected == [1, 2, 3]
    for _ in range(2):
        await handle.drop()
        handle.open()
        assert [await handle.backend.offset_at(moment) for moment in between] == expected
    await handle.backend.flush()
    assert [await handle.backend.offset_at(moment) for moment in between] == expected
    await handle.backend.close()


# Limits of the real system, which Lance meets too

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
def test_real_limits_of_the_system_raise_and_lose_nothing(
    tmp_path: Path, limit: str, logged: bool
) -> None:
    """No more open files, or no file may grow: Lance meets these past the seam."""
    options = {"enable_wal": logged, "wal_sync_interval": 0.0, "flush_interval": None}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path), limit, json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["raised"], "nothing failed, so nothing was tested"
    assert told["after"][:4] == ["r0", "r1", "r2", "r3"]
    assert told["found"] == [*told["after"], "last"]
    assert len(set(told["found"])) == len(told["found"])
    assert told["readable"] in (None, told["after"][3:])
