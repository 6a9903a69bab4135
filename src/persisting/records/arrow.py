"""Converts Arrow data from users, and batches of an older schema, to the current schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persisting.errors import SchemaError
from persisting.records.arrow_casts import convert, list_items
from persisting.records.encoder import Rules
from persisting.records.evolution import Conflict, has_integers, is_listy, learn, widen
from persisting.records.field_names import check_name
from persisting.records.values import (
    AWARE,
    DURATION,
    EXACT_IN_FLOAT64,
    MAX_DEPTH,
    NAIVE,
    TIME,
    UUID,
    Misfit,
    Values,
    type_name,
)


def accept(data: Any, schema: pa.Schema) -> pa.Table:
    """Copy a table or batch to a table of types that the backends store, or raise.

    Lists for a field of vectors become vectors if all have its length.
    """
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if not isinstance(data, pa.Table):
        raise SchemaError(
            f"put_arrow takes a pyarrow Table or RecordBatch, got {type(data).__name__}"
        )
    names = data.schema.names
    if len(set(names)) != len(names):
        raise SchemaError(f"the Arrow data has two columns of one name: {names}")
    columns = []
    for field in data.schema:
        check_name(field.name)
        target = _stored_type(field.type, field.name)
        column = _own(_cast(data.column(field.name), target, field.name))
        for chunk in column.chunks:
            _check_values(chunk, field.name)
        columns.append(_as_vectors(_whole_vectors(column), schema, field.name))
    fields = [pa.field(n, c.type) for n, c in zip(names, columns, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def merge(schema: pa.Schema, new: pa.Schema, rules: Rules, *, defined: bool = True) -> pa.Schema:
    """The schema after data of schema ``new``; raises :class:`SchemaError` if they conflict."""
    types = {f.name: f.type for f in schema}
    for field in new:
        known = types.get(field.name)
        if known is None:
            if defined and not rules.evolving:
                raise SchemaError(f"field {field.name!r} is not in the schema")
            types[field.name] = field.type
            continue
        try:
            types[field.name] = (widen if rules.evolving else learn)(known, field.type, field.name)
        except Conflict as exc:
            raise SchemaError(
                f"field {exc.path!r} is {type_name(exc.old)}, got {type_name(exc.new)}"
            ) from None
    missing = set(schema.names) - set(new.names)
    if missing and not rules.evolving:
        name = next(n for n in schema.names if n in missing)
        raise SchemaError(f"field {name!r} is missing: expected {type_name(types[name])}")
    merged = pa.schema(list(types.items()))
    return schema if merged.equals(schema) else merged


def align(
    batch: pa.RecordBatch, schema: pa.Schema, defaults: Mapping[str, Any] | None = None
) -> pa.RecordBatch:
    """Convert a batch of an older schema to ``schema``: fill new fields, widen types."""
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            columns.append(fill(field, batch.num_rows, defaults))
        else:
            try:
                columns.append(convert(batch.column(index), field.type))
            except pa.ArrowException as exc:
                raise SchemaError(
                    f"field {field.name!r} is {type_name(field.type)} and cannot hold a value "
                    f"exactly: {exc}"
                ) from exc
    if not columns:
        return no_columns(batch.num_rows)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def check_defaults(schema: pa.Schema, rules: Rules) -> None:
    """Raise if a default conflicts with the type of its field."""
    values = Values(evolving=True, vector=rules.vector)
    for name, value in (rules.defaults or {}).items():
        if name in schema.names and value is not None:
            own = values.describe(value, name, top=True)[1]
            try:
                widen(schema.field(name).type, own, name)
            except Conflict as exc:
                raise SchemaError(
                    f"field {exc.path!r} is {type_name(exc.old)}, and its default {value!r} is "
                    f"{type_name(exc.new)}"
                ) from None


def no_columns(rows: int) -> pa.RecordBatch:
    """Return a batch of records without fields."""
    empty = pa.Array.from_buffers(pa.struct([]), rows, [None])
    return pa.RecordBatch.from_struct_array(empty)


def fill(field: pa.Field, rows: int, defaults: Mapping[str, Any] | None) -> pa.Array:
    """Return a column for rows that lack ``field``: its default if that fits, else None."""
    value = (defaults or {}).get(field.name)
    if value is None:
        return pa.nulls(rows, field.type)
    vector = field.type.value_type if is_listy(field.type) else pa.float64()
    try:
        canonical = Values(evolving=True, vector=vector).fit(value, field.type, field.name)
    except Misfit:  # the first record that takes the default will widen the field
        return pa.nulls(rows, field.type)
    one = pa.array([canonical], field.type)
    return one.take(pa.repeat(pa.scalar(0, pa.int64()), rows))


def beyond_float(array: pa.Array) -> bool:
    """Whether an integer in ``array`` is so large that floats no longer hold every integer."""
    if not has_integers(array.type) or array.null_count == len(array):
        return False
    if array.type == pa.int64() and not array.null_count:
        numbers = array.to_numpy()  # faster than min_max for short columns
        return bool(numbers.max() > EXACT_IN_FLOAT64 or numbers.min() < -EXACT_IN_FLOAT64)
    if pa.types.is_integer(array.type):
        span = pc.min_max(array).as_py()
        return span["min"] is not None and (
            span["max"] > EXACT_IN_FLOAT64 or span["min"] < -EXACT_IN_FLOAT64
        )
    if pa.types.is_struct(array.type):
        return any(beyond_float(child) for child in array.flatten())
    if is_listy(array.type):
        return beyond_float(list_items(array))
    return False


def _stored_type(dtype: pa.DataType, path: str, depth: int = 0) -> pa.DataType:
    """The type that Arrow input of ``dtype`` is stored as."""
    if depth > MAX_DEPTH:
        raise SchemaError(f"column {path[:80]!r} is nested more than {MAX_DEPTH} levels deep")
    if pa.types.is_dictionary(dtype):
        return _stored_type(dtype.value_type, path, depth)
    if pa.types.is_fixed_size_list(dtype):
        vector = pa.types.is_floating(dtype.value_type) and dtype.list_size > 0 and depth == 0
        size = dtype.list_size if vector else -1
        return pa.list_(_stored_type(dtype.value_type, f"{path}[]", depth + 1), size)
    if _is_any_list(dtype):
        return pa.list_(_stored_type(dtype.value_type, f"{path}[]", depth + 1))
    if pa.types.is_struct(dtype):
        names = [field.name for field in dtype]
        for name in names:
            check_name(name, path)
            if names.count(name) > 1:
                raise SchemaError(f"column {path!r} has two fields of one name: {name!r}")
        return pa.struct(
            [pa.field(f.name, _stored_type(f.type, f"{path}.{f.name}", depth + 1)) for f in dtype]
        )
    for matches, stored in _CONVERSIONS:
        if matches(dtype):
            return stored
    if pa.types.is_timestamp(dtype):
        return AWARE if dtype.tz else NAIVE
    if dtype == UUID or any(matches(dtype) for matches in _KEPT):
        return dtype
    raise SchemaError(
        f"column {path!r} has the Arrow type {dtype}, which cannot be stored; cast it"
    )


def _is_any_list(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype))


_CONVERSIONS: tuple[tuple[Any, pa.DataType], ...] = (
    (pa.types.is_large_string, pa.string()),
    (pa.types.is_string_view, pa.string()),
    (pa.types.is_large_binary, pa.binary()),
    (pa.types.is_binary_view, pa.binary()),
    (pa.types.is_date64, pa.date32()),
    (pa.types.is_time, TIME),
    (pa.types.is_duration, DURATION),
)
_KEPT = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_date32,
    pa.types.is_decimal128,
)


def _own(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Copy a column, and only the part of its memory that it shows.

    Arrow shares the memory of a NumPy array, which may change, and of the table that a slice was
    taken from. Text and bytes are never shared with NumPy, and are checked slice by slice.
    """
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return column
    chunks = [pa.concat_arrays([chunk, chunk.slice(0, 0)]) for chunk in column.chunks]
    return pa.chunked_array(chunks, column.type)


def _check_values(array: pa.Array, path: str) -> None:
    """Raise if values are invalid for their type: they could be neither stored nor read."""
    try:
        array.validate(full=True)
    except pa.ArrowException as exc:
        raise SchemaError(f"column {path!r} is not valid Arrow data: {exc}") from exc
    _check_times(array, path)


def _check_times(array: pa.Array, path: str) -> None:
    """Raise if Python cannot represent a date or time: it could be stored but never read."""
    dtype = array.type
    if pa.types.is_struct(dtype):
        for field, child in zip(dtype, array.flatten(), strict=True):
            _check_times(child, f"{path}.{field.name}")
    elif is_listy(dtype):
        _check_times(list_items(array), f"{path}[]")
    elif dtype in _SPANS:
        number, least, most = _SPANS[dtype]
        span = pc.min_max(array.view(number)).as_py()
        if span["min"] is not None and (span["min"] < least or span["max"] > most):
            raise SchemaError(
                f"column {path!r} holds a {type_name(dtype)} that Python cannot represent: outside "
                "the years 1 to 9999, or not a time of day"
            )


_YEARS = (-62_135_596_800_000_000, 253_402_300_799_999_999)
_SPANS: dict[pa.DataType, tuple[pa.DataType, int, int]] = {
    NAIVE: (pa.int64(), *_YEARS),
    AWARE: (pa.int64(), *_YEARS),
    pa.date32(): (pa.int32(), -719_162, 2_932_896),
    TIME: (pa.int64(), 0, 86_399_999_999),
}
"""The integer storage of a type, and the range that Python can represent."""


def _whole_vectors(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert vectors with missing items to plain lists."""
    if pa.types.is_fixed_size_list(column.type):
        if any(chunk.flatten().null_count for chunk in column.chunks):
            return column.cast(pa.list_(column.type.value_type))
    return column


def _as_vectors(column: pa.ChunkedArray, schema: pa.Schema, name: str) -> pa.ChunkedArray:
    index = schema.get_field_index(name)
    if index < 0 or not pa.types.is_fixed_size_list(schema.field(index).type):
        return column
    if not pa.types.is_list(column.type):
        return column
    target = schema.field(index).type
    try:
        # Arrow's cast crashes on an array of null lists that has no values buffer.
        return pa.chunked_array(
            [
                pa.nulls(len(chunk), target)
                if chunk.null_count == len(chunk)
                else chunk.cast(target)
                for chunk in column.chunks
            ],
            target,
        )
    except pa.ArrowException:
        return column


def _cast(column: pa.ChunkedArray, target: pa.DataType, name: str) -> pa.ChunkedArray:
    if column.type == target:
        return column
    try:
        return column.cast(target)
    except pa.ArrowException as exc:
        raise SchemaError(f"column {name!r} cannot be stored exactly as {target}: {exc}") from exc
