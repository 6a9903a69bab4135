"""Rows of a fixed width, all columns of a row side by side.

Reading a random row of a columnar file costs one access to memory that is in no cache for each
column. In packed rows it costs one access.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

_WRITTEN_BYTES = 8 * 1024 * 1024
_LENGTH_BYTES = 8
_ALIGNED = 8
_LINE, _LONG_ROW = 64, 512
"""Long rows start at a line of the processor's cache."""
_WASTED_BYTES = 64


@dataclass(frozen=True)
class Column:
    """Where a column is in a row. A text has its length before it."""

    name: str
    type: pa.DataType
    start: int
    width: int
    is_text: bool


@dataclass(frozen=True)
class Layout:
    """The columns of packed rows."""

    columns: tuple[Column, ...]
    row_bytes: int

    @cached_property
    def by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    def find(self, field: pa.Field) -> Column | None:
        """Return the column with this name, if it has exactly this type."""
        column = self.by_name.get(field.name)
        return column if column is not None and column.type == field.type else None


def layout_of(rows: pa.RecordBatch) -> Layout | None:
    """Return the layout of those columns that can be packed, None if there are none.

    These are columns without nulls of numbers, times and vectors, and texts whose lengths differ so
    little that not much space is wasted.
    """
    columns: list[Column] = []
    end = 0
    for field, values in zip(rows.schema, rows.columns, strict=True):
        width, is_text = fixed_width(field.type), False
        if width is not None and fixed_bytes(values) is None:
            width = None
        if width is None and (texts := text_bytes(values)) is not None:
            lengths = np.diff(texts[0])
            longest, total = int(lengths.max()), int(lengths.sum())
            padded = _rounded(longest)
            if len(lengths) * (padded - _WASTED_BYTES) <= 1.5 * total:
                width, is_text = padded, True
        if width:
            columns.append(Column(field.name, field.type, end, width, is_text))
            end += -(-(width + _LENGTH_BYTES * is_text) // _ALIGNED) * _ALIGNED
    if not columns:
        return None
    step = _LINE if end >= _LONG_ROW else _ALIGNED
    return Layout(tuple(columns), -(-end // step) * step)


def _rounded(longest: int) -> int:
    """Return a width for texts. Few different ones occur, so that files have the same layout."""
    step = max(_ALIGNED, 1 << max(0, longest.bit_length() - 4))
    return -(-longest // step) * step


def write(path: Path, rows: pa.RecordBatch, layout: Layout) -> np.ndarray:
    """Write the columns of a layout to a file, and return it as a matrix of bytes."""
    step = max(1, _WRITTEN_BYTES // layout.row_bytes)
    with open(path, "wb") as file:
        for first in range(0, rows.num_rows, step):
            file.write(_packed(rows.slice(first, step), layout).data)
    shape = rows.num_rows, layout.row_bytes
    matrix = np.memmap(path, np.uint8, "r", shape=shape).view(np.ndarray)
    touch(matrix)
    return matrix


def _packed(rows: pa.RecordBatch, layout: Layout) -> np.ndarray:
    result = np.zeros((rows.num_rows, layout.row_bytes), np.uint8)
    for column in layout.columns:
        values = rows.column(column.name)
        if not column.is_text:
            result[:, column.start : column.start + column.width] = fixed_bytes(values)
            continue
        texts = text_bytes(values)
        assert texts is not None
        offsets, data = texts
        lengths = np.diff(offsets).astype(np.int64)
        _lengths(result, column)[:] = lengths
        inside = np.arange(column.width) < lengths[:, np.newaxis]
        used = np.frombuffer(data, np.uint8)[int(offsets[0]) : int(offsets[-1])]
        _text(result, column)[inside] = used
    return result


def _lengths(rows: np.ndarray, column: Column) -> np.ndarray:
    lengths: np.ndarray = rows[:, column.start : column.start + _LENGTH_BYTES].view(np.int64)[:, 0]
    return lengths


def _text(rows: np.ndarray, column: Column) -> np.ndarray:
    first = column.start + _LENGTH_BYTES
    return rows[:, first : first + column.width]


def read_fixed(rows: np.ndarray, column: Column) -> np.ndarray:
    """Return the bytes of a column of packed rows, one row of a matrix for each."""
    return rows[:, column.start : column.start + column.width]


def read_texts(rows: np.ndarray, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of texts, and a matrix with their bytes, each at the start of a row."""
    return _lengths(rows, column), _text(rows, column)


def fixed_width(kind: pa.DataType) -> int | None:
    """Return how many bytes a value takes, None if that differs, or is not a whole number."""
    if pa.types.is_fixed_size_list(kind):
        width = None if _is_nested(kind.value_type) else fixed_width(kind.value_type)
        return None if width is None else width * int(kind.list_size)
    if pa.types.is_boolean(kind) or not (
        pa.types.is_primitive(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_fixed_size_binary(kind)
    ):
        return None
    return int(kind.bit_width) // 8


def _is_nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind))


def fixed_bytes(values: pa.Array) -> np.ndarray | None:
    """Return the bytes of a column of values of a fixed width, one row of a matrix for each."""
    width = fixed_width(values.type)
    if not width or values.null_count:
        return None
    count = len(values)
    if pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
        if values.null_count:
            return None
    data = values.buffers()[1]
    if data is None:
        return np.zeros((count, width), np.uint8)
    first = values.offset * width * count // max(1, len(values))
    return np.frombuffer(data, np.uint8, count * width, first).reshape(count, width)


def text_bytes(values: pa.Array) -> tuple[np.ndarray, memoryview] | None:
    """Return the offsets and the bytes of a column of texts or bytes without nulls."""
    if values.null_count or not len(values):
        return None
    if not (pa.types.is_string(values.type) or pa.types.is_binary(values.type)):
        return None
    _, offsets, data = values.buffers()
    chosen = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    return chosen, memoryview(b"" if data is None else data)


def fixed_array(kind: pa.DataType, values: np.ndarray) -> pa.Array:
    """Return an Arrow array of a matrix of bytes, each row of which is a value."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    if not pa.types.is_fixed_size_list(kind):
        return pa.Array.from_buffers(kind, len(values), [None, data])
    size = len(values) * kind.list_size
    items = pa.Array.from_buffers(kind.value_type, size, [None, data])
    return pa.Array.from_buffers(kind, len(values), [None], children=[items])


def touch(data: np.ndarray) -> None:
    """Read one byte of each page: mapping them in order now is much cheaper than one by one."""
    data.reshape(-1)[:: mmap.PAGESIZE].max(initial=0)
