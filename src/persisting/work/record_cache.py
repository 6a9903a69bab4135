"""Records that are read ahead for the members of one process, before their leases are claimed.

A read of one stored record costs nearly as much as a read of hundreds. Members claim new records in
the order of offsets, so the next ones are likely to be claimed soon, by this member or another one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from persisting.errors import OffsetOutOfRange
from persisting.topic.bucket_client import BucketClient
from persisting.topic.table_calls import MakeDurable
from persisting.work.group_values import RecordLease

Rows = list[tuple[int, dict[str, Any]]]
"""Records with their offsets."""

FIRST_ROWS = 16
"""The first read shows how large the records are."""

SMALL_ROWS = 256
"""Pages do not shrink below this. In smaller ones this process might find nothing, because members
of other processes claim many records between its claims."""

MOST_ROWS = 2048
MOST_BYTES = 1024 * 1024
"""About the most that is read ahead per bucket."""

_LEAST_USED = 1 / 2
"""If this process has used less of what was read ahead, the next read gets less."""

_SAMPLE_ROWS = 16
"""Rows of a page that show how large its records are."""


class BucketCache:
    """The records of one bucket that were read ahead; a record is handed out once.

    Records are kept for one epoch: a restore may give an offset another record.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._rows: dict[int, dict[str, Any]] = {}
        self._epoch = 0
        self._size = FIRST_ROWS
        """How many records the next read gets at least."""
        self._most = MOST_ROWS
        """How many records have about as many bytes as may be read ahead."""
        self._read: int | None = None
        """How many the last read got ahead."""

    async def read_new(self, client: BucketClient, leases: Sequence[RecordLease]) -> Rows:
        """Return the records of leases with consecutive offsets, which nobody had before."""
        first, end, epoch = leases[0].offset, leases[-1].offset + 1, leases[0].epoch
        found = self._take(first, end, epoch)
        if len(found) == len(leases):
            return found
        async with self._lock:  # another member may be reading the same records
            found += self._take(first + len(found), end, epoch)
            following = first + len(found)
            if following < end:
                found += await self._read_ahead(client, following, end, leases[0])
        return found

    def _take(self, first: int, end: int, epoch: int) -> Rows:
        """Hand out the records from ``first`` on that are there without a gap."""
        if epoch != self._epoch:
            self._rows.clear()
            self._epoch = epoch
        found: Rows = []
        for offset in range(first, end):
            row = self._rows.pop(offset, None)
            if row is None:
                break
            found.append((offset, row))
        return found

    async def _read_ahead(
        self, client: BucketClient, first: int, end: int, lease: RecordLease
    ) -> Rows:
        """Read records up to ``end``, and further ones that are durable: an offset whose record is
        not may get another record after a power loss."""
        self._adapt()
        # Other processes have claimed what is left below.
        self._rows = {offset: row for offset, row in self._rows.items() if offset >= end}
        following = min(first + self._size, lease.end)
        page, epoch = await _read(client, first, max(end, following) - first, end - first)
        if epoch != lease.epoch:  # as in read_rows()
            return []
        ahead = [item for item in page if item[0] >= end]
        if epoch == self._epoch:
            self._rows.update(item for item in ahead if item[0] < lease.end)
            self._read = len(ahead)
            self._most = max(1, min(MOST_ROWS, MOST_BYTES // _row_bytes(page)))
        return page[: len(page) - len(ahead)]

    def _adapt(self) -> None:
        """Read more next time, unless members of other processes got nearly all of it."""
        if self._read is None:
            return
        wasted = len(self._rows) > (1 - _LEAST_USED) * self._read
        size = self._size // 2 if wasted else 2 * self._size
        self._size = min(max(size, SMALL_ROWS), self._most)


class RecordCache:
    """The records that were read ahead for a group, on one event loop."""

    def __init__(self) -> None:
        self._buckets: dict[int, BucketCache] = {}

    def bucket(self, number: int) -> BucketCache:
        if number not in self._buckets:
            self._buckets[number] = BucketCache()
        return self._buckets[number]


async def read_rows(client: BucketClient, first: int, count: int, epoch: int) -> Rows:
    """Return the records of a range that still exist; none if the bucket has another epoch.

    After a restore an offset holds another record, which is delivered once the keeper knows of the
    restore. Delivered before, it would be delivered again after its acknowledgement.
    """
    rows, epoch_read = await _read(client, first, count, count)
    return rows if epoch_read == epoch else []


async def _read(client: BucketClient, first: int, count: int, needed: int) -> tuple[Rows, int]:
    """Return the records of a range, and the epoch that all of them are from, or -1.

    The first ``needed`` ones are durable. If the client does not show them, it is a little behind,
    as one that follows an object store may be, and is asked again.
    """
    rows, epoch = await _read_shown(client, first, count)
    if len(rows) < needed and getattr(client, "may_be_behind", False):
        await client.call(MakeDurable(first + needed))
        rows, epoch = await _read_shown(client, first, count)
    return rows, epoch


async def _read_shown(client: BucketClient, first: int, count: int) -> tuple[Rows, int]:
    rows: Rows = []
    end = first + count
    epochs = set()
    while first < end:
        try:
            page = await client.read(first, end - first)
        except OffsetOutOfRange:
            first += 1
            continue
        if not page.rows:
            break
        epochs.add(page.epoch)
        rows += [(page.first + place, row) for place, row in enumerate(page.rows)]
        first = page.first + len(page.rows)
    return rows, epochs.pop() if len(epochs) == 1 else -1


def _row_bytes(rows: Rows) -> int:
    """Return about how many bytes a record has: those of its values, not of nested ones."""
    if not rows:
        return 1
    sample = rows[:: -(-len(rows) // _SAMPLE_ROWS)]
    size = sum(sys.getsizeof(value) for _, row in sample for value in row.values())
    return size // len(sample) or 1
