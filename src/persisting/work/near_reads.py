"""Reads of many single records: those of neighbouring offsets together.

A read of one stored record costs nearly as much as a read of hundreds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from persisting.bucket.put_cost import about_bytes
from persisting.errors import StorageError
from persisting.topic.bucket_client import BucketClient

_GAP = 16
"""Offsets between two records that are read with them and not used."""

_FIRST_ROWS = 16
"""The first read shows how large the records are."""

_MOST_ROWS = 1024
MOST_BYTES = 16 * 1024 * 1024
"""About the most that one read gets, and that a batch of dead letters holds."""

_SAMPLE_ROWS = 16


async def read_near(client: BucketClient, offsets: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the records of some offsets of a bucket.

    Those that cannot be read together with their neighbours are left out: the caller reads each of
    them by itself, which shows whether it is damaged or removed.
    """
    wanted = set(offsets)
    found: dict[int, dict[str, Any]] = {}
    rows = _FIRST_ROWS
    for first, end in _runs(sorted(wanted)):
        try:
            following = first
            while following < end:
                page = await client.read(following, min(rows, end - following))
                if not page.rows:
                    break
                # Not the others: records may be large, and most of them may be between.
                found.update(row for row in enumerate(page.rows, page.first) if row[0] in wanted)
                following = page.first + len(page.rows)
                rows = rows_within(MOST_BYTES, page.rows)
        except StorageError:
            continue
    return found


def rows_within(most: int, records: Sequence[dict[str, Any]]) -> int:
    """Return how many records have about ``most`` bytes if they are as large as the largest of
    some of these."""
    sample = records[:: -(-len(records) // _SAMPLE_ROWS)]
    largest = max(about_bytes(record, most) for record in sample)
    return min(max(most // largest, 1), _MOST_ROWS)


def _runs(offsets: list[int]) -> Iterator[tuple[int, int]]:
    """Yield first offset and end of runs of offsets that are near to each other."""
    first = end = -1
    for offset in offsets:
        if first >= 0 and offset - end <= _GAP and offset - first < _MOST_ROWS:
            end = offset + 1
            continue
        if first >= 0:
            yield first, end
        first, end = offset, offset + 1
    if first >= 0:
        yield first, end
