"""The quick checks that a value of a known Python type still needs before Arrow converts it.

Arrow's converter is lenient (1.5 in an int column becomes 1, a naive time in an aware column is
taken as UTC, unknown dict keys vanish). So a check answers one question: would Arrow store exactly
this value? False sends the record to the slow path; a check never rejects anything itself.
"""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa

from persisting.records.values import (
    AWARE,
    DECIMAL,
    DURATION,
    INT64_MAX,
    INT64_MIN,
    NAIVE,
    TIME,
    UUID,
)

__all__ = ["INT64_MAX", "INT64_MIN", "ShapeChecks", "find", "is_unicode", "storage_field"]

Check = Callable[[Any], bool]
_NONE = type(None)

_PLAIN: dict[pa.DataType, type] = {
    pa.string(): str,
    pa.int64(): int,
    pa.float64(): float,
    pa.bool_(): bool,
    pa.binary(): bytes,
}


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be encoded: no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class ShapeChecks(NamedTuple):
    """Checks by field, and the text, int and bytes fields, of records of one shape."""

    checks: tuple[tuple[str, Check], ...]
    texts: tuple[str, ...]
    ints: tuple[str, ...]
    blobs: tuple[str, ...]


def find(record: dict[str, Any], schema: pa.Schema, vector: pa.DataType) -> ShapeChecks | None:
    """The checks for records of this shape; None: every such record needs the slow path."""
    needed = []
    plain: dict[type, list[str]] = {str: [], int: [], bytes: [], float: [], bool: []}
    for field in schema:
        kind = type(record.get(field.name))
        if kind is _NONE:
            continue
        if _PLAIN.get(field.type) is kind:
            plain[kind].append(field.name)
            continue
        check = _check_for(field.type, kind, vector)
        if check is None:
            return None
        needed.append((field.name, check))
    return ShapeChecks(tuple(needed), tuple(plain[str]), tuple(plain[int]), tuple(plain[bytes]))


def storage_field(field: pa.Field) -> pa.Field:
    """The field with UUIDs as 16 bytes, the only form that Arrow accepts in nested values."""
    return pa.field(field.name, _storage(field.type))


def _storage(dtype: pa.DataType) -> pa.DataType:
    if dtype == UUID:
        return pa.binary(16)
    if pa.types.is_fixed_size_list(dtype):
        return pa.list_(_storage(dtype.value_type), dtype.list_size)
    if pa.types.is_list(dtype):
        return pa.list_(_storage(dtype.value_type))
    if pa.types.is_struct(dtype):
        return pa.struct([storage_field(f) for f in dtype])
    return dtype


def _check_for(dtype: pa.DataType, kind: type, vector: pa.DataType) -> Check | None:
    if kind is list:
        return _check_list(dtype, vector)
    if kind is dict:
        return _check_dict(dtype, vector)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return _check_array(dtype)
    return _SCALAR_CHECKS.get((dtype, kind))


def _check_list(dtype: pa.DataType, vector: pa.DataType) -> Check | None:
    if pa.types.is_fixed_size_list(dtype):
        size = dtype.list_size
        if dtype.value_type not in (pa.float64(), vector):
            return None
        return lambda v: len(v) == size and list(map(type, v)).count(float) == size
    if not pa.types.is_list(dtype):
        return None
    plain = _PLAIN.get(dtype.value_type)
    if plain is not None:
        allowed = {plain, _NONE}
        return lambda v: set(map(type, v)) <= allowed
    item = _check_any(dtype.value_type, vector)
    return None if item is None else lambda v: all(map(item, v))


def _check_dict(dtype: pa.DataType, vector: pa.DataType) -> Check | None:
    if not pa.types.is_struct(dtype):
        return None
    names = tuple(f.name for f in dtype)
    items = [(f.name, _check_any(f.type, vector)) for f in dtype]
    if any(check is None for _, check in items):
        return None
    return lambda v: tuple(v) == names and all(check(v[name]) for name, check in items)  # type: ignore[misc]


def _check_any(dtype: pa.DataType, vector: pa.DataType) -> Check | None:
    """A check that includes the type of the value, for values inside others."""
    plain = _PLAIN.get(dtype)
    if plain is not None:
        return lambda v: v is None or type(v) is plain
    if pa.types.is_null(dtype):
        return lambda v: v is None
    kinds: dict[type, Check] = {k: check for (t, k), check in _SCALAR_CHECKS.items() if t == dtype}
    for kind in (list, dict):
        check = _check_for(dtype, kind, vector)
        if check is not None:
            kinds[kind] = check
    if not kinds:
        return None
    return lambda v: v is None or (type(v) in kinds and kinds[type(v)](v))


def _check_array(dtype: pa.DataType) -> Check | None:
    if not pa.types.is_fixed_size_list(dtype) or not pa.types.is_floating(dtype.value_type):
        return None
    shape, kind = (dtype.list_size,), dtype.value_type.to_pandas_dtype()
    return lambda v: v.shape == shape and v.dtype == kind


def _is_plain_aware(value: dt.datetime) -> bool:
    """Whether Arrow converts the value exactly: it ignores the microseconds of a UTC offset, and
    fails at the ends of the calendar."""
    offset = value.utcoffset()
    return offset is not None and not offset.microseconds and 1 < value.year < 9999


_SCALAR_CHECKS: dict[tuple[pa.DataType, type], Check] = {
    (NAIVE, dt.datetime): lambda v: v.tzinfo is None,
    (AWARE, dt.datetime): _is_plain_aware,
    (pa.date32(), dt.date): lambda v: True,
    (TIME, dt.time): lambda v: v.tzinfo is None,
    (DURATION, dt.timedelta): lambda v: True,
    (DECIMAL, decimal.Decimal): lambda v: True,
    (UUID, uuid.UUID): lambda v: True,
}
