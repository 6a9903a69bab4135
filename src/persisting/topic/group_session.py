"""A reader's part in a consumer group: which buckets are its own, and what it has committed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from persisting.concurrency.pool import in_thread
from persisting.errors import StorageError
from persisting.metrics import GroupMetrics
from persisting.topic.bucket_client import Topic
from persisting.topic.bucket_set import all_results
from persisting.topic.cursor import Cursor
from persisting.topic.groups import Membership
from persisting.topic.store_membership import StoreMembership
from persisting.topic.table_calls import MakeDurable, Restores

REBALANCE_SECONDS = 0.3
"""How often a member checks whether other members have joined or left."""

AUTO_COMMIT_SECONDS = 0.5
"""How often a stream with ``auto_commit`` commits what it has delivered."""


class GroupSession:
    """Keeps a reader's cursor on the buckets that the group has assigned to it."""

    def __init__(
        self,
        topic: Topic,
        cursor: Cursor,
        membership: Membership | StoreMembership,
        *,
        auto_commit: bool,
        metrics: GroupMetrics | None,
    ) -> None:
        self._topic, self._cursor, self._membership = topic, cursor, membership
        self._metrics = metrics
        self.auto_commit = auto_commit
        self._generations: dict[int, int] = {}
        """By bucket of the cursor, the generation of its assignment."""
        self._durable: dict[int, tuple[int, int]] = {}
        """By bucket, the epoch and the offset up to which its records survive power loss."""
        self._rebalanced = 0.0
        self._committed = 0.0

    async def before_read(self) -> None:
        """With ``auto_commit``, commit what was read before; then check the assignment."""
        if self.auto_commit and self._generations:
            await self.commit()
        await self.rebalance()

    async def between_pages(self) -> None:
        """Like :meth:`before_read`, but for a stream, which commits only from time to time."""
        if self.auto_commit and time.monotonic() - self._committed > AUTO_COMMIT_SECONDS:
            self._committed = time.monotonic()
            await self.commit()
        await self.rebalance()

    async def commit(self) -> dict[int, int]:
        """Make the cursor durable for the group; return the offsets that were committed.

        The records before it are made durable first: a log may be synced only at intervals, and
        after power loss an offset beyond the end would skip the records that are put next. A bucket
        that was assigned to another member meanwhile is left out.
        """
        offsets = {
            bucket: (self._generations[bucket], offset, self._cursor.epoch(bucket) or 0)
            for bucket, offset in self._cursor.offsets().items()
        }
        await all_results(
            [self._make_durable(b, offset, epoch) for b, (_, offset, epoch) in offsets.items()]
        )
        committed: dict[int, int] = await in_thread(self._membership.commit, offsets)
        if self._metrics is not None:
            for bucket, offset in committed.items():
                stats = await self._topic.bucket(bucket).stats()
                end = stats.get("end_offset", stats.get("total_count", 0))
                self._metrics.lag(bucket, max(0, end - max(offset, stats.get("start_offset", 0))))
        return committed

    async def _make_durable(self, bucket: int, offset: int, epoch: int) -> None:
        known_epoch, durable = self._durable.get(bucket, (epoch, 0))
        if epoch != known_epoch or offset > durable:
            durable = await self._topic.bucket(bucket).call(MakeDurable(offset))
            self._durable[bucket] = epoch, durable

    async def rebalance(self) -> None:
        """Follow members that joined or left: adopt newly assigned buckets, drop lost ones."""
        if time.monotonic() - self._rebalanced >= REBALANCE_SECONDS:
            self._rebalanced = time.monotonic()
            try:
                await in_thread(self._membership.rebalance)
            except StorageError:
                self._rebalanced = 0.0  # the next read retries without waiting
                raise
        assignments = self._membership.held
        generations = {bucket: held.generation for bucket, held in assignments.items()}
        if generations == self._generations:
            return
        fresh = [b for b, number in generations.items() if self._generations.get(b) != number]
        await self._cursor.assign(assignments, fresh)
        self._generations = generations
        if self._metrics is not None:
            self._metrics.keep(assignments)

    async def stats(
        self, buckets: dict[int, dict[str, Any]], lag: Callable[[int, int], int]
    ) -> dict[str, Any]:
        """Return the group's offsets and lag, from the statistics of all its buckets."""
        offsets: dict[int, int] = {}
        for bucket, committed in (await in_thread(self._membership.committed)).items():
            restored_since = committed.epoch != buckets[bucket].get("epoch", committed.epoch)
            ends = await self._topic.bucket(bucket).call(Restores()) if restored_since else []
            offsets[bucket] = committed.now(ends)
        lags = {bucket: lag(bucket, offset) for bucket, offset in offsets.items()}
        return {
            "group": self._membership.group,
            "committed": offsets,
            "group_lag": sum(lags.values()),
            "group_lags": lags,
        }

    async def leave(self, *, commit: bool) -> None:
        """Give all buckets back, after a last commit if ``commit`` is set."""
        if commit:
            await self.commit()
        await in_thread(self._membership.leave)
        if self._metrics is not None:
            self._metrics.remove()
