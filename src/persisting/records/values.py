"""One Python value: its canonical form and its Arrow type.

:meth:`Values.describe` derives both from the value alone; :meth:`Values.fit` converts a value to a
given type, if that does not change its meaning. Both return the canonical value (NumPy scalars as
Python numbers, tuples and arrays as lists, subclasses as their base class), which Arrow converts
exactly. A position whose type is not known yet (None, the items of an empty list) has Arrow's
``null`` type.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid
from typing import Any

import numpy as np
import pyarrow as pa

from persisting.errors import SchemaError
from persisting.records import vectors
from persisting.records.evolution import Conflict, is_listy, is_vector, widen
from persisting.records.field_names import check_name

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
EXACT_IN_FLOAT64 = 2**53
MAX_DEPTH = 32
"""Deeper records are refused: Arrow's readers stop at 64 levels, counting lists and fields."""

DECIMAL = pa.decimal128(38, 18)
_LAST_DIGIT = decimal.Decimal(1).scaleb(-18)
_MANY_DIGITS = decimal.Context(prec=60)
NAIVE = pa.timestamp("us")
AWARE = pa.timestamp("us", tz="UTC")
TIME = pa.time64("us")
DURATION = pa.duration("us")
UUID = pa.uuid()

_MAX_DURATION = dt.timedelta(days=INT64_MAX // 86_400_000_000 - 1)
"""Arrow's range is slightly smaller below zero than above it."""
_FLOAT_WIDTHS = {"float64": pa.float64(), "float32": pa.float32(), "float16": pa.float16()}


class Misfit(Exception):
    """A value does not have the ``expected`` type of the field at ``path``."""

    def __init__(self, path: str, expected: pa.DataType, value: Any) -> None:
        super().__init__(path)
        self.path, self.expected, self.value = path, expected, value


class Values:
    """Describes and fits values with the settings of one schema.

    With ``evolving`` dicts may lack fields, which become None. ``vector`` is the item type of
    vectors made from Python floats, which are rounded to it.
    """

    def __init__(self, *, evolving: bool, vector: pa.DataType) -> None:
        self.evolving, self.vector = evolving, vector

    def describe(
        self, value: Any, path: str, *, top: bool = False, depth: int = 0
    ) -> tuple[Any, pa.DataType]:
        """Return the canonical value and its type; a float list at the ``top`` is a vector."""
        if depth > MAX_DEPTH:
            raise SchemaError(
                f"field {path[:80]!r} is nested more than {MAX_DEPTH} levels deep; flatten it"
            )
        if value is None:
            return None, pa.null()
        for kinds, scalar in _SCALARS:
            if isinstance(value, kinds):
                return scalar(value, path)
        if isinstance(value, dict):
            return self._describe_dict(value, path, depth)
        if isinstance(value, (list, tuple)):
            return self._describe_list(list(value), path, top, depth)
        if _is_numpy(value):
            return self._describe_numpy(value, path, top, depth)
        raise SchemaError(
            f"field {path!r} holds a value of type {type(value).__name__}, which cannot be stored; "
            "convert it to a number, text, bytes, time, list or dict"
        )

    def fit(self, value: Any, dtype: pa.DataType, path: str) -> Any:
        """Return ``value`` in canonical form for a field of ``dtype``, or raise :class:`Misfit`."""
        if value is None:
            return None
        if is_vector(dtype):
            item = dtype.value_type.to_pandas_dtype()
            rounding = dtype.value_type == self.vector
            vector = vectors.fitted(value, dtype.list_size, np.dtype(item), rounding=rounding)
            if vector is not None:
                return vector.tolist()
        if _is_numpy(value):
            value, _ = self.describe(value, path)
        if pa.types.is_struct(dtype):
            return self._fit_struct(value, dtype, path)
        if is_listy(dtype):
            return self._fit_list(value, dtype, path)
        if pa.types.is_integer(dtype) and type(value) is int and _in_range(value, dtype):
            return value
        canonical, own = self.describe(value, path)
        if own == dtype:
            return canonical
        if pa.types.is_floating(dtype):
            return _fit_float(canonical, dtype, path)
        if pa.types.is_integer(dtype) and type(canonical) is int and _in_range(canonical, dtype):
            return canonical
        if pa.types.is_fixed_size_binary(dtype) and own == pa.binary():
            if len(canonical) == dtype.byte_width:
                return canonical
        if pa.types.is_decimal(dtype) and type(canonical) is decimal.Decimal:
            if _decimal_fits(canonical, dtype):
                return canonical
        raise Misfit(path, dtype, value)

    def _describe_dict(
        self, value: dict[Any, Any], path: str, depth: int
    ) -> tuple[Any, pa.DataType]:
        canonical, children = {}, []
        for name, item in value.items():
            check_name(name, path)
            canonical[name], own = self.describe(item, f"{path}.{name}", depth=depth + 1)
            children.append(pa.field(name, own))
        return canonical, pa.struct(children)

    def _describe_list(
        self, items: list[Any], path: str, top: bool, depth: int
    ) -> tuple[Any, pa.DataType]:
        if top and set(map(type, items)) & vectors.NUMPY_FLOATS:
            items = [item.item() if isinstance(item, np.floating) else item for item in items]
        if top and _are_floats(items):
            return self._round(items, path), pa.list_(self.vector, len(items))
        plain = _plain_items(items)
        if plain is not None:
            return items, pa.list_(plain)
        described = [
            self.describe(item, f"{path}[{i}]", depth=depth + 1) for i, item in enumerate(items)
        ]
        item_type = _item_type([own for _, own in described], path)
        try:
            items = [self.fit(item, item_type, f"{path}[]") for item, _ in described]
        except Misfit as exc:
            raise SchemaError(
                f"the dicts in field {path!r} have different fields; "
                f"expected {type_name(exc.expected)} in each"
            ) from None
        return items, pa.list_(item_type)

    def _describe_numpy(
        self, value: Any, path: str, top: bool, depth: int
    ) -> tuple[Any, pa.DataType]:
        if value.dtype.names is not None or isinstance(value, np.ma.MaskedArray):
            kind = "masked array" if value.dtype.names is None else "structured value"
            raise SchemaError(
                f"field {path!r} holds a NumPy {kind}, which cannot be stored; convert it to a "
                "list or a dict"
            )
        if isinstance(value, np.ndarray) and value.ndim > 0:
            if value.ndim == 1 and value.dtype.kind == "f" and value.dtype.itemsize <= 8:
                item = pa.from_numpy_dtype(value.dtype.newbyteorder("="))
                size = len(value) if top and len(value) else -1
                return value.tolist(), pa.list_(item, size)
            return self._describe_list(list(value), path, top, depth)
        scalar = value[()] if isinstance(value, np.ndarray) else value
        return self.describe(_python_scalar(scalar, path), path, depth=depth)

    def _fit_struct(self, value: Any, dtype: pa.DataType, path: str) -> Any:
        names = {f.name for f in dtype}
        if not isinstance(value, dict) or not (
            value.keys() <= names if self.evolving else value.keys() == names
        ):
            raise Misfit(path, dtype, value)
        return {f.name: self.fit(value.get(f.name), f.type, f"{path}.{f.name}") for f in dtype}

    def _fit_list(self, value: Any, dtype: pa.DataType, path: str) -> Any:
        if not isinstance(value, (list, tuple)):
            raise Misfit(path, dtype, value)
        item = dtype.value_type
        if pa.types.is_fixed_size_list(dtype):
            if len(value) != dtype.list_size or any(v is None for v in value):
                raise Misfit(path, dtype, value)
            if item == self.vector and _are_floats(value):
                return self._round(value, path)
        return [self.fit(v, item, f"{path}[{i}]") for i, v in enumerate(value)]

    def _round(self, items: Any, path: str) -> list[float]:
        floats = [_fit_float(item, pa.float64(), path) for item in items]
        if self.vector == pa.float64():
            return floats
        name = next(name for name, item in _FLOAT_WIDTHS.items() if item == self.vector)
        rounded: list[float] = pa.array(floats, self.vector).to_pylist()
        for before, after in zip(floats, rounded, strict=True):
            if math.isinf(after) and not math.isinf(before):
                raise SchemaError(
                    f"field {path!r} holds {before!r}, which is beyond the range of {name}; use a "
                    "wider vector_type"
                )
        return rounded


def type_name(dtype: pa.DataType) -> str:
    """A type in the terms of Python."""
    if dtype == UUID:
        return "UUID"
    if pa.types.is_null(dtype):
        return "None"
    if pa.types.is_fixed_size_list(dtype):
        return f"vector of {dtype.list_size} {type_name(dtype.value_type)}s"
    if pa.types.is_list(dtype):
        return f"list of {type_name(dtype.value_type)}"
    if pa.types.is_struct(dtype):
        return "dict with " + (", ".join(f.name for f in dtype) or "no fields")
    if pa.types.is_timestamp(dtype):
        return "datetime with timezone" if dtype.tz else "datetime without timezone"
    return _PLAIN_NAMES.get(dtype, str(dtype))


_PLAIN_NAMES = {
    pa.int64(): "int",
    pa.float64(): "float",
    pa.string(): "str",
    pa.binary(): "bytes",
    pa.date32(): "date",
    TIME: "time",
    DURATION: "timedelta",
    DECIMAL: "Decimal",
}


def vector_item(option: str) -> pa.DataType:
    """The item type of vectors under a ``vector_type`` option."""
    return _FLOAT_WIDTHS[option]


def _bool(value: Any, path: str) -> tuple[Any, pa.DataType]:
    return bool(value), pa.bool_()


def _int(value: Any, path: str) -> tuple[Any, pa.DataType]:
    number = int(value)
    if not INT64_MIN <= number <= INT64_MAX:
        raise SchemaError(
            f"field {path!r} holds an int of {number.bit_length()} bits, outside the signed "
            "64-bit range; store it as text or Decimal"
        )
    return number, pa.int64()


def _float(value: Any, path: str) -> tuple[Any, pa.DataType]:
    return float(value), pa.float64()


def _str(value: Any, path: str) -> tuple[Any, pa.DataType]:
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise SchemaError(
            f"field {path!r} holds text that is not valid unicode (a lone surrogate at position "
            f"{exc.start}); store it as bytes"
        ) from None
    return text, pa.string()


def _bytes(value: Any, path: str) -> tuple[Any, pa.DataType]:
    return bytes(value), pa.binary()


def _datetime(value: dt.datetime, path: str) -> tuple[Any, pa.DataType]:
    if type(value) is not dt.datetime:
        value = _plain_datetime(value, path)
    if value.utcoffset() is None:
        return value.replace(tzinfo=None), NAIVE
    try:
        return value.astimezone(dt.timezone.utc), AWARE
    except OverflowError:
        raise SchemaError(
            f"field {path!r} holds {value!r}, which is outside the years 1 to 9999 in UTC"
        ) from None


def _plain_datetime(value: Any, path: str) -> dt.datetime:
    """Convert an instance of a subclass of datetime, such as pandas' Timestamp."""
    if value != value:
        raise SchemaError(f"field {path!r} holds NaT; store None instead")
    if getattr(value, "nanosecond", 0):
        raise SchemaError(f"field {path!r} holds {value!r}: times are kept in microseconds")
    day, time = dt.date(value.year, value.month, value.day), value.timetz()
    return dt.datetime.combine(
        day, dt.time.fromisoformat(time.replace(tzinfo=None).isoformat()), tzinfo=value.tzinfo
    ).replace(fold=value.fold)


def _date(value: Any, path: str) -> tuple[Any, pa.DataType]:
    return value, pa.date32()


def _time(value: dt.time, path: str) -> tuple[Any, pa.DataType]:
    if value.tzinfo is not None:
        raise SchemaError(
            f"field {path!r} holds a time with a timezone, which has no date to resolve it; "
            "store a datetime, or the time without tzinfo"
        )
    return value, TIME


def _timedelta(value: dt.timedelta, path: str) -> tuple[Any, pa.DataType]:
    if type(value) is not dt.timedelta:
        if getattr(value, "nanoseconds", 0):
            raise SchemaError(f"field {path!r} holds {value!r}: times are kept in microseconds")
        value = dt.timedelta(value.days, value.seconds, value.microseconds)
    if abs(value) > _MAX_DURATION:
        raise SchemaError(f"field {path!r} holds a timedelta beyond ±292,000 years: {value!r}")
    return value, DURATION


def _decimal(value: decimal.Decimal, path: str) -> tuple[Any, pa.DataType]:
    if not _decimal_fits(value, DECIMAL):
        raise SchemaError(
            f"field {path!r} holds {value!r}: a Decimal may have 20 digits before the point and "
            "18 after it; store it as text"
        )
    exponent = value.as_tuple().exponent
    if isinstance(exponent, int) and not -DECIMAL.scale <= exponent <= 0:
        value = value.quantize(_LAST_DIGIT, context=_MANY_DIGITS)  # Arrow refuses extra zeros
    return value, DECIMAL


def _uuid(value: uuid.UUID, path: str) -> tuple[Any, pa.DataType]:
    return value, UUID


_SCALARS: tuple[tuple[Any, Any], ...] = (
    (bool, _bool),
    (int, _int),
    (float, _float),
    (str, _str),
    ((bytes, bytearray, memoryview), _bytes),
    (dt.datetime, _datetime),
    (dt.date, _date),
    (dt.time, _time),
    (dt.timedelta, _timedelta),
    (decimal.Decimal, _decimal),
    (uuid.UUID, _uuid),
)


def _item_type(types: list[pa.DataType], path: str) -> pa.DataType:
    joined: pa.DataType = pa.null()
    for own in dict.fromkeys(types):
        try:
            joined = widen(joined, own, f"{path}[]")
        except Conflict as exc:
            raise SchemaError(
                f"field {exc.path!r} mixes {type_name(exc.old)} and {type_name(exc.new)}; "
                "the items of a list have one type"
            ) from None
    return joined


def _plain_items(items: list[Any]) -> pa.DataType | None:
    """The type of items that need no conversion: all of one plain type, or None; else None."""
    kinds = set(map(type, items)) - {type(None)}
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    if kind not in (int, float, str, bool):
        return None
    values = [item for item in items if item is not None]
    if kind is int and min(values) >= INT64_MIN and max(values) <= INT64_MAX:
        return pa.int64()
    if kind is str:
        try:
            "".join(values).encode()
        except UnicodeEncodeError:
            return None
        return pa.string()
    if kind is float:
        return pa.float64()
    return pa.bool_() if kind is bool else None


def _are_floats(items: Any) -> bool:
    kinds = set(map(type, items))
    return float in kinds and kinds <= {float, int}


def _python_scalar(scalar: Any, path: str) -> Any:
    if isinstance(scalar, (np.datetime64, np.timedelta64)):
        return _numpy_time(scalar, path)
    if isinstance(scalar, np.floating) and scalar.dtype.itemsize > 8:
        raise SchemaError(
            f"field {path!r} holds a value of type {scalar.dtype}; floats have 64 bits at most"
        )
    value = scalar.item()
    if _is_numpy(value) or isinstance(value, complex):
        raise SchemaError(
            f"field {path!r} holds a value of type {scalar.dtype}, which cannot be stored"
        )
    return value


def _numpy_time(value: Any, path: str) -> Any:
    if np.isnat(value):
        raise SchemaError(f"field {path!r} holds NaT; store None instead")
    days = np.datetime_data(value.dtype)[0] in ("D", "W", "M", "Y") and value.dtype.kind == "M"
    exact = value.astype(f"{value.dtype.name.split('[')[0]}[{'D' if days else 'us'}]")
    result = exact.item()
    if exact != value or isinstance(result, int):
        raise SchemaError(
            f"field {path!r} holds {value!r}: times are kept in microseconds, years 1 to 9999"
        )
    return result


def _fit_float(value: Any, dtype: pa.DataType, path: str) -> float:
    if type(value) is int:
        if abs(value) > EXACT_IN_FLOAT64 and int(float(value)) != value:
            raise SchemaError(
                f"field {path!r} is a float field and cannot hold the int {value} exactly; "
                "put it as a float, or keep ints in a field of their own"
            )
        value = float(value)
    if type(value) is not float:
        raise Misfit(path, dtype, value)
    if dtype == pa.float64() or value != value or float(pa.scalar(value, dtype).as_py()) == value:
        return value
    raise Misfit(path, dtype, value)


def _in_range(value: int, dtype: pa.DataType) -> bool:
    signed = pa.types.is_signed_integer(dtype)
    bits = dtype.bit_width - signed
    return (-(2**bits) if signed else 0) <= value < 2**bits


def _decimal_fits(value: decimal.Decimal, dtype: pa.DataType) -> bool:
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        return False
    if not any(digits):
        return True
    while digits[-1] == 0:
        digits, exponent = digits[:-1], exponent + 1
    return -exponent <= dtype.scale and len(digits) + exponent <= dtype.precision - dtype.scale


def _is_numpy(value: Any) -> bool:
    return isinstance(value, (np.generic, np.ndarray))
