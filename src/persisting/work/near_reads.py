"""Reads of many single records: those of neighbouring offsets at once.

A read of one stored record costs nearly as much as a read of hundreds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from persisting.errors import StorageError
from persisting.topic.bucket_client import BucketClient

_GAP = 16
"""Offsets between two records that are read with them and not used."""

_MOST_ROWS = 1024


async def read_near(client: BucketClient, offsets: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the records of some offsets of a bucket.

    Those that cannot be read together with their neighbours are left out: the caller reads each of
    them by itself, which shows whether it is damaged or removed.
    """
    wanted = sorted(set(offsets))
    found: dict[int, dict[str, Any]] = {}
    for first, end in _runs(wanted):
        try:
            following = first
            while following < end:
                page = await client.read(following, end - following)
                if not page.rows:
                    break
                found.update(enumerate(page.rows, page.first))
                following = page.first + len(page.rows)
        except StorageError:
            continue
    return {offset: found[offset] for offset in wanted if offset in found}


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
