"""The note of a bucket's lock says whether its owner may lose records with its process. The next
owner begins a new epoch exactly if the note says so, whatever happens to it meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.children import python, run

from persisting.bucket import exit_flush
from persisting.errors import StorageError
from persisting.lock import LOCK_FILE, last_note
from persisting.queue import LanceBackend, PersistingBackend, write_queue
from persisting.table.table import Table
from persisting.topic import scan
from persisting.topic.ownership import open_owner
from persisting.topic.scan import Slice

LOGGED: dict[str, Any] = {"enable_wal": True, "wal_sync_interval": 0.0}

OWNER = """
import asyncio, os, signal, sys
from persisting.queue import LanceBackend, PersistingBackend

def open_(**options):
    kind = PersistingBackend if options else LanceBackend
    return kind(0, sys.argv[1], **options)

async def put(backend, count, *, flush=False):
    for i in range(count):
        await backend.put({"i": i})
    if flush:
        await backend.flush()

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "b"


def killed(code: str, folder: Path) -> None:
    """Run an owner until it kills itself."""
    with python(OWNER + code, folder) as child:
        _, complaints = child.communicate(timeout=120)
        assert child.returncode == -signal.SIGKILL, complaints


def lose_records(folder: Path) -> None:
    """Let an owner without a log die with records that it has not flushed."""
    killed("asyncio.run(put(open_(), 5)); die()", folder)


def failing(code: int) -> Callable[..., Any]:
    """Return a call that raises this error."""

    def fail(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


async def epoch(folder: Path, **options: Any) -> int:
    kind = PersistingBackend if options else LanceBackend
    async with kind(0, str(folder), **options) as backend:
        return int((await backend.stats())["epoch"])


async def test_note_survives_an_owner_that_cannot_write_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_records(folder)
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", failing(errno.ENOSPC))
        with pytest.raises(StorageError, match="No space left"):
            LanceBackend(0, str(folder))
    assert await epoch(folder) == 1


async def test_note_that_is_written_in_part_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", lambda fd, data, offset: len(data) - 1)
        with pytest.raises(StorageError, match="No space left"):
            LanceBackend(0, str(folder))
    assert await epoch(folder) == 0


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fdatasync"])
async def test_note_survives_an_owner_that_is_killed_while_it_writes_its_own(
    folder: Path, call: str
) -> None:
    lose_records(folder)
    note = folder / LOCK_FILE
    note.write_bytes(note.read_bytes().replace(b"{", b'{"a longer note": "' + b"x" * 99 + b'",'))
    killed(f"os.{call} = lambda *args: die()\nopen_()", folder)
    assert last_note(folder)["unlogged"] is True
    assert await epoch(folder) == 1


async def test_lock_file_that_cannot_be_read_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_records(folder)
    with monkeypatch.context() as disk:
        disk.setattr(os, "pread", failing(errno.EIO))
        with pytest.raises(StorageError, match=r"cannot read the lock file .*/\.lock"):
            LanceBackend(0, str(folder))
    assert await epoch(folder) == 1


async def test_owners_with_a_log_raise_the_epoch_after_a_loss_only_once(folder: Path) -> None:
    lose_records(folder)
    logged = f"backend = open_(**{LOGGED})\nasyncio.run(put(backend, 1, flush=True))\ndie()"
    for _ in range(3):
        killed(logged, folder)
    assert await epoch(folder, **LOGGED) == 1


async def test_brief_owner_that_is_killed_leaves_the_epoch_as_it_is(tmp_path: Path) -> None:
    given: dict[str, Any] = {"num_buckets": 1, "backend": "persisting", "backend_options": LOGGED}
    async with await write_queue(topic="t", storage_path=str(tmp_path), **given) as writer:
        await writer.put({"id": 1})
    killed(
        "from pathlib import Path\n"
        "from persisting import fs\n"
        "from persisting.topic import spec\n"
        f"from {open_owner.__module__} import open_owner\n"
        "topic = Path(sys.argv[1])\n"
        "owner = open_owner(topic, spec.load(topic, fs.current()), 0)\n"
        "die()",
        tmp_path / "t",
    )
    async with await write_queue(topic="t", storage_path=str(tmp_path), **given) as writer:
        assert (await writer.stats())["buckets"][0]["epoch"] == 0


async def test_openings_that_fail_leave_the_epoch_as_it_is(folder: Path) -> None:
    async with PersistingBackend(0, str(folder)) as backend:
        await backend.put({"n": 1})
    for _ in range(2):
        with pytest.raises(StorageError, match="schema_defaults"):
            PersistingBackend(0, str(folder), schema_defaults={"n": "text"})
    assert await epoch(folder, enable_wal=False) == 0


async def test_loss_is_remembered_if_the_next_opening_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_records(folder)

    def broken(table: Table) -> None:
        raise StorageError("the epoch cannot be stored")

    with monkeypatch.context() as failing:
        failing.setattr("persisting.table.operations.begin_epoch_after_loss", broken)
        with pytest.raises(StorageError, match="the epoch cannot be stored"):
            LanceBackend(0, str(folder))
    assert await epoch(folder) == 1


async def test_programs_that_exit_without_close_leave_the_epoch_as_it_is(folder: Path) -> None:
    for _ in range(3):
        run(OWNER + "backend = open_()\nasyncio.run(put(backend, 2))", folder)
    assert await epoch(folder) == 0
    async with LanceBackend(0, str(folder)) as backend:
        assert backend.total_count() == 6


async def test_put_after_the_flush_at_exit_may_be_lost_and_raises_the_epoch(folder: Path) -> None:
    code = """
backend = open_()
asyncio.run(put(backend, 2))
from persisting.bucket import exit_flush
exit_flush._flush_all()
asyncio.run(put(backend, 2))
die()
"""
    killed(code, folder)
    async with LanceBackend(0, str(folder)) as backend:
        assert (backend.total_count(), (await backend.stats())["epoch"]) == (2, 1)


async def test_flush_at_exit_that_fails_keeps_the_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LanceBackend(0, str(folder))
    await backend.put({"i": 1})

    def broken(*args: Any) -> None:
        raise StorageError("no more")

    with monkeypatch.context() as failing:
        failing.setattr("persisting.bucket.table_writer.TableWriter.append", broken)
        exit_flush._flush_all()
    assert last_note(folder)["unlogged"] is True
    await backend.close()


async def test_close_without_a_last_note_leaves_the_epoch_as_it_is(folder: Path) -> None:
    backend = LanceBackend(0, str(folder))
    await backend.put({"i": 1})
    await backend.flush()
    manifests = folder / "data.lance" / "_versions"
    hidden = manifests.rename(manifests.with_name("hidden"))
    await backend.close()
    assert not last_note(folder).get("clean")
    hidden.rename(manifests)
    assert await epoch(folder) == 0


async def test_planned_read_continues_if_an_owner_without_a_log_is_killed(tmp_path: Path) -> None:
    given: dict[str, Any] = {"topic": "t", "storage_path": str(tmp_path), "backend": "lance"}
    given |= {"bucket_column": "i"}
    async with await write_queue(**given, num_buckets=1) as writer:
        for count in (4, 10):
            await writer.put([{"i": i} for i in range((await writer.count()), count)])
            await writer.tag(f"first-{count}")
    planned = Slice(str(tmp_path / "t"), 0, 0, 10)
    lose_records(tmp_path / "t" / "bucket_0")

    def read() -> list[int]:
        return [row["i"] for batch in scan.read(planned, ["i"]) for row in batch.to_pylist()]

    async with await write_queue(**given) as writer:
        assert (await writer.stats())["buckets"][0]["epoch"] == 1
        await writer.put({"i": 10})
        assert await asyncio.to_thread(read) == list(range(10))
        await writer.restore("first-10")
        assert await asyncio.to_thread(read) == list(range(10))
        await writer.restore("first-4")
        with pytest.raises(StorageError, match="since the read was planned"):
            await asyncio.to_thread(read)
