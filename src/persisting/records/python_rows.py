"""Arrow data as Python records, several times as fast as Arrow's own conversion."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

_THROUGH_NUMPY = frozenset(
    {
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.uint8(),
        pa.uint16(),
        pa.uint32(),
        pa.uint64(),
        pa.float32(),
        pa.float64(),
        pa.bool_(),
        pa.string(),
        pa.large_string(),
    }
)
"""Types whose values NumPy turns into the same Python objects."""


def python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a table, exactly as ``table.to_pylist()`` does."""
    names = table.schema.names
    if not names or len(set(names)) < len(names):
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    columns = [_values(column) for column in table.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _values(column: pa.ChunkedArray) -> list[Any]:
    if column.type in _THROUGH_NUMPY and not column.null_count:
        values: list[Any] = column.to_numpy().tolist()
        return values
    return column.to_pylist()
