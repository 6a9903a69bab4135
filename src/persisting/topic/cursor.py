"""Where a reader is: the next offset of each bucket, kept right across restores and crashes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from persisting.bucket.group_offsets import Committed
from persisting.bucket.snapshot import Page
from persisting.topic.bucket_client import Topic
from persisting.topic.groups import Assignment
from persisting.topic.table_calls import Restores

log = logging.getLogger("persisting")

_LOSS_CHECK_SECONDS = 1.0


class Cursor:
    """The next offset to read in each bucket, and the epoch of the bucket that it belongs to.

    A restore to an older version raises a bucket's epoch, and so does a crash that may have taken
    records which were in no log: offsets of the epoch before may mean other records. Epochs and
    offsets therefore change together, without an ``await`` in between.
    """

    def __init__(self, topic: Topic, positions: Mapping[int, int]) -> None:
        self._topic = topic
        self.positions = dict(positions)
        """The next offset of each bucket. A stream sets them directly, record by record, until it
        sees another value of ``moves``."""
        self.moves = 0
        """Rises with every jump; a stream that sees another value restarts at the cursor."""
        self._epochs: dict[int, int] = {}
        """Known after a bucket's first page."""
        self._requested: dict[int, int] = {}
        """Offsets set by the user: such an offset beyond the end is not a sign of lost records."""
        self._checked_for_loss = 0.0

    @classmethod
    async def starting_at(cls, topic: Topic, buckets: Iterable[int], offset: int) -> Cursor:
        """Return a cursor of its own at ``offset`` of each bucket, in its present epoch."""
        cursor = cls(topic, dict.fromkeys(buckets, offset))
        cursor._epochs = await cursor._current_epochs(cursor.positions)
        return cursor

    @property
    def buckets(self) -> list[int]:
        return sorted(self.positions)

    def offsets(self) -> dict[int, int]:
        """Return a copy of the positions."""
        return dict(self.positions)

    def epoch(self, bucket: int) -> int | None:
        """Return the epoch of a bucket's offset, None before the first page."""
        return self._epochs.get(bucket)

    def move(self, offsets: Mapping[int, int]) -> None:
        """Jump to these offsets, in the buckets that are still read here."""
        self.positions.update((b, o) for b, o in offsets.items() if b in self.positions)
        self.moves += 1

    async def set(self, buckets: list[int], offset: int) -> None:
        """Jump to an offset that the user has chosen."""
        epochs = await self._current_epochs(buckets)
        self._requested.update(dict.fromkeys(buckets, offset))
        self._epochs.update(epochs)
        self.move(dict.fromkeys(buckets, offset))

    async def seek(self, timestamp: int) -> dict[int, int]:
        """Jump to the first records that arrived at ``timestamp`` (µs) or later; return where."""
        # Epochs first: if a restore comes in between, the next page corrects the offsets.
        epochs = await self._current_epochs(self.buckets)
        offsets = {b: await self._topic.bucket(b).find(timestamp) for b in epochs}
        self._epochs.update(epochs)
        self.move(offsets)
        return offsets

    async def assign(self, assignments: Mapping[int, Assignment], fresh: Iterable[int]) -> None:
        """Read exactly the assigned buckets; the ``fresh`` ones from the group's last commit."""
        epochs = {bucket: assignments[bucket].epoch for bucket in fresh}
        starts = {
            bucket: await self._valid_offset(bucket, assignments[bucket].start, epochs)
            for bucket in list(epochs)
        }
        self._epochs.update(epochs)
        self.positions = {
            bucket: starts[bucket] if bucket in starts else self.positions[bucket]
            for bucket in assignments
        }
        self.moves += 1

    async def accepts(self, bucket: int, page: Page) -> bool:
        """Whether a page is of the cursor's epoch; if not, move back to what the restore left."""
        if self._epochs.setdefault(bucket, page.epoch) == page.epoch:
            return True
        positions = self.positions  # a rebalance meanwhile replaces them
        if bucket in positions:
            positions[bucket] = await self._offset_after_restore(
                bucket, positions[bucket], page.epoch, self._epochs
            )
        self.moves += 1
        return False

    async def step_back(self) -> bool:
        """Move back if a bucket ends before the cursor; whether the cursor has moved.

        Checks at most once a second, since readers call it whenever they find nothing.
        """
        if time.monotonic() - self._checked_for_loss < _LOSS_CHECK_SECONDS:
            return False
        self._checked_for_loss = time.monotonic()
        before, epochs = self.offsets(), dict(self._epochs)
        offsets = {b: await self._valid_offset(b, o, epochs) for b, o in before.items()}
        self._epochs.update(epochs)
        if offsets == before:
            return False
        self.move(offsets)
        return True

    async def _valid_offset(self, bucket: int, offset: int, epochs: dict[int, int]) -> int:
        """Return where to continue a bucket, whose end a restore or a crash may have moved back.

        ``epochs`` is updated; the caller stores it together with the offset.
        """
        stats = await self._topic.bucket(bucket).stats()
        end = int(stats.get("end_offset", stats.get("total_count", 0)))
        epoch = int(stats.get("epoch", 0))
        if epoch != epochs.setdefault(bucket, epoch):
            offset = await self._offset_after_restore(bucket, offset, epoch, epochs)
        if offset <= end or offset == self._requested.get(bucket):
            return offset
        start = min(end, int(stats.get("opened_offset", end)))
        log.warning(
            "topic %r: offset %d of bucket %d is beyond its end %d: records that were read and "
            "not yet durable have been lost. Reading continues at %d",
            self._topic.name,
            offset,
            bucket,
            end,
            start,
        )
        return start

    async def _offset_after_restore(
        self, bucket: int, offset: int, epoch: int, epochs: dict[int, int]
    ) -> int:
        """Return where to continue a bucket whose epoch has changed."""
        ends = await self._topic.bucket(bucket).call(Restores())
        remaining = Committed(offset, epoch=epochs.get(bucket, 0)).now(ends)
        epochs[bucket] = epoch
        if remaining != offset:
            log.warning(
                "topic %r: bucket %d was restored to an older version, or lost records that were "
                "neither logged nor flushed: it ended at offset %d, and reading continues there "
                "instead of at %d",
                self._topic.name,
                bucket,
                remaining,
                offset,
            )
        return remaining

    async def _current_epochs(self, buckets: Iterable[int]) -> dict[int, int]:
        return {
            bucket: int((await self._topic.bucket(bucket).stats()).get("epoch", 0))
            for bucket in buckets
        }
