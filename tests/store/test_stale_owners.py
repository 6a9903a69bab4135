"""Owners that continue after a pause, or after a request with an unknown outcome: they must not
take anything from the next owner, nor store anything twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.bucket import flusher
from persisting.bucket.maintenance import Maintenance
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.errors import OwnershipLost, StorageError, TableError
from persisting.store.object_store import ObjectStore, OutcomeUnknown
from persisting.table import operations
from persisting.table.fenced_commit import FencedCommitter
from persisting.table.indexes import IndexSpec
from persisting.table.retention import Limits
from persisting.table.store_table import LoadedAhead
from persisting.wal.object_log import BegunSlot

LEASE = 0.6
OPTIONS: dict[str, Any] = {
    "enable_wal": True,
    "lease": LEASE,
    "flush_interval": None,
    "compaction": False,
}


def opened(store: ObjectStore, log: StoreOwnerLog | None = None, **more: Any) -> PersistingBackend:
    """Own the bucket as another process would, by default with a log of its own."""
    options = {**OPTIONS, **more}
    log = log or new_log(store, **more)
    place: Any = store.address / "bucket_0"
    return PersistingBackend(0, place, owner_log=log, **options)


def new_log(store: ObjectStore, **more: Any) -> StoreOwnerLog:
    return new_store_owner_log(store, 1, **{**OPTIONS, **more})


def clean(bucket: PersistingBackend) -> None:
    """Remove all older versions, as maintenance does when they are old enough."""
    with bucket.bucket.table_writer.exclusive() as table:
        operations.clean(table, 0.0)


async def numbers(bucket: PersistingBackend) -> list[int]:
    return [record["n"] for record in await bucket.get()]


@pytest.fixture(autouse=True)
def without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that failed is repeated only when a test says so."""
    monkeypatch.setattr(flusher, "_RETRY_SECONDS", 3600.0)


@pytest.fixture
async def held_recovery(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HeldRecovery]:
    held = HeldRecovery(monkeypatch)
    yield held
    held.go_on.set()


class HeldRecovery:
    """A new owner waits after its fence, before it replays the log of the former one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        recover = StoreOwnerLog._recover

        def recover_later(log: StoreOwnerLog, *given: Any) -> None:
            self.reached.set()
            assert self.go_on.wait(60)
            recover(log, *given)

        monkeypatch.setattr(StoreOwnerLog, "_recover", recover_later)


async def test_owner_that_lost_the_bucket_while_closing_leaves_its_log(store: ObjectStore) -> None:
    """The next owner has not read it yet, and its lease says that it may be read."""
    log = new_log(store)
    paused = opened(store, log)
    await paused.put({"n": 0})
    await paused.flush()
    log.abandon()  # paused before it has noted that the bucket is free
    other = new_log(store)
    await asyncio.to_thread(other.own, 0)
    await paused.close()
    log.retire()
    other.abandon()  # killed before it has read the log
    third = await asyncio.to_thread(opened, store)
    assert await numbers(third) == [0]
    await third.close()


async def test_paused_owner_that_cleans_up_does_not_pass_the_fence_afterwards(
    store: ObjectStore, held_recovery: HeldRecovery
) -> None:
    log = new_log(store)
    paused = opened(store, log)
    for number in range(2):
        await paused.put({"n": number})
        await paused.flush()
    await paused.put({"n": 2})
    log.abandon()
    taking_over = asyncio.create_task(asyncio.to_thread(opened, store))
    assert await asyncio.to_thread(held_recovery.reached.wait, 60)
    with pytest.raises(OwnershipLost):
        await asyncio.to_thread(clean, paused)
    assert await numbers(paused) == [0, 1, 2]
    with pytest.raises(OwnershipLost):
        await paused.flush()
    held_recovery.go_on.set()
    owner = await taking_over
    assert await numbers(owner) == [0, 1, 2]
    await owner.close()
    await paused.close()


async def test_commit_that_lands_after_the_table_was_loaded_counts(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new owner loads the table before it fences it; a paused owner flushes in between."""
    log, loop = new_log(store), asyncio.get_running_loop()
    paused = opened(store, log)
    await paused.put({"n": 0})
    await paused.flush()
    await paused.put({"n": 1})
    log.abandon()
    result = LoadedAhead.result

    def flush_afterwards(loaded: LoadedAhead) -> Any:
        found = result(loaded)
        assert found is not None
        assert found.view.rows == 1
        flush = asyncio.run_coroutine_threadsafe(paused.flush(), loop)
        assert isinstance(flush.exception(60), OwnershipLost | None)
        return found

    monkeypatch.setattr(LoadedAhead, "result", flush_afterwards)
    owner = await asyncio.to_thread(opened, store)
    assert await numbers(owner) == [0, 1]
    await owner.close()
    await paused.close()


async def test_first_flush_of_a_paused_owner_replaces_nothing(store: ObjectStore) -> None:
    """The first flush gives the table its columns: it replaces the empty table."""
    log = new_log(store)
    paused = opened(store, log)
    await paused.put({"n": 0, "paused": True})
    log.abandon()
    owner = await asyncio.to_thread(opened, store)
    await owner.put({"n": 1, "later": "x"})
    await owner.flush()
    with pytest.raises(OwnershipLost):
        await paused.flush()
    await owner.close()
    third = await asyncio.to_thread(opened, store)
    assert await third.get() == [
        {"n": 0, "paused": True, "later": None},
        {"n": 1, "paused": None, "later": "x"},
    ]
    await third.close()
    await paused.close()


async def test_first_flush_after_the_fence_of_another_owner_is_refused(
    store: ObjectStore, held_recovery: HeldRecovery
) -> None:
    log = new_log(store)
    paused = opened(store, log)
    await paused.put({"n": 0})
    log.abandon()
    taking_over = asyncio.create_task(asyncio.to_thread(opened, store))
    assert await asyncio.to_thread(held_recovery.reached.wait, 60)
    with pytest.raises(OwnershipLost):
        await paused.flush()
    held_recovery.go_on.set()
    owner = await taking_over
    assert await numbers(owner) == [0]
    await owner.close()
    await paused.close()


async def flush_unseen(bucket: PersistingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush in a commit that lands, and of whose outcome the owner hears nothing."""
    commit = FencedCommitter._commit

    def land_unseen(committer: FencedCommitter, transaction: Any) -> None:
        commit(committer, transaction)
        raise OSError("no answer")

    def fail(_: FencedCommitter) -> None:
        raise TableError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(FencedCommitter, "_commit", land_unseen)
        patched.setattr(FencedCommitter, "_fence", fail)
        with pytest.raises(StorageError, match="no answer"):
            await bucket.flush()


async def with_an_unseen_flush(
    store: ObjectStore, log: StoreOwnerLog, monkeypatch: pytest.MonkeyPatch
) -> PersistingBackend:
    """Return a bucket of two fragments that it knows of, and one that it does not."""
    bucket = opened(store, log)
    for number in range(2):
        await bucket.put({"n": number})
        await bucket.flush()
    await bucket.put({"n": 2})
    await flush_unseen(bucket, monkeypatch)
    return bucket


MAINTENANCE: dict[str, Callable[[Maintenance], Any]] = {
    "retention": lambda maintenance: maintenance.retain(Limits(rows=1)),
    "compaction": lambda maintenance: maintenance.compact(),
    "index": lambda maintenance: maintenance.create_index(IndexSpec(column="n", kind="btree")),
}


@pytest.mark.parametrize("work", MAINTENANCE)
async def test_maintenance_after_a_flush_of_unknown_outcome_moves_and_duplicates_nothing(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    log = new_log(store)
    bucket = await with_an_unseen_flush(store, log, monkeypatch)
    await asyncio.to_thread(MAINTENANCE[work], bucket.bucket.maintenance)
    kept = [2] if work == "retention" else [0, 1, 2]
    assert await numbers(bucket) == kept
    await bucket.put({"n": 3})
    log.abandon()
    other = await asyncio.to_thread(opened, store)
    assert await numbers(other) == [*kept, 3]
    await other.close()


async def test_flush_does_not_skip_a_put_of_unknown_outcome(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers may have seen it, so no other record gets its offset."""
    bucket = opened(store)
    await bucket.put({"n": 0})
    reached, go_on = threading.Event(), threading.Event()
    commit, create = FencedCommitter._commit, store.create

    def commit_later(committer: FencedCommitter, transaction: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return commit(committer, transaction)

    def store_without_answer(key: str, data: bytes) -> None:
        create(key, data)
        raise OutcomeUnknown("no answer")

    monkeypatch.setattr(FencedCommitter, "_commit", commit_later)
    flushing = asyncio.create_task(bucket.flush())
    assert await asyncio.to_thread(reached.wait, 60)
    await bucket.put({"n": 1})
    with monkeypatch.context() as patched:
        patched.setattr(store, "create", store_without_answer)
        with pytest.raises(StorageError, match="may be stored"):
            await bucket.put({"n": 2})
    go_on.set()
    with pytest.raises(OwnershipLost):
        await flushing
    again = await asyncio.to_thread(opened, store)
    await again.put({"n": 3})
    assert await numbers(again) == [0, 1, 2, 3]
    await again.close()
    await bucket.close()


async def test_put_while_the_log_starts_over_is_not_released_before_it_is_acknowledged(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = new_log(store)
    bucket = opened(store, log)
    await bucket.put({"n": 0})
    core = bucket.bucket
    assert core.group_commit is not None
    object_log, group_commit = log.log, core.group_commit
    object_log.break_off(StorageError("refused"))
    reset, store_slot, finish = object_log.reset, object_log.store, object_log.finish
    begun, go_on = threading.Event(), threading.Event()
    puts: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    def reset_and_begin() -> None:
        reset()
        loop.call_soon_threadsafe(lambda: puts.append(loop.create_task(bucket.put({"n": 1}))))
        assert begun.wait(60)

    def store_later(slot: BegunSlot) -> None:
        begun.set()
        assert go_on.wait(60)
        store_slot(slot)

    def finish_and_flush(slot: BegunSlot) -> None:
        finish(slot)
        group_commit.release()  # as the flush of another bucket does

    monkeypatch.setattr(object_log, "reset", reset_and_begin)
    monkeypatch.setattr(object_log, "store", store_later)
    monkeypatch.setattr(object_log, "finish", finish_and_flush)
    await bucket.flush()
    go_on.set()
    await asyncio.gather(*puts)
    await asyncio.to_thread(object_log.beat)
    await asyncio.to_thread(object_log.delete_released)
    log.abandon()
    again = await asyncio.to_thread(opened, store)
    assert await numbers(again) == [0, 1]
    await again.close()


async def test_paused_owner_does_not_replace_the_indexes_that_were_requested_since(
    store: ObjectStore,
) -> None:
    log = new_log(store)
    paused = opened(store, log)
    await paused.put({"n": 0, "m": 0})
    await paused.flush()
    await paused.create_index("n", "btree")
    log.abandon()
    second = new_log(store)
    owner = await asyncio.to_thread(opened, store, second)
    await owner.create_index("m", "btree")
    with pytest.raises(OwnershipLost):
        await paused.drop_index("n")
    await owner.close()
    second.retire()
    third = await asyncio.to_thread(opened, store)
    assert {index["column"] for index in await third.indexes()} == {"n", "m"}
    await third.close()
    await paused.close()
