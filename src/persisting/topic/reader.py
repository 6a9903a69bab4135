"""Reading a topic."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persisting.bucket.snapshot import Page
from persisting.errors import InvalidArgument, OffsetOutOfRange
from persisting.metrics import GroupMetrics
from persisting.options import check_timeout, check_window
from persisting.table.versions import utc
from persisting.topic.bucket_client import Topic
from persisting.topic.cursor import Cursor
from persisting.topic.group_session import REBALANCE_SECONDS, GroupSession
from persisting.topic.groups import Membership
from persisting.topic.stats import summed
from persisting.topic.store_membership import StoreMembership
from persisting.topic.stream_merge import EndOfStreams, StreamMerge
from persisting.topic.topic_table import TopicTable
from persisting.topic.topic_versions import TopicVersion

if TYPE_CHECKING:
    from persisting.topic.synchronous import SyncQueue

_MOST_SECONDS = 1e12
"""Timestamps beyond this are certainly wrong."""


class QueueReader(TopicTable):
    """Reads the buckets of a topic, from its own cursor or as a member of a consumer group.

    Order is kept within a bucket; between buckets reads are fair.
    """

    def __init__(
        self,
        topic: Topic,
        buckets: list[int],
        *,
        membership: Membership | StoreMembership | None = None,
        auto_commit: bool = False,
        metrics: GroupMetrics | None = None,
    ) -> None:
        super().__init__(topic, buckets, "reader")
        self._cursor = Cursor(topic, {} if membership else dict.fromkeys(buckets, 0))
        self._group = None
        if membership is not None:
            self._group = GroupSession(
                topic, self._cursor, membership, auto_commit=auto_commit, metrics=metrics
            )
        self._reading = asyncio.Lock()
        self._reads = 0
        self._closing = asyncio.Event()
        self._streams: set[StreamMerge] = set()

    @property
    def buckets(self) -> list[int]:
        """The buckets that this reader reads now."""
        return self._cursor.buckets

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
        """Return up to ``limit`` records (None: all there are) and move the cursor past them.

        The limit counts over all buckets. With ``wait`` it waits until there is at least one
        record, or until ``timeout`` seconds have passed. With ``version`` (a tag's name, a
        datetime, or a version by bucket) it reads that state of the topic, in each bucket from
        ``offset`` on, and does not move the cursor.
        """
        check_window(offset, limit)
        check_timeout(timeout)
        if version is not None:
            return await self._versions.read(version, offset, limit)
        if offset:
            raise InvalidArgument("offset needs version=…; use set_offset() to move the cursor")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            async with self._reading:
                await self._prepare_read()
                records = await self._take(limit)
                if not records and limit != 0 and await self._cursor.step_back():
                    records = await self._take(limit)
            if records or not wait or limit == 0:
                return records
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return []
            await self._wait(left)

    async def get_stream(
        self, offset: int | None = None, limit: int | None = None, block: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream single records from the cursor, which moves with each of them.

        An explicit ``offset`` applies to every bucket and leaves the cursor alone; ``limit`` counts
        over all buckets. With ``block`` it waits for new records. Records are fetched from the
        buckets in pages of the topic's ``batch_size``; on a cluster, pages are bounded by bytes.
        """
        check_window(offset or 0, limit)
        await self._prepare_read()
        cursor = self._cursor
        if offset is not None:
            cursor = await Cursor.starting_at(self._topic, self.buckets, offset)
        left = limit
        tick = REBALANCE_SECONDS if self._group is not None else None
        while left is None or left > 0:
            moves = cursor.moves
            merge = self._merge_streams(cursor, left, block)
            self._streams.add(merge)
            try:
                while left != 0 and moves == cursor.moves:
                    page = await merge.next(tick)
                    if moves != cursor.moves:
                        break
                    if page is not None:
                        bucket, (first, rows, _) = page
                        if not await cursor.accepts(bucket, page.page):
                            break
                        positions = cursor.positions  # no call per record: this is the hot path
                        for number, record in enumerate(rows[:left], 1):
                            positions[bucket] = first + number
                            left = None if left is None else left - 1
                            yield record
                            if moves != cursor.moves:
                                break
                    if moves == cursor.moves and self._group is not None:
                        await self._group.between_pages()
            except EndOfStreams:
                if not block or self._group is None or self._closing.is_set():
                    return
                await asyncio.sleep(REBALANCE_SECONDS)
                await self._group.rebalance()
            finally:
                self._streams.discard(merge)
                await merge.close()

    def _merge_streams(self, cursor: Cursor, limit: int | None, block: bool) -> StreamMerge:
        def pages(bucket: int, offset: int) -> Callable[[], AsyncIterator[Page]]:
            epoch = cursor.epoch(bucket)
            return lambda: self._topic.bucket(bucket).pages(offset, limit, block, epoch)

        return StreamMerge({b: pages(b, offset) for b, offset in cursor.offsets().items()})

    async def get_arrow(
        self,
        offset: int | None = None,
        limit: int | None = None,
        *,
        version: TopicVersion | None = None,
    ) -> pa.Table:
        """Return records of all buckets, one bucket after the other, as one Arrow table.

        Without ``offset`` it reads from the cursor, and moves it to the end of what was read.
        ``version`` is as in :meth:`get`.
        """
        check_window(offset or 0, limit)
        if version is not None:
            return await self._versions.read_arrow(version, offset or 0, limit)
        async with self._reading:
            await self._prepare_read()
            tables: list[pa.Table] = []
            left, reached = limit, self._cursor.offsets()
            for bucket in self.buckets:
                client = self._topic.bucket(bucket)
                page = await client.read_arrow(reached[bucket] if offset is None else offset, left)
                if offset is None and not await self._cursor.accepts(bucket, page):
                    reached[bucket] = self._cursor.offsets()[bucket]
                    page = await client.read_arrow(reached[bucket], left)
                table = page.rows
                reached[bucket] = page.first + table.num_rows
                if table.num_rows or not tables:
                    tables.append(table)
                left = None if left is None else left - table.num_rows
                if left == 0:
                    break
            if offset is None:
                self._cursor.move(reached)
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})

    async def _take(self, limit: int | None) -> list[dict[str, Any]]:
        """Return records from the cursor, which moves once nothing can fail.

        If a stream of this reader has moved the cursor meanwhile, those records belong to the
        stream, so read again.
        """
        while True:
            before = self._cursor.offsets()
            records, reached = await self._gather(before, limit)
            if self._cursor.offsets() == before:
                self._cursor.move(reached)
                return records

    async def _gather(
        self, starts: dict[int, int], limit: int | None
    ) -> tuple[list[dict[str, Any]], dict[int, int]]:
        """Read an equal share from each bucket; what a bucket lacks is left to the others.

        Returns the records, and the offset that each bucket has reached.
        """
        records: list[dict[str, Any]] = []
        reached = dict(starts)
        pending = self._buckets_in_turn()
        while pending and (limit is None or len(records) < limit):
            share = None if limit is None else -(-(limit - len(records)) // len(pending))
            for bucket in list(pending):
                count = share if limit is None else min(share or 0, limit - len(records))
                if count == 0:
                    break
                try:
                    page = await self._topic.bucket(bucket).read(reached[bucket], count)
                except OffsetOutOfRange:
                    if reached[bucket] == starts[bucket]:
                        raise
                    pending.remove(bucket)  # retention came in between: the next call raises
                    continue
                if not await self._cursor.accepts(bucket, page):
                    reached[bucket] = self._cursor.offsets().get(bucket, 0)
                    continue
                if page.rows:
                    reached[bucket] = page.first + len(page.rows)
                records += page.rows
                if count is None or len(page.rows) < count:
                    pending.remove(bucket)
        return records, reached

    def _buckets_in_turn(self) -> list[int]:
        """Return all buckets, beginning with another one at each read."""
        buckets = self.buckets
        first = self._reads % max(1, len(buckets))
        self._reads += 1
        return buckets[first:] + buckets[:first]

    async def _wait(self, timeout: float | None) -> None:
        """Wait until a bucket has more records, the group may have changed, or time is up."""
        if self._group is not None:
            timeout = REBALANCE_SECONDS if timeout is None else min(timeout, REBALANCE_SECONDS)
        tasks = [
            asyncio.create_task(self._topic.bucket(bucket).wait(offset, self._cursor.epoch(bucket)))
            for bucket, offset in self._cursor.offsets().items()
        ]
        tasks.append(asyncio.create_task(_until_set(self._closing)))
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

    async def _prepare_read(self) -> None:
        self._buckets.check_open()
        if self._group is not None:
            await self._group.before_read()

    # The cursor

    async def reset(self) -> None:
        """Move the cursor to the earliest records."""
        async with self._reading:
            await self._prepare_read()
            self._cursor.move(dict.fromkeys(self.buckets, 0))

    async def set_offset(self, offset: int, bucket_id: int | None = None) -> None:
        """Continue at ``offset``, in one bucket or in each.

        An offset beyond the end waits until there are that many records.
        """
        check_window(offset, None)
        async with self._reading:
            await self._prepare_read()
            await self._cursor.set(self._chosen(bucket_id), offset)

    async def seek(self, *, timestamp: float | dt.datetime) -> dict[int, int]:
        """Continue at the first records that arrived at ``timestamp`` or later.

        Returns the new offset of each bucket.
        """
        if isinstance(timestamp, dt.datetime):
            timestamp = utc(timestamp).timestamp()
        elif isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)):
            raise InvalidArgument(
                f"timestamp must be seconds of Unix time or a datetime, got {timestamp!r}"
            )
        if not -_MOST_SECONDS < timestamp < _MOST_SECONDS:
            raise InvalidArgument(f"timestamp must be a point in time, got {timestamp!r}")
        async with self._reading:
            await self._prepare_read()
            return await self._cursor.seek(round(timestamp * 1e6))

    def offsets(self) -> dict[int, int]:
        """Return the cursor: the next offset to read in each bucket."""
        return self._cursor.offsets()

    def _chosen(self, bucket: int | None) -> list[int]:
        if bucket is None:
            return self.buckets
        if bucket not in self.buckets:
            raise InvalidArgument(
                f"bucket {bucket!r} is not read here; this reader has {self.buckets}"
            )
        return [bucket]

    async def commit(self) -> dict[int, int]:
        """Make the cursor durable for the group: after a restart, reading continues there.

        Returns the offsets that were committed. A bucket that was assigned to another member
        meanwhile is left out: that member continues at the last commit.
        """
        self._buckets.check_open()
        if self._group is None:
            raise InvalidArgument("commit needs a group: read_queue(…, group='name')")
        return await self._group.commit()

    # Statistics and closing

    async def stats(self) -> dict[str, Any]:
        """Return counts, the cursor, and the lag: of the cursor, and of the group."""
        self._buckets.check_open()
        numbers = self._buckets.numbers
        bucket_stats = await asyncio.gather(*(self._topic.bucket(b).stats() for b in numbers))
        buckets = dict(zip(numbers, bucket_stats, strict=True))

        def lag(bucket: int, offset: int) -> int:
            stats = buckets[bucket]
            end: int = stats.get("end_offset", stats.get("total_count", 0))
            return max(0, end - max(offset, stats.get("start_offset", 0)))

        offsets = self._cursor.offsets()
        result = {
            "topic": self._topic.name,
            "num_buckets": self._topic.num_buckets,
            **summed(bucket_stats),
            "offsets": offsets,
            "lag": sum(lag(bucket, offset) for bucket, offset in offsets.items()),
            "buckets": list(bucket_stats),
        }
        if self._group is not None:
            result |= await self._group.stats(buckets, lag)
        return result

    def sync(self) -> SyncQueue:
        """Return the same reader for code without an event loop: every method blocks."""
        from persisting.topic.synchronous import SyncQueue

        return SyncQueue(self, self._loop)

    async def close(self) -> None:
        """Leave the group and release the topic; may be called twice.

        With ``auto_commit`` what was read is committed. If an exception leaves an ``async with``
        block, nothing is committed: the records in hand are delivered again.
        """
        await self._close(commit=True)

    async def _close(self, *, commit: bool) -> None:
        if self._buckets.closed:
            return
        self._closing.set()
        for merge in self._streams:
            merge.stop()
        if self._group is not None:
            await self._group.leave(commit=commit and self._group.auto_commit)
        await self._topic.close()
        self._buckets.closed = True

    async def _leave_block(self, *, failed: bool) -> None:
        await self._close(commit=not failed)


async def _until_set(event: asyncio.Event) -> None:
    await event.wait()
