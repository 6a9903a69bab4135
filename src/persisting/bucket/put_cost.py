"""Estimate the work of a put: small puts are converted on the event loop, others in a thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from persisting.bucket.chunk import ROWS_AT_ONCE
from persisting.errors import SchemaError

LIGHT_RECORDS = 128
_SAMPLES = 16
_MAX_DEPTH = 40
_MANY_FIELDS = 200
"""With more fields, checking a new set of names costs more than converting the values."""

_BYTES_OF_WEIGHT = 16

LIGHT_WEIGHT = 16_384
"""Characters, bytes and items that convert in about a millisecond."""


def check_records(records: Any) -> list[Any]:
    """Return the records of a batch as a new list, or raise :class:`SchemaError`."""
    if isinstance(records, (dict, str, bytes)) or not isinstance(records, Iterable):
        raise SchemaError(
            f"put_batch takes a list of records, got a {type(records).__name__}; "
            "a single record goes to put"
        )
    return list(records)


def is_light(records: list[Any]) -> bool:
    """Whether checking and converting the records takes a millisecond at most."""
    if len(records) > ROWS_AT_ONCE:
        return False
    left, step = LIGHT_WEIGHT, 1
    if len(records) > LIGHT_RECORDS:
        # Estimate many records by a sample.
        step = len(records) // _SAMPLES
        left = LIGHT_WEIGHT // step
    for record in records[::step]:
        if isinstance(record, dict):
            if len(record) > _MANY_FIELDS:
                return False
            for value in record.values():
                kind = type(value)
                if kind is str:
                    left -= 1 + len(value) // 16
                elif kind is int or kind is float:
                    left -= 1
                else:
                    left -= _weight(value, left)
                if left <= 0:
                    return False
    return True


def about_bytes(record: Any, most: int) -> int:
    """Return about how many bytes a record has in memory; not more exactly than above ``most``."""
    return _BYTES_OF_WEIGHT * _weight(record, most // _BYTES_OF_WEIGHT)


def _weight(value: Any, left: int, depth: int = 0) -> int:
    """Return the weight of a value, or any number above ``left`` once it exceeds that."""
    if depth > _MAX_DEPTH:
        return left + 1
    if isinstance(value, (str, bytes, bytearray)):
        return 1 + len(value) // 16
    if isinstance(value, dict):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (int, float)):
            return 1 + len(value)
        items = value
    else:
        return 1 + getattr(value, "size", 0) if not isinstance(value, (int, float)) else 1
    total = 4
    for item in items:
        total += _weight(item, left - total, depth + 1)
        if total > left:
            break
    return total
