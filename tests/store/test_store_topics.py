"""Topics in an object store: ownership, what is stored, and what is not supported yet."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.fault_proxy import FaultProxy
from support.object_stores import KEY, SECRET, SeaweedFS, storage_options, url
from support.waiting import until_true

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.backends.table_backend import TableBackend
from persisting.bucket.store_bucket import StoreBucket
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.bucket.store_ownership import Ownership
from persisting.errors import (
    BucketLocked,
    InvalidArgument,
    NoSuchTopic,
    OwnershipLost,
    StorageError,
)
from persisting.local_socket import addresses
from persisting.queue import QueueReader, QueueWriter, read_queue, write_queue
from persisting.store.object_store import ObjectStore, StoreError, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.topic.live_topics import live_in_store
from persisting.wal import lease
from persisting.wal.lease import lease_register

LEASE = 0.6
OPTIONS: dict[str, Any] = {"enable_wal": True, "lease": LEASE, "flush_interval": None}
Opened = tuple[StoreOwnerLog, PersistingBackend]


def opened(store: ObjectStore, bucket: int = 0, num_buckets: int = 1, **more: Any) -> Opened:
    """Own a bucket as another process would, with a log of its own."""
    options = {**OPTIONS, **more}
    log = new_store_owner_log(store, num_buckets, **options)
    place: Any = store.address / f"bucket_{bucket}"
    return log, PersistingBackend(bucket, place, owner_log=log, **options)


def die(log: StoreOwnerLog) -> None:
    """Stop sending heartbeats, as a killed or paused process does."""
    log._lease.stop()


async def flushed(backend: PersistingBackend) -> None:
    """Flush until no request of it takes longer than the client waits."""
    for attempt in range(20):
        try:
            return await backend.flush()
        except StorageError:
            if attempt == 19:
                raise
            await asyncio.sleep(0.2)


def numbers(records: list[dict[str, Any]]) -> list[int]:
    return [record["n"] for record in records]


@pytest.fixture
async def write(server: SeaweedFS, prefix: str) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    made: list[QueueWriter] = []

    async def open_writer(**given: Any) -> QueueWriter:
        arguments = {
            "topic": "t",
            "storage_path": url(prefix),
            "durable": True,
            "num_buckets": 2,
            "storage_options": server.options(),
        }
        made.append(await write_queue(**{**arguments, **given}))
        return made[-1]

    yield open_writer
    for writer in made:
        await writer.close()


async def read(server: SeaweedFS, prefix: str, **given: Any) -> QueueReader:
    arguments = {"topic": "t", "storage_path": url(prefix), "storage_options": server.options()}
    return await read_queue(**{**arguments, **given})


# Ownership


async def test_killed_owner_is_replaced_and_nothing_is_lost(store: ObjectStore) -> None:
    log, first = opened(store)
    for number in range(5):
        await first.put({"n": number})
    await first.flush()
    for number in range(5, 9):
        await first.put({"n": number})
    die(log)
    began = time.monotonic()
    _, second = await asyncio.to_thread(opened, store)
    assert time.monotonic() - began >= LEASE
    assert numbers(await second.get()) == list(range(9))
    await second.put({"n": 9})
    await second.close()


async def test_paused_owner_can_neither_acknowledge_nor_flush(store: ObjectStore) -> None:
    log, first = opened(store)
    await first.put({"n": 0})
    die(log)
    _, second = await asyncio.to_thread(opened, store)
    with pytest.raises(OwnershipLost):
        await first.put({"n": 1})
    with pytest.raises(OwnershipLost):
        await first.flush()
    with pytest.raises(OwnershipLost):
        await first.put({"n": 2})
    await first.close()  # nothing to flush: the new owner has its records
    assert numbers(await second.get()) == [0]
    await second.close()


async def lost_writer(server: SeaweedFS, prefix: str, **given: Any) -> tuple[Any, QueueWriter]:
    """Return a place, and a writer there that has put 0 and then lost its bucket."""
    place: dict[str, Any] = {
        "topic": "t",
        "storage_path": url(prefix),
        "storage_options": server.options(),
        "backend_options": {"lease": LEASE, "flush_interval": None},
    }
    writer = await write_queue(**place, durable=True, num_buckets=1, bucket_column="n", **given)
    await writer.put({"n": 0})
    live = live_in_store(parse(url(prefix)) / "t")
    assert live is not None
    backend: Any = live.open_backend(0)
    backend.bucket.lifecycle.loss = OwnershipLost("another process has taken over")
    return place, writer


async def test_writer_that_lost_its_bucket_can_be_closed_and_opened_again(
    server: SeaweedFS, prefix: str
) -> None:
    place, writer = await lost_writer(server, prefix, local_socket=False)
    with pytest.raises(OwnershipLost):
        await writer.put({"n": 1})
    await writer.close()  # what it has acknowledged is in the log
    async with await write_queue(**place) as again:
        await again.put({"n": 2})
        async with await read_queue(**place) as reader:
            assert numbers(await reader.get(10)) == [0, 2]


async def test_writer_that_shares_a_topic_continues_after_it_lost_its_bucket(
    server: SeaweedFS, prefix: str
) -> None:
    place, writer = await lost_writer(server, prefix)
    for number in range(1, 5):
        await writer.put({"n": number})
    await writer.flush()
    await writer.close()
    async with await read_queue(**place) as reader:
        assert numbers(await reader.get(10)) == [0, 1, 2, 3, 4]


async def test_writer_without_a_socket_continues_after_it_lost_its_bucket(
    server: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(folder: Path | None) -> Any:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(addresses, "listen", listen)
    place, writer = await lost_writer(server, prefix)
    await writer.put({"n": 1})
    await writer.close()
    async with await read_queue(**place) as reader:
        assert numbers(await reader.get(10)) == [0, 1]


async def test_buckets_that_cannot_be_flushed_can_be_closed_after_one_was_lost(
    server: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log, which the lost bucket needs, cannot start over after a failure."""
    place = {
        "topic": "t",
        "storage_path": url(prefix),
        "storage_options": server.options(),
        "backend_options": {"lease": LEASE, "flush_interval": None},
    }
    writer = await write_queue(**place, durable=True, num_buckets=2, local_socket=False)
    await writer.put([{"id": n} for n in range(20)])
    live = live_in_store(parse(url(prefix)) / "t")
    assert live is not None
    lost, other = (cast(TableBackend, live.open_backend(bucket)).bucket for bucket in (0, 1))
    assert isinstance(lost, StoreBucket)
    lost.lifecycle.loss = OwnershipLost("it is unknown whether a change of it was stored")
    await live.close_bucket(0)
    assert other.group_commit is not None
    other.group_commit._log.break_off(StoreError("the store refused the last object"))  # type: ignore[attr-defined]
    await writer.close()
    async with await write_queue(**place) as again:
        await again.put({"id": 20})
        async with await read_queue(**place) as reader:
            assert sorted(record["id"] for record in await reader.get(None)) == list(range(21))


async def test_lease_stays_until_a_bucket_that_could_not_be_opened_is_given_back(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner object names the log; without the lease, no process could open it again."""
    log = new_store_owner_log(store, 1, **OPTIONS)

    def use_own_log(ownership: Ownership) -> None:
        log.retire()  # the topic was closed, or got other options, meanwhile
        raise StoreError("no answer")

    def killed(ownership: Ownership) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ownership, "use_own_log", use_own_log)
        patch.setattr(Ownership, "give_up", killed)
        with pytest.raises(KeyboardInterrupt):
            PersistingBackend(0, store.address / "bucket_0", owner_log=log, **OPTIONS)  # type: ignore[arg-type]
    log.abandon()
    assert lease_register(store, log.name).read() is not None
    other, again = await asyncio.to_thread(opened, store)
    assert await again.get() == []
    await again.close()
    await asyncio.to_thread(other.retire)


async def test_log_keeps_what_a_bucket_that_was_lost_has_not_flushed(store: ObjectStore) -> None:
    """It was closed without a flush, which ends the log for all its buckets."""
    log, first = opened(store, num_buckets=2)
    second = PersistingBackend(
        1,
        store.address / "bucket_1",
        owner_log=log,
        **OPTIONS,  # type: ignore[arg-type]
    )
    await first.put({"n": 0})
    await second.put({"n": 1})
    core: Any = first.bucket
    core.lifecycle.loss = OwnershipLost("it is unknown whether a change of it was stored")
    await first.close()
    with pytest.raises(OwnershipLost, match="closed without a flush"):
        await second.put({"n": 2})
    await second.close()
    await asyncio.to_thread(log.retire)
    for bucket, expected in enumerate(([0], [1])):
        other, again = await asyncio.to_thread(opened, store, bucket, num_buckets=2)
        assert numbers(await again.get()) == expected
        await again.close()
        await asyncio.to_thread(other.retire)


async def test_flush_of_a_paused_owner_is_refused_even_if_it_puts_nothing(
    store: ObjectStore,
) -> None:
    log, first = opened(store)
    await first.put({"n": 0})
    await first.flush()
    await first.put({"n": 1})
    die(log)
    _, second = await asyncio.to_thread(opened, store)
    with pytest.raises(OwnershipLost, match="term"):
        await first.flush()
    assert numbers(await second.get()) == [0, 1]
    await second.close()


async def test_living_owner_keeps_its_bucket(store: ObjectStore, long_lease: float) -> None:
    log, first = opened(store, lease=long_lease)
    with pytest.raises(BucketLocked, match="is alive"):
        await asyncio.to_thread(opened, store)
    await first.put({"n": 0})
    await first.close()
    log.retire()


async def test_owner_whose_deletions_are_refused_keeps_its_bucket(
    faulty: ObjectStore, store: ObjectStore, proxy: FaultProxy
) -> None:
    log, first = opened(faulty)
    await first.put({"n": 0})
    refused = proxy.add("DELETE", answer=503)
    await first.flush()
    assert await asyncio.to_thread(refused.reached.wait, 60)
    with pytest.raises(BucketLocked, match="is alive"):
        await asyncio.to_thread(opened, store)
    proxy.heal()
    await first.close()
    log.retire()


async def test_closed_bucket_is_free_immediately_and_its_log_is_deleted(store: ObjectStore) -> None:
    log, first = opened(store)
    await first.put({"n": 0})
    await first.close()
    log.retire()
    assert store.list("log") == []
    began = time.monotonic()
    log, second = await asyncio.to_thread(opened, store)
    assert second.total_count() == 1
    assert log.store is store
    await second.close()
    log.retire()
    assert time.monotonic() - began < 60


async def test_owner_that_dies_during_recovery_loses_nothing(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, first = opened(store)
    await first.put({"n": 0})
    die(log)

    def fail(self: StoreOwnerLog, *_: Any) -> None:
        die(self)
        raise StorageError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(StoreOwnerLog, "_recover", fail)
        with pytest.raises(StorageError, match="killed"):
            await asyncio.to_thread(opened, store)
    _, third = await asyncio.to_thread(opened, store)
    assert numbers(await third.get()) == [0]
    await third.close()


async def test_flush_whose_commit_fails_stores_its_records_once(
    faulty: ObjectStore, proxy: FaultProxy
) -> None:
    log, backend = opened(faulty)
    await backend.put({"n": 0})
    await flushed(backend)
    await backend.put({"n": 1})
    held = proxy.add("PUT-if-absent", also="/_versions/", hold=1.5, times=1)
    try:
        await backend.flush()
    except StorageError:
        await backend.put({"n": 2})
        await asyncio.sleep(1)
        await flushed(backend)
    assert held.met == 1
    stored = numbers(await backend.get())
    assert stored == list(range(len(stored)))
    assert (await backend.stats())["buffer_count"] == 0
    await backend.close()
    log.retire()


async def test_close_stores_every_put_that_it_acknowledges(store: ObjectStore) -> None:
    log, backend = opened(store, linger_bytes=1)  # a group for each put
    await backend.put({"n": -1})
    puts = [asyncio.ensure_future(backend.put({"n": number})) for number in range(16)]
    await asyncio.sleep(0)
    await backend.close()
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    acknowledged = [number for number, outcome in enumerate(outcomes) if outcome is None]
    log.retire()
    assert acknowledged, outcomes
    log, again = await asyncio.to_thread(opened, store)
    assert numbers(await again.get()) == [-1, *acknowledged]
    await again.close()
    log.retire()


@pytest.mark.parametrize("step", ["recovery", "defaults"])
async def test_bucket_whose_opening_failed_can_be_opened(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    log, first = opened(store)
    await first.put({"n": 0})
    die(log)

    def fail(*_: Any) -> None:
        raise StorageError("not now")

    failed = new_store_owner_log(store, 1, **OPTIONS)
    place: Any = store.address / "bucket_0"
    with monkeypatch.context() as patched:
        if step == "recovery":
            patched.setattr(StoreOwnerLog, "_recover", fail)
        else:
            patched.setattr(StoreBucket, "check_defaults", fail)
        with pytest.raises(StorageError, match="not now"):
            await asyncio.to_thread(PersistingBackend, 0, place, owner_log=failed, **OPTIONS)
    failed.retire()
    log, second = await asyncio.to_thread(opened, store)
    assert numbers(await second.get()) == [0]
    await second.close()
    log.retire()


async def test_records_of_a_put_with_an_unknown_outcome_keep_their_offsets(
    faulty: ObjectStore, store: ObjectStore, proxy: FaultProxy
) -> None:
    """Readers of other processes may have seen them, so no other record gets their offsets."""
    log, backend = opened(faulty)
    await backend.put({"n": 0})
    proxy.add("/slots/", lose=True)  # stored, but the client cannot find out
    with pytest.raises(StorageError, match="may be stored"):
        await backend.put({"n": 1})
    proxy.heal()
    with pytest.raises(StorageError, match="it is unknown whether"):
        await backend.put({"n": 2})
    with suppress(StorageError):
        await backend.close()
    log.retire()
    log, again = await asyncio.to_thread(opened, store)
    await again.put({"n": 3})
    assert numbers(await again.get()) == [0, 1, 3]
    await again.close()
    log.retire()


# What is stored


async def test_credentials_are_not_stored(
    write: Callable[..., Awaitable[QueueWriter]], store: ObjectStore
) -> None:
    writer = await write()
    await writer.put({"id": 1})
    await writer.flush()
    for key in store.list(""):
        found = store.get(key)
        if found is None:  # a slot that a heartbeat has deleted since
            continue
        assert SECRET.encode() not in found.data
        assert KEY.encode() not in found.data
    assert SECRET not in repr(writer)


@pytest.mark.parametrize("given", ["in options", "in the environment"])
async def test_credentials_that_the_server_repeats_are_in_no_error(
    proxy: FaultProxy,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: str,
) -> None:
    options = storage_options(proxy.port)
    if given == "in the environment":
        for name in ("aws_access_key_id", "aws_secret_access_key"):
            monkeypatch.setenv(name.upper(), options.pop(name))
    log, backend = opened(open_store(parse(url(prefix)), StorageOptions(options)))
    await backend.put({"n": 0})
    await backend.flush()
    await backend.put({"n": 1})
    proxy.add("/bucket_0/data.lance/", answer=400, text=f'<?xml version="1.0"?>\n{KEY} {SECRET}')
    proxy.add("/slots/", answer=400, text=f"{KEY} {SECRET}")
    shown = []
    for call in (lambda: backend.put({"n": 2}), backend.flush, backend.get):
        with pytest.raises(StorageError) as caught:
            await call()
        shown += traceback.format_exception(caught.value)
    proxy.heal()
    await backend.flush()
    await backend.close()
    log.retire()
    for secret in (KEY, SECRET):
        assert secret not in "".join(shown) + caplog.text


async def counted_writer(proxy: FaultProxy, prefix: str) -> QueueWriter:
    """Return a writer of a topic whose buckets are open; its requests are counted from here on."""
    writer = await write_queue(
        topic="t",
        storage_path=url(prefix),
        durable=True,
        num_buckets=4,
        backend_options={"lease": 300.0, "flush_interval": None},
        storage_options=storage_options(proxy.port),
    )
    await writer.put([{"id": number} for number in range(100)])
    proxy.reset_counts()
    return writer


async def test_requests_of_puts_are_those_of_the_price_table(
    proxy: FaultProxy, prefix: str
) -> None:
    writer = await counted_writer(proxy, prefix)
    await writer.put([{"id": number} for number in range(100)])
    assert proxy.counts == {"PUT-if-absent": 1}  # one object for four buckets
    await writer.flush()
    await writer.indexes()  # maintenance asks for them once, after the first flush
    proxy.reset_counts()
    await writer.put({"id": 1})
    await writer.flush()
    counts = dict(proxy.counts)
    assert counts.pop("PUT-if-absent") == 2  # the log and a manifest
    assert counts == {"PUT": 2, "LIST": 2}
    await writer.close()
    proxy.reset_counts()
    again = await write_queue(
        topic="t", storage_path=url(prefix), storage_options=storage_options(proxy.port)
    )
    await again.put([{"id": number} for number in range(100)])
    assert requests_of(proxy) == {"GET": 28, "PUT": 17 + 1, "LIST": 16}  # and the put
    await again.flush()
    await again.indexes()
    proxy.reset_counts()
    await again.close()
    assert requests_of(proxy) == {"PUT": 4, "LIST": 1, "DELETE": 2}


def requests_of(proxy: FaultProxy) -> dict[str, int]:
    """Return the requests, with all kinds of PUT as one."""
    counts: Counter[str] = Counter()
    for kind, count in proxy.counts.items():
        counts[kind.partition("-")[0]] += count
    return counts


async def test_puts_that_wait_share_an_object(proxy: FaultProxy, prefix: str) -> None:
    unflushed = {"lease": 300.0, "flush_interval": None}
    writer = await write_queue(
        topic="t",
        storage_path=url(prefix),
        durable=True,
        num_buckets=1,
        backend_options={"linger": 6.0, "linger_bytes": 10_000, **unflushed},
        storage_options=storage_options(proxy.port),
    )
    await writer.put({"id": 0, "text": "x" * 20_000})
    proxy.reset_counts()

    async def put_later(number: int) -> None:
        await asyncio.sleep(number / 100)
        await writer.put({"id": number, "text": "x" * 20_000 if number == 8 else ""})

    # The last one makes the object large enough; otherwise they would wait for their whole time.
    await asyncio.gather(*(put_later(number) for number in range(1, 9)))
    assert proxy.counts == {"PUT-if-absent": 1}
    await writer.close()


async def test_lone_put_goes_out_when_its_linger_ends(proxy: FaultProxy, prefix: str) -> None:
    linger = 0.4
    writer = await write_queue(
        topic="t",
        storage_path=url(prefix),
        durable=True,
        num_buckets=1,
        backend_options={"linger": linger, "lease": 300.0, "flush_interval": None},
        storage_options=storage_options(proxy.port),
    )
    await writer.put({"id": 0})  # opens the bucket
    proxy.reset_counts()
    began = time.monotonic()
    await writer.put({"id": 1})  # nothing else makes its object large enough
    assert time.monotonic() - began >= linger
    assert proxy.counts == {"PUT-if-absent": 1}
    await writer.close()


async def test_owner_makes_one_request_for_each_of_three_beats_per_lease(
    proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[float, Callable[[], None]]] = []
    hand = SimpleNamespace(after=lambda seconds, call: planned.append((seconds, call)))
    monkeypatch.setattr(lease, "timer", hand)
    writer = await counted_writer(proxy, prefix)
    for beats in range(1, 4):
        # One lease for all buckets. Leases of other tests may be sending heartbeats, too.
        (beat,) = [call for seconds, call in planned if seconds == 300.0 / 3]
        planned.clear()
        beat()
        await asyncio.to_thread(until_true, lambda count=beats: proxy.counts.total() >= count)
        assert proxy.counts == {"PUT-if-match": beats}
    await writer.close()


async def test_topic_survives_its_process_and_keeps_its_definition(
    write: Callable[..., Awaitable[QueueWriter]], server: SeaweedFS, prefix: str
) -> None:
    writer = await write(bucket_column="key")
    await writer.put([{"key": number} for number in range(10)])
    await writer.close()
    reader = await read(server, prefix)
    assert sorted(r["key"] for r in await reader.get(None)) == list(range(10))
    await reader.close()
    with pytest.raises(InvalidArgument, match="num_buckets=2"):
        await write(num_buckets=3)
    again = await write(num_buckets=None)
    assert again.bucket_column == "key"


async def test_reader_of_another_process_sees_what_is_acknowledged(
    store: ObjectStore,
    server: SeaweedFS,
    prefix: str,
    write: Callable[..., Awaitable[QueueWriter]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"flush_interval": None, "lease": LEASE}
    writer = await write(backend_options=options)
    monkeypatch.setattr("persisting.topic.open_store.live_in_store", lambda address: None)
    monkeypatch.setattr("persisting.topic.readonly.live_bucket", lambda *place, **how: None)
    seen: list[dict[str, Any]] = []

    async def reaches(count: int) -> None:
        while len(seen) < count:
            seen.extend(await asyncio.wait_for(reader.get(wait=True), 60))
        assert len(seen) == count

    reader = await read(server, prefix)
    await writer.put([{"id": number} for number in range(10)])
    await reaches(10)  # from the log
    await writer.flush()
    await writer.put([{"id": number, "new": "field"} for number in range(10, 20)])
    await reaches(20)  # across a flush and a new field
    await writer.tag("twenty")
    await writer.put([{"id": number} for number in range(20, 30)])
    late = await read(server, prefix)
    found: list[dict[str, Any]] = []
    while len(found) < 30:  # what another reader of this process polled may be 0.1 s old
        found.extend(await asyncio.wait_for(late.get(wait=True), 60))
    assert len(found) == 30
    await late.close()
    await reaches(30)
    await writer.restore("twenty")
    await writer.put([{"id": number} for number in range(30, 40)])
    await reaches(40)  # across a restore
    await writer.close()
    again = await write(num_buckets=None, backend_options=options)
    await again.put([{"id": number} for number in range(40, 50)])
    await reaches(50)  # of the next owner
    assert {record["id"] for record in seen} == set(range(50))
    await reader.close()


async def test_restore_refuses_a_version_that_cleaning_may_be_removing(
    write: Callable[..., Awaitable[QueueWriter]],
) -> None:
    options = {"flush_interval": None, "keep_versions": 3600.0, "compaction": False}
    writer = await write(num_buckets=1, backend_options=options)
    await writer.put({"id": 1})
    await writer.tag("one")
    for number in (2, 3):
        await writer.put({"id": number})
        await writer.flush()
    *_, older, _ = [entry["version"] for entry in await writer.versions()]
    await writer.close()
    await asyncio.sleep(1.1)  # stores may note times in seconds
    with pytest.warns(UserWarning, match="keep_versions"):
        writer = await write(num_buckets=None, backend_options={"keep_versions": 0.5})
    with pytest.raises(StorageError, match=rf"version {older} .* may be removed at any time"):
        await writer.restore(older)
    assert (await writer.restore("one"))["removed"] == 2
    assert await writer.count() == 1


# What is not supported yet


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"durable": False}, "needs durable=True"),
        ({"durable": False, "backend": "lance"}, "cannot store a topic at"),
        ({"durable": False, "backend": "persisting"}, "every topic has a log"),
        (
            {"backend_options": {"read_only": True}},
            "read_only",
        ),
        ({"storage_path": "s3://"}, "does not name a bucket"),
        ({"topic": "../x"}, "topic"),
    ],
)
async def test_unusable_arguments_are_refused(
    write: Callable[..., Awaitable[QueueWriter]], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await write(**given)


async def test_options_of_stores_are_refused_for_folders(tmp_path: Any) -> None:
    where = {"topic": "t", "storage_path": str(tmp_path), "durable": True}
    with pytest.raises(InvalidArgument, match="storage_options are for topics in an object store"):
        await write_queue(**where, storage_options={})
    for option in ({"linger": 0.1}, {"linger_bytes": 5}, {"lease": 1.0}):
        with pytest.raises(InvalidArgument, match="leave it out"):
            await write_queue(**where, backend_options=option)


async def test_missing_topic_is_named(server: SeaweedFS, prefix: str) -> None:
    with pytest.raises(NoSuchTopic, match="there is no topic 't' at s3://lab/"):
        await read(server, prefix)
