"""One backend used from several event loops at the same time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import pytest

from persisting.errors import TableError
from persisting.fs import FileSystem
from persisting.queue import PersistingBackend, write_queue

SOON = 60
LOGGED: dict[str, Any] = {"enable_wal": True, "flush_interval": None}


def in_loops(count: int, work: Callable[[int], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run a coroutine in several threads, each with its own event loop; return the results."""
    together = threading.Barrier(count)

    def one(number: int) -> Any:
        together.wait(SOON)
        return asyncio.run(asyncio.wait_for(work(number), SOON))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def opened(folder: Path, **options: Any) -> PersistingBackend:
    return PersistingBackend(bucket_id=0, storage_path=str(folder), **{**LOGGED, **options})


def test_concurrent_closes_all_return_with_the_backend_closed(tmp_path: Path) -> None:
    for number in range(5):
        backend = opened(tmp_path / str(number))
        in_loops(4, lambda n: backend.put({"n": n}))  # noqa: B023
        in_loops(4, lambda _: backend.close())  # noqa: B023
        again = opened(tmp_path / str(number))
        assert again.total_count() == 4
        asyncio.run(again.close())


def test_close_abandoned_by_its_loop_is_finished_by_the_next_close(tmp_path: Path) -> None:
    class Slow(FileSystem):
        def sync_folder(self, path: Path) -> None:
            going.wait(SOON)
            super().sync_folder(path)

    going = threading.Event()
    going.set()
    backend = opened(tmp_path / "b")
    asyncio.run(backend.put({"n": 1}))
    backend.bucket.table.committer.fs = Slow()
    going.clear()

    async def leave() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(backend.close(), 0.05)

    asyncio.run(leave())
    going.set()
    asyncio.run(asyncio.wait_for(backend.close(), SOON))
    again = opened(tmp_path / "b")
    assert again.total_count() == 1
    asyncio.run(again.close())


async def test_cancelled_close_still_completes(tmp_path: Path) -> None:
    backend = opened(tmp_path / "b")
    await backend.put({"n": 1})
    # The lock is held, as during a compaction.
    with backend.bucket.table_writer.lock, pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(backend.close(), 0.05)
    while not backend._finished:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    again = opened(tmp_path / "b")
    assert await again.get() == [{"n": 1}]
    await again.close()


def test_same_producer_sequence_from_several_loops_is_stored_once(tmp_path: Path) -> None:
    backend = opened(tmp_path / "b", wal_sync_interval=0.0)
    for number in range(20):
        in_loops(3, lambda _: backend.put_once([{"n": 1}], "writer", number))  # noqa: B023
    assert backend.total_count() == 20
    asyncio.run(backend.close())


async def test_a_closed_log_is_not_synced_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened(tmp_path / "b", wal_sync_interval=0.1)
    with caplog.at_level(logging.WARNING, "persisting"):
        await backend.put({"n": 1})
        await backend.close()
        await asyncio.sleep(0.2)
    assert caplog.text == ""


async def test_queued_field_survives_the_failure_of_a_later_put(tmp_path: Path) -> None:
    class Held(FileSystem):
        def sync(self, fd: int) -> None:
            reached.set()
            assert go.wait(SOON)
            super().sync(fd)

    reached, go = threading.Event(), threading.Event()
    go.set()
    backend = opened(tmp_path / "b", wal_sync_interval=0.0)
    await backend.put({"a": 1})
    group_commit = backend.bucket.group_commit
    assert group_commit is not None
    group_commit._log._fs = Held()
    await backend.flush()  # the next segment uses the file system that waits
    go.clear()
    reached.clear()
    on_its_way = asyncio.create_task(backend.put({"a": 2, "new": "field"}))
    assert await asyncio.to_thread(reached.wait, SOON)
    group_commit._fail([], RuntimeError("no thread for a later one"))
    go.set()
    await on_its_way
    await backend.put({"a": 3, "new": None})
    await backend.put({"a": 4})
    expected = [(1, None), (2, "field"), (3, None), (4, None)]
    assert [(r["a"], r["new"]) for r in await backend.get()] == expected
    await backend.flush()
    assert [(r["a"], r["new"]) for r in await backend.get()] == expected
    await backend.close()


async def test_unreadable_index_file_raises_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> None:
        raise OSError(5, "Input/output error")

    where: dict[str, Any] = {"topic": "t", "storage_path": str(tmp_path), "num_buckets": 1}
    async with await write_queue(**where, backend="lance") as writer:
        await writer.put({"id": "a", "text": "word"})
        await writer.flush()
        with monkeypatch.context() as patched:
            patched.setattr(lance.LanceDataset, "describe_indices", broken)
            for call in (
                writer.search(text="word", column="text"),
                writer.create_index("id"),
                writer.verify(),
            ):
                with pytest.raises(TableError, match=r"indexes of the table .*Input/output error"):
                    await call
