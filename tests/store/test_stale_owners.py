"""Owners that were paused, or do not know what became of a request, and go on: they must not take
anything from the next owner, nor store anything twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.bucket import flusher
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.store.object_store import ObjectStore

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


async def numbers(bucket: PersistingBackend) -> list[int]:
    return [record["n"] for record in await bucket.get()]


@pytest.fixture(autouse=True)
def without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that failed is repeated only when a test says so."""
    monkeypatch.setattr(flusher, "_RETRY_SECONDS", 3600.0)


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
