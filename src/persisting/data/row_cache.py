"""Keeps the rows of a replay buffer in memory-mapped files, for quick random access.

A table is fast to scan and slow to read in single rows. The cache holds copies of the rows as
Arrow files in a temporary folder. It can be rebuilt from the topic at any time, so nothing of it is
synced.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from persisting.errors import StorageError
from persisting.fs import os_errors_as
from persisting.records.arrow import align

_CHUNK_ROWS = 1024 * 1024
_CHUNK_BYTES = 256 * 1024 * 1024
_STORED_BYTES = 8 * 1024 * 1024
"""A chunk is complete with so many rows or bytes; less than the last number stays in memory."""
_OFFSET_BITS = 44
"""A bucket and an offset in one number."""


class _Chunk:
    """Rows of consecutive offsets."""

    def __init__(
        self, first: int, rows: pa.RecordBatch, arrivals: np.ndarray, path: Path | None = None
    ) -> None:
        self.first, self.rows, self.arrivals, self.path = first, rows, arrivals, path

        self._numbers: dict[str, np.ndarray | None] = {}
        self._texts: dict[str, tuple[np.ndarray, memoryview] | None] = {}

    @property
    def end(self) -> int:
        return self.first + int(self.rows.num_rows)

    def numbers(self, field: pa.Field) -> np.ndarray | None:
        """Return a column of numbers or vectors without nulls as an array, else None."""
        if field.name not in self._numbers:
            self._numbers[field.name] = _as_numbers(self._column(field))
        return self._numbers[field.name]

    def texts(self, field: pa.Field) -> tuple[np.ndarray, memoryview] | None:
        """Return a column of texts or bytes without nulls as offsets and bytes, else None."""
        if field.name not in self._texts:
            self._texts[field.name] = _as_texts(self._column(field))
        return self._texts[field.name]

    def _column(self, field: pa.Field) -> pa.Array | None:
        """Return a column if it has exactly this type."""
        index = self.rows.schema.get_field_index(field.name)
        column = None if index < 0 else self.rows.column(index)
        return column if column is not None and column.type == field.type else None


class _Part(NamedTuple):
    """Rows of one chunk, and their places in a result."""

    chunk: _Chunk
    rows: np.ndarray
    places: np.ndarray


class RowCache:
    """The rows of all buckets of a topic, by bucket and offset."""

    def __init__(self, buckets: int, folder: str | Path | None) -> None:
        with os_errors_as("create a cache in", Path(folder or tempfile.gettempdir())):
            self._folder = Path(tempfile.mkdtemp(prefix="persisting-replay-", dir=folder))
        self._chunks: list[list[_Chunk]] = [[] for _ in range(buckets)]
        self._index: tuple[np.ndarray, list[_Chunk]] | None = None
        """The first places of all chunks, and the chunks; None after a change."""
        self._files = 0
        self._finalizer = weakref.finalize(self, _remove, self._folder, os.getpid())

    def end(self, bucket: int) -> int:
        """Return the offset after the last cached row, 0 if there is none."""
        chunks = self._chunks[bucket]
        return chunks[-1].end if chunks else 0

    def append(self, bucket: int, first: int, rows: pa.RecordBatch, arrivals: np.ndarray) -> None:
        """Add rows that follow those of the bucket so far, and when they arrived."""
        self._index = None
        chunks = self._chunks[bucket]
        chunks.append(_Chunk(first, rows, arrivals))
        while len(chunks) > 1 and _joinable(chunks[-2], chunks[-1]):
            after, before = chunks.pop(), chunks.pop()
            chunks.append(_joined(before, after))
        last = chunks[-1]
        if last.rows.num_rows >= _CHUNK_ROWS or last.rows.nbytes >= _CHUNK_BYTES:
            chunks[-1] = self._stored(last)

    def store(self, bucket: int) -> None:
        """Move what was appended from memory to a file, unless it is little."""
        self._index = None
        chunks = self._chunks[bucket]
        if sum(chunk.rows.nbytes for chunk in chunks if chunk.path is None) < _STORED_BYTES:
            return
        while len(chunks) > 1 and _adjoins(chunks[-2], chunks[-1]):
            after, before = chunks.pop(), chunks.pop()
            chunks.append(_joined(before, after))
        for number, chunk in enumerate(chunks):
            if chunk.path is None:
                chunks[number] = self._stored(chunk)

    def _stored(self, chunk: _Chunk) -> _Chunk:
        self._files += 1
        path = self._folder / f"{self._files}.arrow"
        with os_errors_as("write the cache", path):
            schema = chunk.rows.schema
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
                file.write_batch(chunk.rows)
            rows = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        _touch(rows)
        return _Chunk(chunk.first, rows, chunk.arrivals, path)

    def drop(self, bucket: int, start: int) -> None:
        """Remove chunks whose rows are all before ``start``."""
        chunks = self._chunks[bucket]
        while chunks and chunks[0].end <= start:
            self._index = None
            path = chunks.pop(0).path
            if path is not None:
                path.unlink(missing_ok=True)

    def take(
        self,
        buckets: np.ndarray,
        offsets: np.ndarray,
        schema: pa.Schema,
        defaults: Mapping[str, Any],
    ) -> pa.RecordBatch:
        """Return rows in the order of the arguments, with the fields of ``schema``."""
        if not len(offsets):
            return pa.RecordBatch.from_pylist([], schema=schema)
        parts = self._located(buckets, offsets)
        columns = [_gathered(field, parts, len(offsets), defaults) for field in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _located(self, buckets: np.ndarray, offsets: np.ndarray) -> list[_Part]:
        """Return which rows of which chunks are wanted, and their places in the result."""
        if self._index is None:
            ordered = [(b, chunk) for b, chunks in enumerate(self._chunks) for chunk in chunks]
            firsts = np.array([(b << _OFFSET_BITS) + chunk.first for b, chunk in ordered])
            self._index = firsts, [chunk for _, chunk in ordered]
        firsts, chunks = self._index
        wanted = (buckets << _OFFSET_BITS) + offsets
        numbers = np.searchsorted(firsts, wanted, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        cuts = [0, *(np.flatnonzero(np.diff(ascending)) + 1).tolist(), len(order)]
        parts = []
        for start, end in pairwise(cuts):
            number, places = ascending[start], order[start:end]
            parts.append(_Part(chunks[number], wanted[places] - firsts[number], places))
        return parts

    def arrivals(self, bucket: int, start: int, end: int) -> np.ndarray:
        """Return when the rows of a range of offsets arrived, in µs of Unix time."""
        parts = [np.zeros(0, np.int64)]
        for chunk in self._chunks[bucket]:
            low, high = max(start, chunk.first), min(end, chunk.end)
            if low < high:
                parts.append(chunk.arrivals[low - chunk.first : high - chunk.first])
        return np.concatenate(parts)

    def column(self, bucket: int, start: int, end: int, name: str) -> list[Any]:
        """Return the values of a field for a range of offsets."""
        values: list[Any] = []
        for chunk in self._chunks[bucket]:
            low, high = max(start, chunk.first), min(end, chunk.end)
            if low < high:
                if name not in chunk.rows.schema.names:
                    values += [None] * (high - low)
                else:
                    rows = chunk.rows.column(name).slice(low - chunk.first, high - low)
                    values += rows.to_pylist()
        return values

    def close(self) -> None:
        self._chunks, self._index = [], None
        self._finalizer()


def _as_numbers(column: pa.Array | None) -> np.ndarray | None:
    if column is None or column.null_count:
        return None
    if pa.types.is_fixed_size_list(column.type):
        values = _as_numbers(column.flatten())
        return None if values is None else values.reshape(len(column), -1)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return column.to_numpy()
    return None


def _as_texts(column: pa.Array | None) -> tuple[np.ndarray, memoryview] | None:
    if column is None or column.null_count or not len(column):
        return None
    if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
        return None
    _, offsets, data = column.buffers()
    first = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return first, memoryview(data if data is not None else b"")


def _gathered(
    field: pa.Field, parts: list[_Part], count: int, defaults: Mapping[str, Any]
) -> pa.Array:
    """Return one column of the wanted rows. Arrow's own take costs several times as much for a few
    rows, so numbers and texts are copied directly."""
    numbers = [part.chunk.numbers(field) for part in parts]
    if all(values is not None for values in numbers):
        return _gathered_numbers(field, parts, numbers, count)
    texts = [part.chunk.texts(field) for part in parts]
    if all(values is not None for values in texts):
        return _gathered_texts(field, parts, texts, count)
    schema = pa.schema([field])
    pieces = [
        align(part.chunk.rows.take(pa.array(part.rows)), schema, defaults).column(0)
        for part in parts
    ]
    places = np.concatenate([part.places for part in parts])
    return pa.concat_arrays(pieces).take(pa.array(np.argsort(places)))


def _gathered_numbers(
    field: pa.Field, parts: list[_Part], numbers: list[Any], count: int
) -> pa.Array:
    result = np.empty((count, *numbers[0].shape[1:]), numbers[0].dtype)
    for part, values in zip(parts, numbers, strict=True):
        result[part.places] = values[part.rows]
    if pa.types.is_fixed_size_list(field.type):
        items = pa.array(result.reshape(-1), field.type.value_type)
        return pa.FixedSizeListArray.from_arrays(items, type=field.type)
    return pa.array(result, field.type)


def _gathered_texts(field: pa.Field, parts: list[_Part], texts: list[Any], count: int) -> pa.Array:
    result: list[memoryview] = [memoryview(b"")] * count
    lengths = np.empty(count, np.int64)
    for part, (offsets, data) in zip(parts, texts, strict=True):
        starts, ends = offsets[part.rows], offsets[part.rows + 1]
        lengths[part.places] = ends - starts
        for place, start, end in zip(
            part.places.tolist(), starts.tolist(), ends.tolist(), strict=True
        ):
            result[place] = data[start:end]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] >= 2**31:
        raise StorageError("the texts of this sample take more than 2 GB; sample fewer records")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(result))]
    return pa.Array.from_buffers(field.type, count, buffers)


def _joinable(before: _Chunk, after: _Chunk) -> bool:
    """Whether two chunks in memory become one. Only similar sizes do, so rows are copied rarely."""
    return _adjoins(before, after) and after.rows.num_rows * 2 >= before.rows.num_rows


def _adjoins(before: _Chunk, after: _Chunk) -> bool:
    """Whether two chunks are in memory and can be one."""
    if before.path is not None or before.end != after.first:
        return False
    return bool(before.rows.schema == after.rows.schema)


def _joined(before: _Chunk, after: _Chunk) -> _Chunk:
    rows = pa.concat_batches([before.rows, after.rows])
    return _Chunk(before.first, rows, np.concatenate([before.arrivals, after.arrivals]))


def _touch(rows: pa.RecordBatch) -> None:
    """Read one byte of each page: mapping them in order now is much cheaper than one by one."""
    for column in rows.columns:
        for buffer in column.buffers():
            if buffer is not None:
                np.frombuffer(buffer, np.uint8)[:: mmap.PAGESIZE].max(initial=0)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
