"""Reading a topic."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persisting.bucket.group_offsets import Committed
from persisting.bucket.snapshot import Page
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, InvalidArgument, OffsetOutOfRange, StorageError
from persisting.metrics import GroupMetrics
from persisting.options import check_timeout, check_window
from persisting.table.versions import utc
from persisting.topic.bucket_client import Topic
from persisting.topic.groups import Membership
from persisting.topic.stats import summed
from persisting.topic.stream_merge import Ended, Merged
from persisting.topic.topic_table import TopicTable, TopicVersion

if TYPE_CHECKING:
    from typing_extensions import Self

    from persisting.topic.synchronous import SyncQueue

log = logging.getLogger("persisting")

REBALANCE_SECONDS = 0.3
"""How often a member of a group looks whether others came or went."""

_LOOK_SECONDS = 1.0
_FAR = 1e12
"""Seconds: no moment lies beyond them."""

AUTO_COMMIT_SECONDS = 0.5
"""How often a stream with ``auto_commit`` commits what it has passed on."""


class QueueReader(TopicTable):
    """Reads the buckets of a topic, from a cursor of its own or its group's.

    Order is kept within a bucket; between buckets reads are fair.
    """

    def __init__(
        self,
        topic: Topic,
        buckets: list[int],
        *,
        membership: Membership | None = None,
        auto_commit: bool = False,
        metrics: GroupMetrics | None = None,
    ) -> None:
        self._topic, self._all, self._metrics = topic, buckets, metrics
        self._membership, self._auto_commit = membership, auto_commit
        self._cursor: dict[int, int] = {} if membership else dict.fromkeys(buckets, 0)
        self._epochs: dict[int, int] = {}
        self._asked_for: dict[int, int] = {}
        """Offsets that were set by hand: one beyond the end is no sign of a loss."""
        """By bucket, the epoch that the cursor is of; it is learned with the first page."""
        self._generations: dict[int, int] = {}
        self._moves = 0
        self._reading = asyncio.Lock()
        self._turn = 0
        self._rebalanced = 0.0
        self._committed = 0.0
        self._closed = False
        self._ending = asyncio.Event()
        self._streams: set[Merged] = set()
        self._looked = 0.0
        self._loop = asyncio.get_running_loop()

    @property
    def topic(self) -> str:
        return self._topic.name

    @property
    def buckets(self) -> list[int]:
        """The buckets this reader reads now."""
        return sorted(self._cursor)

    # Reading

    async def get(
        self,
        limit: int | None = 100,
        wait: bool = False,
        timeout: float | None = None,
        *,
        offset: int = 0,
        version: TopicVersion | None = None,
    ) -> list[dict[str, Any]]:
        """Up to ``limit`` records in all (None: all there are) from the cursor, which moves on.

        With ``wait`` it waits until there is at least one, or until ``timeout`` seconds are over.
        With ``version``, a tag's name, a datetime, or a version by bucket, it reads that state of
        the topic from ``offset`` on in each bucket, and leaves the cursor alone.
        """
        check_window(offset, limit)
        check_timeout(timeout)
        if version is not None:
            return await self._get_at(version, offset, limit)
        if offset:
            raise InvalidArgument("offset needs version=…; use set_offset() to move the cursor")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            async with self._reading:
                await self._begin()
                found = await self._take(limit)
                if not found and limit != 0 and await self._step_back():
                    found = await self._take(limit)
            if found or not wait or limit == 0:
                return found
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return []
            await self._wait(left)

    async def get_stream(
        self, offset: int | None = None, limit: int | None = None, block: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream single records from the cursor, which moves on with each.

        An explicit ``offset`` counts in every bucket and leaves the cursor alone; ``limit`` is in
        all. With ``block`` it waits for new records.
        """
        check_window(offset or 0, limit)
        await self._begin()
        left = limit
        positions = None if offset is None else dict.fromkeys(self._cursor, offset)
        epochs = self._epochs
        if positions is not None:
            epochs = {bucket: await self._epoch_now(bucket) for bucket in positions}
        tick = REBALANCE_SECONDS if self._membership is not None else None
        while left is None or left > 0:
            moves, at = self._moves, dict(self._cursor) if positions is None else positions
            merged = self._merged(at, left, block, epochs)
            self._streams.add(merged)
            try:
                while left != 0 and moves == self._moves:
                    turn = await merged.next(tick)
                    if moves != self._moves:
                        break
                    if turn is not None and not await self._same_epoch(
                        turn.bucket,
                        turn.page,
                        self._cursor if positions is None else positions,
                        epochs,
                    ):
                        break
                    for number, record in enumerate(turn.page.rows[:left] if turn else (), 1):
                        at[turn.bucket] = turn.page.first + number  # type: ignore[union-attr]
                        if positions is None:
                            self._cursor[turn.bucket] = at[turn.bucket]  # type: ignore[union-attr]
                        left = None if left is None else left - 1
                        yield record
                        if moves != self._moves:
                            break
                    if moves == self._moves:
                        await self._changed()
            except Ended:
                if not block or self._membership is None or self._ending.is_set():
                    return
                await asyncio.sleep(REBALANCE_SECONDS)
                await self._rebalance()
            finally:
                self._streams.discard(merged)
                await merged.close()

    def _merged(
        self, starts: dict[int, int], limit: int | None, block: bool, epochs: dict[int, int]
    ) -> Merged:
        def source(bucket: int, start: int) -> Any:
            epoch = epochs.get(bucket)
            return lambda: self._topic.port(bucket).pages(start, limit, block, epoch)

        return Merged({bucket: source(bucket, start) for bucket, start in starts.items()})

    async def _changed(self) -> bool:
        """Between pages of a group's stream: what was read counts as done, others may have come."""
        if self._membership is None:
            return False
        if self._auto_commit and time.monotonic() - self._committed > AUTO_COMMIT_SECONDS:
            self._committed = time.monotonic()
            await self._commit(self._membership)
        return await self._rebalance()

    async def get_arrow(
        self,
        offset: int | None = None,
        limit: int | None = None,
        *,
        version: TopicVersion | None = None,
    ) -> pa.Table:
        """Records of all buckets as one Arrow table; the buckets come one after the other.

        Without ``offset`` from the cursor, which moves to the end of what was read. ``version`` is
        as in :meth:`get`.
        """
        check_window(offset or 0, limit)
        if version is not None:
            return await self._arrow_at(version, offset or 0, limit)
        async with self._reading:
            await self._begin()
            tables: list[pa.Table] = []
            left, reached = limit, dict(self._cursor)
            for bucket in self.buckets:
                start = reached[bucket] if offset is None else offset
                page = await self._topic.port(bucket).read_arrow(start, left)
                if offset is None and not await self._same_epoch(
                    bucket, page, self._cursor, self._epochs
                ):
                    reached[bucket] = self._cursor[bucket]
                    page = await self._topic.port(bucket).read_arrow(reached[bucket], left)
                table = page.rows
                reached[bucket] = page.first + table.num_rows
                if table.num_rows or not tables:
                    tables.append(table)
                left = None if left is None else left - table.num_rows
                if left == 0:
                    break
            if offset is None:
                self._move(reached)
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})

    async def _take(self, limit: int | None) -> list[dict[str, Any]]:
        """Records from the cursor, which moves at the end, when nothing can go wrong any more.

        If a stream of this reader has moved it meanwhile, what was found is the stream's.
        """
        while True:
            before = dict(self._cursor)
            found, reached = await self._gather(before, limit)
            if self._cursor == before:
                self._move(reached)
                return found

    async def _gather(
        self, starts: dict[int, int], limit: int | None
    ) -> tuple[list[dict[str, Any]], dict[int, int]]:
        """From each bucket its share; what one does not need is left to the others."""
        found: list[dict[str, Any]] = []
        reached = dict(starts)
        buckets = self.buckets
        first = self._turn % max(1, len(buckets))
        self._turn += 1
        hungry = buckets[first:] + buckets[:first]
        while hungry and (limit is None or len(found) < limit):
            share = None if limit is None else -(-(limit - len(found)) // len(hungry))
            for bucket in list(hungry):
                want = share if limit is None else min(share or 0, limit - len(found))
                if want == 0:
                    break
                try:
                    page = await self._topic.port(bucket).read(reached[bucket], want)
                except OffsetOutOfRange:
                    if reached[bucket] == starts[bucket]:
                        raise
                    hungry.remove(bucket)  # retention came in between: the next call is told
                    continue
                if not await self._same_epoch(bucket, page, self._cursor, self._epochs):
                    reached[bucket] = self._cursor.get(bucket, 0)
                    continue
                rows = page.rows
                if rows:
                    reached[bucket] = page.first + len(rows)
                found += rows
                if want is None or len(rows) < want:
                    hungry.remove(bucket)
        return found, reached

    def _move(self, reached: dict[int, int]) -> None:
        """Set the cursor, for the buckets that are still read here; streams begin anew there."""
        self._cursor.update((b, o) for b, o in reached.items() if b in self._cursor)
        self._moves += 1

    async def _wait(self, timeout: float | None) -> None:
        """Return when some bucket has more, the group may have changed, or time is up."""
        if self._membership:
            timeout = REBALANCE_SECONDS if timeout is None else min(timeout, REBALANCE_SECONDS)
        tasks = [
            asyncio.create_task(self._topic.port(bucket).wait(offset, self._epochs.get(bucket, 0)))
            for bucket, offset in self._cursor.items()
        ]
        tasks.append(asyncio.create_task(_until(self._ending)))
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Where to read

    async def reset(self) -> None:
        """Back to the beginning."""
        async with self._reading:
            await self._begin()
            self._move(dict.fromkeys(self._cursor, 0))

    async def set_offset(self, offset: int, bucket_id: int | None = None) -> None:
        """Go on at ``offset``, in one bucket or in each; beyond the end, when there is so much."""
        check_window(offset, None)
        async with self._reading:
            await self._begin()
            chosen = self._chosen(bucket_id)
            epochs = await self._epochs_of(chosen)
            self._asked_for.update(dict.fromkeys(chosen, offset))
            self._epochs.update(epochs)
            self._move(dict.fromkeys(chosen, offset))

    async def seek(self, *, timestamp: float | dt.datetime) -> dict[int, int]:
        """Go to the first records that arrived at ``timestamp`` or later; the offsets."""
        if isinstance(timestamp, dt.datetime):
            timestamp = utc(timestamp).timestamp()
        elif isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)):
            raise InvalidArgument(
                f"timestamp must be seconds of Unix time or a datetime, got {timestamp!r}"
            )
        if not -_FAR < timestamp < _FAR:
            raise InvalidArgument(f"timestamp must be a moment, got {timestamp!r}")
        async with self._reading:
            await self._begin()
            micros = round(timestamp * 1e6)
            epochs = await self._epochs_of(self.buckets)
            found = {b: await self._topic.port(b).find(micros) for b in epochs}
            self._epochs.update(epochs)
            self._move(found)
        return found

    def offsets(self) -> dict[int, int]:
        """The cursor: the next offset to read in each bucket."""
        return dict(self._cursor)

    def _chosen(self, bucket: int | None) -> list[int]:
        if bucket is None:
            return self.buckets
        if bucket not in self._cursor:
            raise InvalidArgument(
                f"bucket {bucket!r} is not read here; this reader has {self.buckets}"
            )
        return [bucket]

    # Groups

    async def commit(self) -> dict[int, int]:
        """Make the cursor the group's, durably: a restart goes on after what was read so far.

        Returns the offsets that were committed. A bucket that has gone to another member is left
        out: that member reads on from the last commit.
        """
        self._check_open()
        if self._membership is None:
            raise InvalidArgument("commit needs a group: read_queue(…, group='name')")
        return await self._commit(self._membership)

    async def _commit(self, membership: Membership) -> dict[int, int]:
        done: dict[int, int] = await in_thread(membership.commit, self._positions())
        if self._metrics is not None:
            for bucket, offset in done.items():
                found = await self._topic.port(bucket).stats()
                end = found.get("end_offset", found.get("total_count", 0))
                self._metrics.lag(bucket, max(0, end - max(offset, found.get("start_offset", 0))))
        return done

    def _positions(self) -> dict[int, tuple[int, int, int]]:
        """The cursor, with the generation in which each bucket is read, and its epoch."""
        return {
            b: (self._generations[b], offset, self._epochs.get(b, 0))
            for b, offset in self._cursor.items()
        }

    async def _begin(self) -> None:
        """Before each read: what was read before counts as done under ``auto_commit``."""
        self._check_open()
        if self._membership is not None:
            if self._auto_commit and self._cursor:
                await self._commit(self._membership)
            await self._rebalance()

    async def _rebalance(self) -> bool:
        """Look for members that came or went; whether this one's buckets changed."""
        if self._membership is None:
            return False
        if time.monotonic() - self._rebalanced >= REBALANCE_SECONDS:
            self._rebalanced = time.monotonic()
            try:
                await in_thread(self._membership.rebalance)
            except StorageError:
                self._rebalanced = 0.0  # the next read tries again, at once
                raise
        held = self._membership.held
        generations = {bucket: one.generation for bucket, one in held.items()}
        if generations == self._generations:
            return False
        fresh = [
            b for b, generation in generations.items() if self._generations.get(b) != generation
        ]
        epochs = {bucket: held[bucket].epoch for bucket in fresh}
        starts = {b: await self._start(b, held[b].start, epochs) for b in fresh}
        self._epochs.update(epochs)
        self._cursor = {b: starts[b] if b in starts else self._cursor[b] for b in held}
        self._generations = generations
        if self._metrics is not None:
            self._metrics.keep(held)
        self._moves += 1
        return True

    async def _step_back(self) -> bool:
        """Whether the cursor lay beyond the end of a bucket, and was set back."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        before, epochs = dict(self._cursor), dict(self._epochs)
        starts = {bucket: await self._start(bucket, o, epochs) for bucket, o in before.items()}
        self._epochs.update(epochs)
        if starts == before:
            return False
        self._move(starts)
        return True

    async def _start(self, bucket: int, offset: int, epochs: dict[int, int]) -> int:
        """Where to read a bucket on; if a crash has set its end back, after what it left.

        ``epochs`` are brought up to date, and are to be kept together with what this returns.
        """
        found = await self._topic.port(bucket).stats()
        end = int(found.get("end_offset", found.get("total_count", 0)))
        epoch = int(found.get("epoch", 0))
        if epoch != epochs.setdefault(bucket, epoch):
            offset = await self._restored(bucket, offset, epoch, epochs)
        if offset <= end or offset == self._asked_for.get(bucket):
            return offset
        start = min(end, int(found.get("opened_offset", end)))
        log.warning(
            "topic %r: offset %d of bucket %d lies beyond its end %d: records that were read and "
            "not yet durable have been lost. Reading goes on at %d",
            self._topic.name,
            offset,
            bucket,
            end,
            start,
        )
        return start

    async def _epoch_now(self, bucket: int) -> int:
        return int((await self._topic.port(bucket).stats()).get("epoch", 0))

    async def _epochs_of(self, buckets: list[int]) -> dict[int, int]:
        """The epochs from before the cursor is looked for, to be kept together with it: if a
        restore comes between, it is set back afterwards."""
        return {bucket: await self._epoch_now(bucket) for bucket in buckets}

    async def _same_epoch(
        self, bucket: int, page: Page, at: dict[int, int], epochs: dict[int, int]
    ) -> bool:
        """Whether a page is of the epoch of a position; if not, that goes back where it must."""
        if epochs.setdefault(bucket, page.epoch) == page.epoch:
            return True
        if bucket in at:
            at[bucket] = await self._restored(bucket, at[bucket], page.epoch, epochs)
        if at is self._cursor:
            self._moves += 1
        return False

    async def _restored(self, bucket: int, offset: int, epoch: int, epochs: dict[int, int]) -> int:
        """Where to read on in a bucket that was restored to an older version."""
        ends = await self._topic.port(bucket).do("restores")
        least = Committed(offset, epoch=epochs.get(bucket, 0)).now(ends)
        epochs[bucket] = epoch
        if least != offset:
            log.warning(
                "topic %r: bucket %d was restored to an older version that ends at offset %d; "
                "reading goes on there instead of at %d",
                self._topic.name,
                bucket,
                least,
                offset,
            )
        return least

    # Facts and the end

    async def stats(self) -> dict[str, Any]:
        """Counts, the cursor, and how far it lies behind, in all and for the group."""
        self._check_open()
        buckets = await asyncio.gather(*(self._topic.port(b).stats() for b in self._all))
        ends = {
            bucket: found.get("end_offset", found.get("total_count", 0))
            for bucket, found in zip(self._all, buckets, strict=True)
        }
        starts = {b: one.get("start_offset", 0) for b, one in zip(self._all, buckets, strict=True)}

        def lag(bucket: int, offset: int) -> int:
            return max(0, ends[bucket] - max(offset, starts[bucket]))

        found = {
            "topic": self._topic.name,
            "num_buckets": self._topic.num_buckets,
            **summed(buckets),
            "offsets": dict(self._cursor),
            "lag": sum(lag(b, o) for b, o in self._cursor.items()),
            "buckets": list(buckets),
        }
        if self._membership is not None:
            known = await in_thread(self._membership.committed)
            committed = {}
            for bucket, one in known.items():
                behind = one.epoch != dict(zip(self._all, buckets, strict=True))[bucket].get(
                    "epoch", one.epoch
                )
                restored = await self._topic.port(bucket).do("restores") if behind else []
                committed[bucket] = one.now(restored)
            lags = {b: lag(b, o) for b, o in committed.items()}
            found |= {
                "group": self._membership.group,
                "committed": committed,
                "group_lag": sum(lags.values()),
                "group_lags": lags,
            }
        return found

    def sync(self) -> SyncQueue:
        """The same reader for code without an event loop: every method blocks."""
        from persisting.topic.synchronous import SyncQueue

        return SyncQueue(self, self._loop)

    async def close(self) -> None:
        """Leave the group and let go of the topic; may be called twice.

        With ``auto_commit`` what was read counts as done. Leaving an ``async with`` by an
        exception commits nothing: the records in hand are delivered again.
        """
        await self._close(commit=self._auto_commit)

    async def _close(self, *, commit: bool) -> None:
        if self._closed:
            return
        self._ending.set()
        for merged in self._streams:
            merged.stop()
        if self._membership is not None:
            if commit:
                await self._commit(self._membership)
            await in_thread(self._membership.leave)
        if self._metrics is not None:
            self._metrics.remove()
        await self._topic.close()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise BucketClosed(f"the reader of topic {self._topic.name!r} is closed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close(commit=self._auto_commit and kind is None)


async def _until(event: asyncio.Event) -> None:
    await event.wait()
