"""Conversion of records' Arrow types and columns to those that Spark has.

Spark has no half-precision floats (they become floats), no unsigned numbers (they become the next
wider signed ones) and no UUIDs (they become text). Vectors become arrays. All other types exist in
Spark.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from persisting.errors import StorageError
from persisting.records.arrow import fill
from persisting.records.arrow_casts import convert
from persisting.records.values import UUID

_WIDER = {
    pa.float16(): pa.float32(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}


def spark_type(dtype: pa.DataType) -> pa.DataType:
    """Return the Arrow type in which Spark takes values of ``dtype``."""
    if dtype == UUID:
        return pa.string()
    if dtype in _WIDER:
        return _WIDER[dtype]
    if pa.types.is_time(dtype):
        return pa.time64("ns")
    if pa.types.is_fixed_size_list(dtype) or pa.types.is_list(dtype):
        return pa.list_(pa.field("element", spark_type(dtype.value_type)))
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(f.name, spark_type(f.type)) for f in dtype])
    return dtype


TIMESTAMP_FORMAT = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"
"""Spark's pattern of a timestamp, to the microsecond."""


def nested_types(dtype: Any) -> Iterator[Any]:
    """Yield a Spark type and all types nested in it."""
    yield dtype
    inner = [field.dataType for field in getattr(dtype, "fields", ())]
    names = ("elementType", "keyType", "valueType")
    inner += [getattr(dtype, name) for name in names if hasattr(dtype, name)]
    for part in inner:
        yield from nested_types(part)


def spark_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, spark_type(f.type)) for f in schema])


def to_spark(
    batches: Iterable[pa.RecordBatch],
    target: pa.Schema,
    defaults: Mapping[str, Any] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Convert batches of records to exactly the schema ``target``.

    ``defaults`` are the values of fields that a batch lacks; others are null.
    """
    for batch in batches:
        if batch.num_rows:
            columns = [_column(batch, field, defaults) for field in target]
            yield pa.RecordBatch.from_arrays(columns, schema=target)


def _column(batch: pa.RecordBatch, field: pa.Field, defaults: Mapping[str, Any] | None) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    if index < 0:
        return fill(field, batch.num_rows, defaults)
    try:
        return _value(batch.column(index), field.type)
    except (pa.ArrowException, AttributeError) as exc:  # the latter if only one type is nested
        raise StorageError(
            f"field {field.name!r} is {batch.column(index).type}, and the DataFrame's type "
            f"{field.type} cannot hold its values. If you gave the schema, leave this field out of "
            "it; otherwise the field has changed: load the topic again, or restart the stream"
        ) from exc


def _value(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type == target:
        return array
    if array.type == UUID:
        texts = [None if v is None else str(uuid.UUID(bytes=v)) for v in array.storage.to_pylist()]
        return pa.array(texts, target)
    if pa.types.is_struct(array.type) and pa.types.is_struct(target) and target.num_fields:
        parts = array.flatten()
        children = [
            _value(parts[array.type.get_field_index(f.name)], f.type)
            if array.type.get_field_index(f.name) >= 0
            else pa.nulls(len(array), f.type)
            for f in target
        ]
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(target), mask=mask)
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    if pa.types.is_list(array.type) and pa.types.is_list(target):
        if array.null_count:
            array = array.take(pa.array(range(len(array))))
        items = _value(array.values, target.value_type)
        return pa.Array.from_buffers(
            target, len(array), array.buffers()[:2], offset=array.offset, children=[items]
        )
    return convert(array, target)
