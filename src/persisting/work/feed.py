"""What a group may deliver: the durable end of every bucket, and fields that decide the order."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from persisting.concurrency.loop_bridge import LoopWaiter
from persisting.errors import OffsetOutOfRange, StorageError
from persisting.topic.bucket_client import BucketClient, Topic
from persisting.topic.table_calls import ArrivalOf, MakeDurable, PendingDelays, Restores
from persisting.work.keeper import Keeper
from persisting.work.open_records import NEVER
from persisting.work.record_order import order_of

log = logging.getLogger("persisting")

_PAGE_ROWS = 512
_CHECK_SECONDS = 1.0
_NO_LOG_SECONDS = 0.1
_FULL_SECONDS = 0.02
_ARRIVAL_SECONDS = 2.0


class Feed:
    """Follows the buckets of a topic for a keeper, on one event loop."""

    def __init__(self, keeper: Keeper, topic: Topic, *, has_log: bool) -> None:
        self._keeper, self._topic, self._has_log = keeper, topic, has_log
        self._starts: dict[int, int] = {}
        self.ready = asyncio.Event()
        """Set once every bucket was checked."""
        self._seen: set[int] = set()
        self._shorter: set[int] = set()
        """Buckets that, when last checked, ended before what the group has delivered."""
        self._next_arrival: dict[int, float] = {}
        """By bucket, when the arrival of its oldest record is looked up next."""
        self._loop = asyncio.get_running_loop()
        buckets = range(topic.num_buckets)
        self._wake = {bucket: asyncio.Event() for bucket in buckets}
        """By bucket, set when it is to be checked without waiting for a change."""
        self._round = 0
        """How many times members have asked to check all buckets."""
        self._looked = dict.fromkeys(buckets, -1)
        """By bucket, the round in which its last check began."""
        self._asking: list[tuple[int, list[LoopWaiter]]] = []
        """Rounds that are not over, and the calls that wait for them."""
        keeper.on_look = self._ask

    def _ask(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: the keeper is about to end
            self._loop.call_soon_threadsafe(self._begin_round)

    def _begin_round(self) -> None:
        """Check all buckets for the calls that wait now."""
        calls = self._keeper.take_looks()
        if calls:
            self._round += 1
            self._asking.append((self._round, calls))
            for event in self._wake.values():
                event.set()

    def _end_look(self, number: int, began: int) -> None:
        """Note that a bucket was checked; the check began in round ``began``."""
        self._looked[number] = began
        over = min(self._looked.values())
        while self._asking and self._asking[0][0] <= over:
            self._keeper.end_looks(self._asking.pop(0)[1])

    async def follow(self, number: int) -> None:
        """Offer the records of a bucket as they become durable, forever."""
        client = self._topic.bucket(number)
        reported = False
        while True:
            began, asked = self._round, self._wake[number].is_set()
            self._wake[number].clear()
            try:
                try:
                    if asked and getattr(client, "may_be_behind", False):
                        await client.call(MakeDurable(NEVER))
                    end, epoch, done = await self._look(number, client)
                finally:  # even if it failed: a bucket must not hold back the others
                    self._end_look(number, began)
                reported = False
                self._seen.add(number)
                if len(self._seen) == self._topic.num_buckets:
                    self.ready.set()
                if done:
                    await self._changes(number, client, end, epoch)
            except Exception as exc:  # a bucket that cannot be read must not end the others
                if self._keeper.failure is not None:
                    return
                if not isinstance(exc, StorageError):
                    log.exception("the feed of a work group failed")
                if not reported:
                    log.warning(
                        "work group %r cannot read bucket %d of topic %r: %s",
                        self._keeper.group,
                        number,
                        self._topic.name,
                        exc,
                    )
                reported = True
                await asyncio.sleep(_CHECK_SECONDS)

    async def _look(self, number: int, client: BucketClient) -> tuple[int, int, bool]:
        """Offer what is durable; return the bucket's end and epoch, and whether all was offered."""
        stats = await client.stats()
        start, end = int(stats.get("start_offset", 0)), int(stats["end_offset"])
        epoch = int(stats.get("epoch", 0))
        following, known_epoch = self._keeper.position(number)
        if epoch != known_epoch:
            ends = (await client.call(Restores()))[known_epoch:]
            await self._cut(number, start, min([NEVER, *ends]), epoch)
        # Its owner may have opened it with a log, or without, since this keeper has started.
        if stats.get("wal_enabled", self._has_log):
            durable = min(end, await client.call(MakeDurable(end)))
        else:
            durable = end - int(stats.get("buffer_count", 0))
            if durable > self._keeper.position(number)[0]:
                # In files, the table may have a version that its owner has not synced yet.
                durable = min(durable, await client.call(MakeDurable(durable)))
        if durable < following and epoch == known_epoch:
            await self._cut_shorter(number, start, durable, epoch)
        elif start > self._starts.get(number, 0):
            await self._cut(number, start, NEVER, epoch)
        if durable >= following:
            self._shorter.discard(number)
        self._starts[number] = start
        delays: list[tuple[int, int, int]] = []
        if stats.get("delayed_count"):
            delays = self._delays(await client.call(PendingDelays()))
        self._keeper.set_span(number, start, durable, delays)
        await self._look_up_arrival(number, client)
        done = True
        if self._keeper.state.settings.reads_ahead:
            done = await self._read_ahead(number, client, start, durable, delays)
        return end, epoch, done

    async def _cut_shorter(self, number: int, start: int, end: int, epoch: int) -> None:
        """Forget what was after the end of a bucket that lacks records which were delivered, as
        when its files were replaced.

        That delivers offsets again, so it takes two checks: a bucket whose owner has just died must
        not seem shorter than it is.
        """
        if number in self._shorter:
            self._shorter.discard(number)
            await self._cut(number, start, end, epoch)
        else:
            self._shorter.add(number)

    async def _look_up_arrival(self, number: int, client: BucketClient) -> None:
        """Tell the keeper from time to time when the oldest record of a bucket arrived."""
        if time.monotonic() < self._next_arrival.get(number, 0.0):
            return
        offset = self._keeper.oldest_offset(number)
        if offset is not None:
            self._next_arrival[number] = time.monotonic() + _ARRIVAL_SECONDS
            with suppress(StorageError):  # a damaged record must not hold back the others
                arrival = await client.call(ArrivalOf(offset))
                if arrival:
                    self._keeper.set_arrival(number, offset, arrival)

    def _delays(self, pending: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return first offset, end and time of delayed records, by the keeper's clock."""
        ahead = self._keeper.clock.now() - time.time_ns() // 1000
        return [(first, first + rows, due + ahead) for first, rows, due in pending]

    async def _cut(self, number: int, start: int, end: int, epoch: int) -> None:
        following, known_epoch = self._keeper.position(number)
        if following or known_epoch != epoch:
            await self._keeper.cut(number, start, end, epoch)

    async def _changes(self, number: int, client: BucketClient, end: int, epoch: int) -> None:
        """Wait until there may be something new; retention is noticed only by polling."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._wake[number].wait())]
        if self._has_log:
            waits.append(asyncio.ensure_future(client.wait(end, epoch)))
        seconds = _CHECK_SECONDS if self._has_log else _NO_LOG_SECONDS
        try:
            done, _ = await asyncio.wait(
                waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()
        for wait in done:
            wait.result()

    async def _read_ahead(
        self,
        number: int,
        client: BucketClient,
        start: int,
        end: int,
        delays: list[tuple[int, int, int]],
    ) -> bool:
        """Read ahead up to ``end``; return False if that must be continued after another check."""
        settings = self._keeper.state.settings
        deadline = time.monotonic() + _CHECK_SECONDS
        while True:
            offset = max(self._keeper.position(number)[0], start)
            if offset >= end:
                return True
            if time.monotonic() > deadline:
                return False
            if not self._keeper.may_read_ahead(number):
                await asyncio.sleep(_FULL_SECONDS)
                continue
            try:
                page = await client.read(offset, min(_PAGE_ROWS, end - offset))
            except OffsetOutOfRange:
                return False  # retention came in between; the next check sees the new start
            if not page.rows:
                return True
            now = self._keeper.clock.now()
            fields = [
                order_of(record, settings, page.first + place, now)
                for place, record in enumerate(page.rows)
            ]
            dues, keys, priorities = (list(column) for column in zip(*fields, strict=True))
            for first, last, due in delays:
                for offset in range(max(first, page.first), min(last, page.first + len(dues))):
                    dues[offset - page.first] = max(due, dues[offset - page.first])
            await self._keeper.read_ahead(number, page.first, now, dues, keys, priorities)
