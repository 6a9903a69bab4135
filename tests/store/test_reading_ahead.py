"""What begins while a bucket is taken over, and in the background afterwards: a failure, a process
that is faster and a fork leave nothing behind, and hide nothing."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.object_stores import SeaweedFS, url
from support.waiting import until_true

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.bucket import store_bucket, store_owner_log
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.bucket.store_ownership import FREE, OwnerRecord, owner_register
from persisting.concurrency.pool import begin_request
from persisting.errors import TableError
from persisting.queue import write_queue
from persisting.store.object_store import ObjectStore, StoredObject, StoreError, open_store
from persisting.store_address import parse
from persisting.table.fenced_commit import FencedCommitter
from persisting.table.store_table import LoadedAhead
from persisting.topic import store_deletion
from persisting.topic.live_topics import live_in_store
from persisting.wal import sealing
from persisting.wal.sealing import SealedLog
from persisting.wal.slots import slot_key

OPTIONS: dict[str, Any] = {
    "enable_wal": True,
    "lease": 0.6,
    "flush_interval": None,
    "compaction": False,
}


def new_log(store: ObjectStore, buckets: int = 2) -> StoreOwnerLog:
    return new_store_owner_log(store, buckets, **OPTIONS)


def opened(store: ObjectStore, log: StoreOwnerLog, bucket: int = 0) -> PersistingBackend:
    place: Any = store.address / f"bucket_{bucket}"
    return PersistingBackend(bucket, place, owner_log=log, **OPTIONS)


async def die_with_records(store: ObjectStore) -> str:
    """Leave a log with a record of each of two buckets, as an owner does that is killed; return
    its name."""
    log = new_log(store)
    buckets = [opened(store, log, bucket) for bucket in range(2)]
    for bucket in buckets:
        await bucket.put({"n": 1})
    log.abandon()
    return log.name


def owner_of(store: ObjectStore, bucket: int) -> str:
    held = owner_register(store, bucket).read()
    assert held is not None
    return held.content.owner


async def records(bucket: PersistingBackend) -> list[Any]:
    return await bucket.get()


class CountedReads:
    """Counts the reads of each group commit."""

    def __init__(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.fails = False
        get = store.get

        def counted(key: str) -> StoredObject | None:
            if "/slots/" in key:
                self.counts[key] += 1
                if self.fails:
                    raise StoreError("refused")
            return get(key)

        monkeypatch.setattr(store, "get", counted)


async def test_log_is_read_once_although_a_bucket_follows_while_it_is_read(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await die_with_records(store)
    begun: list[SealedLog] = []
    waiting, go_on = threading.Event(), threading.Event()
    begin_reading = sealing.begin_reading

    def begin_slowly(store: ObjectStore, sealed: SealedLog) -> Any:
        begun.append(sealed)
        read = begin_reading(store, sealed)

        def wait_for_the_other() -> list[bytes]:
            waiting.set()
            assert go_on.wait(60)
            return read()

        return wait_for_the_other

    monkeypatch.setattr(sealing, "begin_reading", begin_slowly)
    log = new_log(store)
    first = asyncio.create_task(asyncio.to_thread(opened, store, log, 0))
    assert await asyncio.to_thread(waiting.wait, 60)
    second = asyncio.create_task(asyncio.to_thread(opened, store, log, 1))
    await asyncio.to_thread(until_true, lambda: owner_of(store, 1) == log.name)
    go_on.set()
    buckets = [await first, await second]
    assert [await records(bucket) for bucket in buckets] == [[{"n": 1}], [{"n": 1}]]
    assert len(begun) == 1
    assert not log._readings  # its group commits are not kept
    for bucket in buckets:
        await bucket.close()
    await asyncio.to_thread(log.retire)


async def test_each_of_two_logs_is_read_once(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets of two dead owners are taken over at the same time."""
    former = [new_log(store, 4) for _ in range(2)]
    for number in range(4):
        await opened(store, former[number % 2], number).put({"n": number})
    for log in former:
        log.abandon()
    begun: list[SealedLog] = []
    sealed: list[SealedLog] = []
    begin_reading, note_sealed = sealing.begin_reading, StoreOwnerLog._begin_reading

    def begin_late(store: ObjectStore, left: SealedLog) -> Any:
        begun.append(left)
        read = begin_reading(store, left)

        def wait_for_all() -> list[bytes]:
            until_true(lambda: len(sealed) >= 4)
            return read()

        return wait_for_all

    def count(log: StoreOwnerLog, left: SealedLog) -> None:
        note_sealed(log, left)
        sealed.append(left)

    monkeypatch.setattr(sealing, "begin_reading", begin_late)
    monkeypatch.setattr(StoreOwnerLog, "_begin_reading", count)
    log = new_log(store, 4)
    opening = [asyncio.to_thread(opened, store, log, number) for number in range(4)]
    buckets = await asyncio.gather(*opening)
    assert [await records(bucket) for bucket in buckets] == [[{"n": n}] for n in range(4)]
    assert {left.name for left in begun} == {log.name for log in former}
    assert len(begun) == 2
    for bucket in buckets:
        await bucket.close()
    await asyncio.to_thread(log.retire)
    assert not log._indexes  # the logs are removed


async def test_failed_read_of_a_log_does_not_fail_the_next_opening(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first opening fails after it has begun to read the log, and before it needs that."""
    await die_with_records(store)
    log = new_log(store)
    reads = CountedReads(store, monkeypatch)
    begin_reading = sealing.begin_reading

    def begin_and_fail(store: ObjectStore, sealed: SealedLog) -> Any:
        reads.fails = True
        read = begin_reading(store, sealed)
        with pytest.raises(StoreError):
            read()
        reads.fails = False
        return read

    def fail(_: FencedCommitter, newest: object) -> bool:
        raise TableError("refused")

    with monkeypatch.context() as patched:
        patched.setattr(sealing, "begin_reading", begin_and_fail)
        patched.setattr(FencedCommitter, "_fence_version", fail)
        with pytest.raises(TableError):
            await asyncio.to_thread(opened, store, log)
    bucket = await asyncio.to_thread(opened, store, log)
    assert await records(bucket) == [{"n": 1}]
    await bucket.close()
    await asyncio.to_thread(log.retire)


async def test_table_that_could_not_be_loaded_ahead_is_loaded_again(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A former owner that was paused may commit, and remove versions, while it is loaded."""
    await die_with_records(store)
    log = new_log(store)

    def fail(_: LoadedAhead) -> None:
        raise TableError("a version is gone")

    with monkeypatch.context() as patched:
        patched.setattr(LoadedAhead, "result", fail)
        bucket = await asyncio.to_thread(opened, store, log)
    assert await records(bucket) == [{"n": 1}]
    await bucket.close()
    await asyncio.to_thread(log.retire)


@pytest.fixture
def held_removals(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds the removal of logs of former owners until it is set."""
    go_on = threading.Event()
    remove = StoreOwnerLog._remove_if_unused

    def remove_late(self: StoreOwnerLog, left: SealedLog) -> None:
        assert go_on.wait(60)
        remove(self, left)

    monkeypatch.setattr(StoreOwnerLog, "_remove_if_unused", remove_late)
    yield go_on
    go_on.set()


async def test_lost_log_whose_predecessor_is_still_removed_keeps_no_bucket_waiting(
    prefix: str, server: SeaweedFS, store: ObjectStore, held_removals: threading.Event
) -> None:
    place: dict[str, Any] = {"topic": "t", "storage_path": url(prefix), "durable": True}
    place["storage_options"] = server.options()
    place["backend_options"] = {"lease": 0.6}
    topic_store = open_store(parse(f"{url(prefix)}/t"), store.options)
    async with await write_queue(**place, num_buckets=2) as writer:
        await writer.put([{"id": n} for n in range(20)])
        live = live_in_store(topic_store.address)
        assert live is not None
        lost = live._log
        assert isinstance(lost, StoreOwnerLog)
        lost._removing.append(begin_request(lost._remove_if_unused, SealedLog("old", range(1))))
        lost.give_up("another process has taken over")
        await asyncio.wait_for(writer.put([{"id": n} for n in range(20)]), 60)
        assert not held_removals.is_set()
        held_removals.set()


async def test_deletion_takes_no_log_for_damaged_that_it_removes_itself(
    prefix: str,
    server: SeaweedFS,
    store: ObjectStore,
    held_removals: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place: dict[str, Any] = {"topic": "t", "storage_path": url(prefix), "durable": True}
    place |= {"storage_options": server.options(), "backend_options": {"lease": 0.6}}
    async with await write_queue(**place, num_buckets=1) as writer:
        await writer.put({"id": 1})
    topic_store = open_store(parse(f"{url(prefix)}/t"), store.options)
    await die_with_records(topic_store)
    deleting = asyncio.create_task(asyncio.to_thread(store_deletion.delete, topic_store))
    await asyncio.sleep(2)
    assert not deleting.done()
    held_removals.set()
    await asyncio.wait_for(deleting, 60)
    assert "missing" not in caplog.text


def test_reading_of_a_log_ends_at_the_first_failure(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request to a store that does not answer takes 20 s, and the process cannot exit before
    the last one has failed."""
    reads = CountedReads(store, monkeypatch)
    reads.fails = True
    read = sealing.begin_reading(store, SealedLog("log", range(2000)))
    with pytest.raises(StoreError, match="refused"):
        read()
    time.sleep(0.3)
    assert sum(reads.counts.values()) < 100


async def test_log_that_cannot_be_removed_does_not_keep_the_next_one_from_closing(
    store: ObjectStore,
) -> None:
    former = new_log(store)
    await opened(store, former).put({"n": 1})
    former.abandon()
    store.create("bucket_1/owner.json", b"damaged")
    log = new_log(store)
    bucket = await asyncio.to_thread(opened, store, log)
    await bucket.close()
    await asyncio.to_thread(log.retire)
    assert log.log.closed  # otherwise its heartbeats go on
    assert store.get(slot_key(former.name, 0)) is not None


async def test_table_is_loaded_again_if_another_process_was_faster(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was loaded, or could not be loaded, before that process wrote the table does not
    count."""
    first = new_log(store)
    bucket = await asyncio.to_thread(opened, store, first)
    await bucket.put({"n": 1})
    await bucket.close()
    register = owner_register(store, 0)
    load, swap = FencedCommitter.load_newest, type(register).swap
    failed: list[str] = []

    def fail_once(committer: FencedCommitter) -> Any:
        if not failed:
            failed.append("load")
            raise TableError("a version was removed")
        return load(committer)

    def swap_late(register: Any, held: Any, content: Any) -> Any:
        if isinstance(content, OwnerRecord) and content.term == 2:
            # Another process takes the bucket, and gives it back.
            taken = swap(register, held, OwnerRecord(term=2, owner="other"))
            swap(register, taken, OwnerRecord(term=2, owner=""))
        return swap(register, held, content)

    monkeypatch.setattr(FencedCommitter, "load_newest", fail_once)
    monkeypatch.setattr(type(register), "swap", swap_late)
    log = new_log(store)
    again = await asyncio.to_thread(opened, store, log)
    assert failed
    assert await records(again) == [{"n": 1}]
    await again.close()


async def test_version_that_was_loaded_ahead_is_not_kept(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    views: list[weakref.ref[Any]] = []
    load = FencedCommitter.load_newest

    def noted(committer: FencedCommitter) -> Any:
        newest = load(committer)
        if newest is not None:
            views.append(weakref.ref(newest.view))
        return newest

    bucket = await asyncio.to_thread(opened, store, new_log(store))
    await bucket.put({"n": 1})
    await bucket.close()
    monkeypatch.setattr(FencedCommitter, "load_newest", noted)
    log = new_log(store)
    again = await asyncio.to_thread(opened, store, log)
    gc.collect()
    assert views
    assert [view() for view in views] == [None] * len(views)
    await again.close()


async def test_fork_does_not_wait_for_the_threads_of_its_parent(
    store: ObjectStore, held_removals: threading.Event
) -> None:
    await die_with_records(store)
    log = new_log(store)
    bucket = await asyncio.to_thread(opened, store, log)
    child = multiprocessing.get_context("fork").Process(target=log.retire)
    child.start()
    await asyncio.to_thread(child.join, 20)
    ended = not child.is_alive()
    child.kill()
    held_removals.set()
    assert ended
    await bucket.close()
    await asyncio.to_thread(log.retire)


def refuse(*_: object) -> None:
    raise RuntimeError("cannot schedule new futures after interpreter shutdown")


async def test_opening_that_gets_no_thread_gives_the_bucket_back(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the interpreter exits."""
    await die_with_records(store)
    log = new_log(store)
    with monkeypatch.context() as patched:
        patched.setattr(store_bucket, "begin_request", refuse)
        with pytest.raises(RuntimeError, match="shutdown"):
            await asyncio.to_thread(opened, store, log)
        gc.collect()
    assert owner_of(store, 0) == FREE
    bucket = await asyncio.to_thread(opened, store, log)
    assert await records(bucket) == [{"n": 1}]
    await bucket.close()
    await asyncio.to_thread(log.retire)


async def test_bucket_is_open_although_there_is_no_thread_that_removes_the_log(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await die_with_records(store)
    log = new_log(store)
    monkeypatch.setattr(store_owner_log, "begin_request", refuse)
    bucket = await asyncio.to_thread(opened, store, log)
    assert await records(bucket) == [{"n": 1}]
    await bucket.close()
    await asyncio.to_thread(log.retire)
    assert log.log.closed
