"""The statistics of a topic from those of its buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SUMMED = (
    "total_count",
    "buffer_count",
    "persisted_count",
    "wal_size",
    "flush_count",
    "flush_seconds",
    "fragments",
    "table_bytes",
)
_COMMON = ("compression", "compression_effective", "backend", "wal_enabled", "wal_sync_interval")


def summed(buckets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum the counts; take settings, which all buckets share, from the first."""
    totals: dict[str, Any] = {
        name: sum(bucket.get(name) or 0 for bucket in buckets)
        for name in _SUMMED
        if any(name in bucket for bucket in buckets)
    }
    for name in _COMMON:
        values = [bucket[name] for bucket in buckets if name in bucket]
        if values:
            totals[name] = values[0]
    return totals
