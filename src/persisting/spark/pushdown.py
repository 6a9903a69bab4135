"""Conditions of Spark as conditions of the storage.

Spark evaluates every condition again, so a condition here may keep more rows than Spark's, and must
keep all rows for which Spark's is true. Under a negation it must be true, false and null for
exactly the same rows. Whatever cannot be expressed is left out.

Both sides order text by its bytes in UTF-8. They differ for floats: Spark treats NaN as equal to
itself and larger than all others, and the storage orders NaN by its sign.
"""

from __future__ import annotations

import base64
import datetime as dt
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Context, Decimal
from typing import Any, NamedTuple

import pyarrow as pa

from persisting.records.values import UUID
from persisting.spark.types import spark_type

_COMPARISONS = {"eq": "=", "same": "=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_EPOCH = dt.datetime(1970, 1, 1)
_MICRO = dt.timedelta(microseconds=1)
_LAST = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


class Sql(NamedTuple):
    """A condition in the storage's SQL, and whether it is the same as Spark's for every row."""

    text: str
    exact: bool = True


class _Unsupported(Exception):
    """A condition cannot be expressed."""


def to_sql(condition: Mapping[str, Any], schema: pa.Schema) -> Sql | None:
    """Return a condition on fields of ``schema`` as SQL; None if it cannot be expressed."""
    parts = [to_sql(part, schema) for part in condition.get("parts", ())]
    if condition["op"] == "and":
        known = [part for part in parts if part is not None]
        if len(known) < 2:
            return Sql(known[0].text, exact=False) if known else None
        return Sql(f"({known[0].text} AND {known[1].text})", all(part.exact for part in known))
    if condition["op"] == "or":
        if parts[0] is None or parts[1] is None:
            return None
        return Sql(f"({parts[0].text} OR {parts[1].text})", parts[0].exact and parts[1].exact)
    if condition["op"] == "not":
        return Sql(f"(NOT {parts[0].text})") if parts[0] is not None and parts[0].exact else None
    try:
        return _test(condition, schema)
    except (_Unsupported, ValueError, OverflowError, ArithmeticError):
        return None


def tests_of(condition: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the tests of single fields that a condition consists of."""
    if "field" in condition:
        yield condition
    for part in condition.get("parts", ()):
        yield from tests_of(part)


def fields_of(condition: Mapping[str, Any]) -> set[str]:
    """Return the names of the top-level fields that a condition uses."""
    return {test["field"][0] for test in tests_of(condition)}


def is_read_as_stored(condition: Mapping[str, Any], stored: pa.Schema, asked: pa.Schema) -> bool:
    """Whether Spark compares the stored values: a schema that the user gave may convert them."""
    try:
        return all(
            spark_type(_type_of(test["field"], stored)) == _type_of(test["field"], asked)
            for test in tests_of(condition)
        )
    except _Unsupported:
        return False


def _test(condition: Mapping[str, Any], schema: pa.Schema) -> Sql:
    path, op = condition["field"], condition["op"]
    dtype = _type_of(path, schema)
    name = ".".join(f"`{part}`" for part in path)
    if op in ("is_null", "is_not_null"):
        return Sql(_null_test(path, op == "is_null"))
    values = condition["values"]
    if pa.types.is_floating(dtype):
        return _float_test(op, name, path, dtype, values)
    if op == "starts_with":
        return Sql(_starts_with(name, dtype, values[0]))
    name, literal = _literals(name, dtype)
    texts = [literal(value) for value in values]
    if op == "in":
        return Sql(f"({name} IN ({', '.join(texts)}))")
    if op not in ("eq", "same") and dtype == UUID:
        raise _Unsupported
    test = f"{name} {_COMPARISONS[op]} {texts[0]}"
    return Sql(f"({_null_test(path, False)} AND {test})" if op == "same" else f"({test})")


def _type_of(path: Sequence[str], schema: pa.Schema) -> pa.DataType:
    fields: Any = schema
    dtype: Any = None
    for name in path:
        index = fields.get_field_index(name)
        if index < 0:
            raise _Unsupported
        dtype = fields.field(index).type
        fields = dtype if pa.types.is_struct(dtype) else pa.schema([])
    return dtype


def _null_test(path: Sequence[str], is_null: bool) -> str:
    """Test a field and all structs that contain it: a field of a null struct is null."""
    names = [".".join(f"`{part}`" for part in path[: end + 1]) for end in range(len(path))]
    if is_null:
        return "(" + " OR ".join(f"{name} IS NULL" for name in names) + ")"
    return "(" + " AND ".join(f"{name} IS NOT NULL" for name in names) + ")"


def _float_test(
    op: str, name: str, path: Sequence[str], dtype: pa.DataType, values: Sequence[float]
) -> Sql:
    if pa.types.is_float16(dtype):  # the storage would round the literal
        raise _Unsupported
    texts = [repr(float(value)) for value in values]
    if op == "in":
        tests = [f"{name} = {text}" for text in texts if float(text)]
        if len(tests) < len(texts):
            tests.append(f"({name} = 0.0 OR {name} = -0.0)")
        return Sql("(" + " OR ".join(tests) + ")")
    if op in ("eq", "same"):
        test = _float_test("in", name, path, dtype, values).text
        return Sql(f"({_null_test(path, False)} AND {test})" if op == "same" else test)
    if not float(texts[0]):  # both zeros are equal in Spark
        texts = ["-0.0" if op in ("ge", "lt") else "0.0"]
    test = f"{name} {_COMPARISONS[op]} {texts[0]}"
    if op in ("gt", "ge"):
        # Only NaN with a sign is below minus infinity. Unlike isnan(), this can use an index.
        lowest = f"CAST('-inf' AS {'FLOAT' if pa.types.is_float32(dtype) else 'DOUBLE'})"
        return Sql(f"({test} OR {name} < {lowest})")
    return Sql(f"({test} AND NOT isnan({name}))")


def _starts_with(name: str, dtype: pa.DataType, prefix: str) -> str:
    """Return a range of texts: unlike LIKE, it has no wildcards to escape, and uses an index."""
    if not pa.types.is_string(dtype):
        raise _Unsupported
    if not prefix:
        return f"({name} >= '')"
    low, after = _quoted(prefix), _after(prefix)
    if after is None:
        return f"({name} >= {low})"
    return f"({name} >= {low} AND {name} < {_quoted(after)})"


def _after(prefix: str) -> str | None:
    """Return the first text after all texts with a prefix; None if there is no such text."""
    rest = prefix.rstrip(chr(_LAST))
    if not rest:
        return None
    following = ord(rest[-1]) + 1
    if following in _SURROGATES:
        following = _SURROGATES.stop
    return rest[:-1] + chr(following)


def _literals(name: str, dtype: pa.DataType) -> tuple[str, Callable[[Any], str]]:
    """Return how to name a field in a comparison, and how to write a value to compare it with."""
    if pa.types.is_boolean(dtype):
        return name, lambda value: str(bool(value)).lower()
    if pa.types.is_integer(dtype):
        return name, lambda value: str(_whole(value))
    if pa.types.is_string(dtype):
        return name, _quoted
    if pa.types.is_binary(dtype):
        return name, lambda value: f"X'{base64.b64decode(value).hex()}'"
    if dtype == UUID:
        return name, _uuid
    if pa.types.is_decimal(dtype):
        return name, lambda value: _decimal(value, dtype)
    if pa.types.is_date32(dtype):
        return name, lambda value: f"DATE '{(_EPOCH + dt.timedelta(days=value)).date()}'"
    if pa.types.is_timestamp(dtype) and dtype.unit == "us":
        zone = "Z" if dtype.tz else ""
        return name, lambda value: f"TIMESTAMP '{_EPOCH + value * _MICRO}{zone}'"
    if pa.types.is_time64(dtype) and dtype.unit == "us":  # Spark counts nanoseconds
        return f"CAST({name} AS BIGINT)", lambda value: str(_micros(value))
    if pa.types.is_duration(dtype) and dtype.unit == "us":
        return f"CAST({name} AS BIGINT)", lambda value: str(_whole(value))
    raise _Unsupported


def _whole(value: Any) -> int:
    """Return a whole number; those of uint64 are decimals in Spark."""
    number = int(value)
    if Decimal(value) != number:
        raise _Unsupported
    return number


def _micros(nanos: int) -> int:
    if nanos % 1000:
        raise _Unsupported
    return nanos // 1000


def _decimal(value: str, dtype: pa.DataType) -> str:
    number = Decimal(value)
    # Python's own precision is 28 digits, and Spark has up to 38.
    if number.quantize(Decimal(1).scaleb(-dtype.scale), context=Context(prec=76)) != number:
        raise _Unsupported
    return f"CAST('{number:f}' AS DECIMAL({dtype.precision}, {dtype.scale}))"


def _uuid(text: str) -> str:
    number = uuid.UUID(text)
    if str(number) != text:  # Spark compares the text
        raise _Unsupported
    return f"X'{number.hex}'"


def _quoted(text: str) -> str:
    if "\0" in text:
        raise _Unsupported
    return "'" + text.replace("'", "''") + "'"
