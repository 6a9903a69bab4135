"""When and in which order records are delivered, as far as their fields decide it."""

from __future__ import annotations

import datetime as dt
import hashlib
import time
from typing import Any

from persisting.work.group_values import Settings

_MOST_PRIORITY = (1 << 31) - 1


def order_of(
    record: dict[str, Any], settings: Settings, offset: int, now: int
) -> tuple[int, int, int]:
    """Return the time from which a record may be delivered, the hash of its key, and its priority.

    A field that is missing, or of another type, counts as not given.
    """
    due = now
    if settings.visible_at is not None:
        due = max(now, now + _until(record.get(settings.visible_at)))
    key = offset
    if settings.ordered_by is not None and record.get(settings.ordered_by) is not None:
        key = _hash(record[settings.ordered_by])
    priority = 0
    if settings.priority is not None:
        value = record.get(settings.priority)
        if isinstance(value, (int, float)) and value == value:
            priority = int(max(-_MOST_PRIORITY, min(_MOST_PRIORITY, value)))
    return due, key, priority


def _hash(value: Any) -> int:
    """Return the hash of a key. Equal numbers have the same one: an int reads back as a float once
    its field holds floats."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = f"{type(value).__name__}:{value!r}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _until(value: Any) -> int:
    """Return the microseconds until a point in time: a datetime, or seconds of Unix time."""
    if isinstance(value, dt.datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=dt.timezone.utc)).timestamp()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return 0
    return round(max(0.0, min(value - time.time(), 1e9)) * 1e6)
