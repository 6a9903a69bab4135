"""A process that owns all buckets of a topic in an object store, and notes what it acknowledged.

    python -m torture.store_owner PORT PREFIX NOTES NAME [SETTING…]

It is stubborn: a lost lease does not stop it, so that only slots, terms and fences stand between it
and harm. One put is enough for another slot, so that several are under way at the same time. It
continues as long as it can; with ``close`` it stops after a while and closes. With ``lazy`` it
flushes only when it has been refused. With ``clean`` it removes all old versions after every flush;
otherwise it compacts and cleans from time to time. ``mutation=NAME`` leaves out one part of the
protocol, to show that the checks would notice.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from support.object_stores import storage_options, url

from persisting.backends.log_puts import put_to_log
from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.bucket import lanes
from persisting.bucket.lanes import Lane, Lanes
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.bucket.store_ownership import Ownership
from persisting.errors import BucketLocked, OwnershipLost, StorageError, WALError
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.table import versions
from persisting.table.fenced_commit import FencedCommitter
from persisting.wal import sealing
from persisting.wal.object_log import ObjectLog
from persisting.wal.slots import slot_key

BUCKETS = 3
LEASE = 0.8
PRODUCERS = 6
CLOSE_AFTER = 0.3
OPTIONS: dict[str, Any] = {"enable_wal": True, "lease": LEASE, "keep_versions": 3.0}
BUSY: dict[str, Any] = {"flush_threshold": 60, "flush_interval": 0.2}
LAZY: dict[str, Any] = {"flush_threshold": 1_000_000, "flush_interval": None}


def be_stubborn() -> None:
    """Append on, whatever the lease says."""

    def refuse(self: ObjectLog) -> None:
        if self._failure is not None:
            raise StorageError(self._failure)

    ObjectLog._refuse_after_failure = refuse  # type: ignore[method-assign]


def without_fence() -> None:
    """Own a table without a fence."""

    def commit_fence(self: FencedCommitter) -> bool:
        return True

    FencedCommitter._commit_fence = commit_fence  # type: ignore[method-assign]


def with_claims_deleted() -> None:
    """Delete the claim with the group commits before it, and continue putting without a lease."""

    def remove(store: ObjectStore, sealed: sealing.SealedLog) -> None:
        slots = range(sealed.slots.start, sealed.slots.stop + 1)
        store.delete(slot_key(sealed.name, slot) for slot in slots)

    sealing.remove = remove
    ObjectLog.failed = property(lambda self: self._failure)  # type: ignore[assignment]


def with_release_unannounced() -> None:
    """Delete slots that the lease does not name as released."""

    def beat(self: ObjectLog) -> None:
        with self._deleting:
            self._delete(self._released_slot)
            self._lease.renew()

    ObjectLog.beat = beat  # type: ignore[method-assign]


def with_own_log_immediately() -> None:
    """Forget the log of the former owner before its records are in the table."""
    take_from = Ownership._take_from

    def take(self: Ownership, held: Any) -> Any:
        self._held = take_from(self, held)
        left = self.left_log
        self.use_own_log()
        self.left_log = left
        return self._held

    Ownership._take_from = take  # type: ignore[method-assign]


def with_fence_cleaned_up() -> None:
    """Remove old versions, the newest fence among them, without another fence."""

    def remove_versions(self: FencedCommitter, numbers: list[int]) -> None:
        versions.remove(self.view.dataset, numbers)

    FencedCommitter.remove_versions = remove_versions  # type: ignore[method-assign]


def with_acknowledgements_out_of_order() -> None:
    """Acknowledge a group while one before it is still under way."""
    done = Lanes.done

    def done_first(self: Lanes, lane: Lane, settle: Callable[[Lane], None]) -> None:
        with self._changed:
            self._lanes.remove(lane)
            self._lanes.appendleft(lane)
        done(self, lane, settle)

    Lanes.done = done_first  # type: ignore[method-assign]


def with_claim_after_all_slots() -> None:
    """Claim the slot after the last one, although one before it is free."""

    def last(used: Collection[int], first: int) -> int:
        return max(used, default=first - 1) + 1

    sealing.first_free = last


MUTATIONS = {
    "acknowledged out of order": with_acknowledgements_out_of_order,
    "claim after all slots": with_claim_after_all_slots,
    "fence cleaned up": with_fence_cleaned_up,
    "no fence": without_fence,
    "claims deleted": with_claims_deleted,
    "release unannounced": with_release_unannounced,
    "own log immediately": with_own_log_immediately,
}
"""By name, what leaves out one part of the protocol.

The lab's "no second look" is "release unannounced" here. There a claim could fall into a slot that
the owner had released, so the claimant looked at the table again. Here the owner announces in its
lease what it deletes, and whoever takes over swaps the lease first: the claim goes after it.
"""


class Owner:
    """The buckets, their producers, and the notes."""

    def __init__(self, store: ObjectStore, notes: str, name: str, settings: list[str]) -> None:
        self._store, self._name = store, name
        self._closes, self._lazy = "close" in settings, "lazy" in settings
        self._cleans = "clean" in settings
        self._options = OPTIONS | (LAZY if self._lazy else BUSY)
        if self._cleans:
            self._options["keep_versions"] = 0.001
        self._notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._log: StoreOwnerLog | None = None
        self._buckets: list[PersistingBackend] = []
        self._stopping = False

    def note(self, **words: Any) -> None:
        os.write(self._notes, json.dumps({**words, "at": time.time()}).encode() + b"\n")

    def open(self) -> None:
        """Own all buckets, however long that takes; others may want them too."""
        self._log = new_store_owner_log(self._store, BUCKETS, **self._options)
        for number in range(BUCKETS):
            self._buckets.append(self._opened(number))
        self.note(event="owner")

    def _opened(self, number: int) -> PersistingBackend:
        place: Any = self._store.address / f"bucket_{number}"
        while True:
            try:
                return PersistingBackend(number, place, owner_log=self._log, **self._options)
            except (OwnershipLost, WALError) as exc:
                self.note(event="lost", why=str(exc)[:400])
                os._exit(3)
            except (BucketLocked, StorageError) as exc:
                self.note(event="waits", why=str(exc)[:200])
                time.sleep(LEASE / 4)

    async def _produce(self, producer: int) -> None:
        chance = random.Random(f"{self._name}/{producer}")
        who, number = f"{self._name}-{producer}", 0
        while not self._stopping:
            numbers = range(number, number + chance.choice((1, 1, 1, 4)))
            rows: list[dict[str, Any]] = [
                {"id": f"{who}-{n}", "who": who, "n": n, "list": None} for n in numbers
            ]
            if len(rows) > 1:
                for row in rows:
                    row["list"] = f"{who}-{number}"
            number = numbers.stop
            try:
                await self._put(rows, chance)
            except OwnershipLost as exc:
                self.note(event="refused", why=str(exc)[:200])
                return
            except StorageError as exc:
                self.note(event="failed", why=str(exc)[:200])
                await asyncio.sleep(0.05)
            else:
                self.note(event="ack", ids=[row["id"] for row in rows])

    async def _put(self, rows: list[dict[str, Any]], chance: random.Random) -> None:
        if len(rows) == 1:
            return await chance.choice(self._buckets).put(rows[0])
        first, second = sorted(chance.sample(range(BUCKETS), 2))
        half = len(rows) // 2
        await put_to_log(
            [
                (self._buckets[first].bucket, rows[:half]),
                (self._buckets[second].bucket, rows[half:]),
            ]
        )
        return None

    async def _flush_often(self) -> None:
        chance = random.Random(f"{self._name}/flush")
        while not self._stopping:
            await asyncio.sleep(chance.uniform(0.02, 0.3))
            if self._lazy:
                continue
            bucket = chance.choice(self._buckets)
            await self._flush(bucket)
            if self._cleans:
                await self._maintain(lambda bucket=bucket: asyncio.to_thread(_clean, bucket))
            elif chance.random() < 0.2:
                await self._maintain(bucket.compact)

    async def _flush(self, bucket: PersistingBackend) -> None:
        try:
            await bucket.flush()
            self.note(event="flushed")
        except StorageError as exc:
            self.note(event="flush refused", why=str(exc)[:200])

    async def _maintain(self, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            await work()
            self.note(event="maintained")
        except StorageError as exc:
            self.note(event="maintenance refused", why=str(exc)[:200])

    async def run(self) -> None:
        flushing = asyncio.create_task(self._flush_often())
        producers = [asyncio.create_task(self._produce(p)) for p in range(PRODUCERS)]
        if self._closes:
            await asyncio.sleep(CLOSE_AFTER)
            self._stopping = True
        await asyncio.gather(*producers)
        self._stopping = True
        await flushing
        if not self._closes:  # it was refused, but tries to flush
            for bucket in self._buckets:
                await self._flush(bucket)
            self.note(event="ended")
            return
        for bucket in self._buckets:
            await bucket.close()
        assert self._log is not None
        self._log.retire()
        self.note(event="closed")


async def give_columns(store: ObjectStore) -> None:
    """Store a list in each bucket of a new topic, and close it."""
    options = OPTIONS | LAZY
    log = new_store_owner_log(store, BUCKETS, **options)
    for number in range(BUCKETS):
        place: Any = store.address / f"bucket_{number}"
        bucket = PersistingBackend(number, place, owner_log=log, **options)
        who = f"first-{number}"
        await bucket.put_batch(
            [{"id": f"{who}-{n}", "who": who, "n": n, "list": who} for n in range(4)]
        )
        await bucket.close()
    log.retire()


def _clean(bucket: PersistingBackend) -> None:
    maintenance = bucket.bucket.maintenance
    maintenance._clean_at = 0.0
    maintenance._clean()


def main() -> None:
    port, prefix, notes, name, *settings = sys.argv[1:]
    logging.getLogger("persisting").setLevel(logging.CRITICAL)
    faulthandler.register(signal.SIGUSR1)
    be_stubborn()
    lanes._LANE_PUTS = 1  # so that several slots are under way
    for setting in settings:
        if setting.startswith("mutation="):
            MUTATIONS[setting.removeprefix("mutation=")]()
    timeout = "60s" if "patient" in settings else "2s"
    options = StorageOptions(storage_options(int(port), timeout=timeout, connect_timeout="2s"))
    store = open_store(parse(url(prefix)), options, retry_seconds=120.0)
    owner = Owner(store, notes, name, settings)
    try:
        owner.open()
        asyncio.run(owner.run())
    except StorageError as exc:
        owner.note(event="died", why=f"{type(exc).__name__}: {exc}"[:400])
    os._exit(0)  # without waiting for requests that the proxy holds


if __name__ == "__main__":
    main()
