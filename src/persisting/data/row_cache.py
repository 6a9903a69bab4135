"""Keeps the rows of a replay buffer in memory-mapped files, for quick random access.

A table is fast to scan and slow to read in single rows. The cache holds copies of the rows in a
temporary folder: most columns as packed rows, and the others as Arrow files. It can be rebuilt from
the topic at any time, so nothing of it is synced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from persisting.data import packed_rows
from persisting.data.packed_rows import Layout
from persisting.errors import StorageError
from persisting.fs import os_errors_as
from persisting.records.arrow import align, no_columns

_CHUNK_ROWS = 1024 * 1024
_CHUNK_BYTES = 256 * 1024 * 1024
_STORED_BYTES = 8 * 1024 * 1024
"""A chunk is complete with this many rows or bytes; less than the last number stays in memory."""
_OFFSET_BITS = 44
"""A bucket and an offset in one number."""
_FEW_CHUNKS = 2**16
_MOST_TEXT = 2**31


class _Chunk:
    """Rows of consecutive offsets."""

    def __init__(self, first: int, rows: pa.RecordBatch, arrivals: np.ndarray) -> None:
        self.first, self.rows, self.arrivals = first, rows, arrivals
        """``rows`` has the columns that are not packed."""
        self.layout: Layout | None = None
        self.packed = np.zeros((0, 0), np.uint8)
        self.paths: list[Path] = []
        self.is_stored = False
        self._fixed: dict[str, np.ndarray | None] = {}
        self._texts: dict[str, tuple[np.ndarray, memoryview] | None] = {}

    @property
    def count(self) -> int:
        return len(self.arrivals)

    @property
    def end(self) -> int:
        return self.first + self.count

    def fixed(self, field: pa.Field) -> np.ndarray | None:
        """Return a column of a fixed width without nulls as bytes, else None."""
        if field.name not in self._fixed:
            column = self._column(field)
            self._fixed[field.name] = None if column is None else packed_rows.fixed_bytes(column)
        return self._fixed[field.name]

    def texts(self, field: pa.Field) -> tuple[np.ndarray, memoryview] | None:
        """Return a column of texts or bytes without nulls as offsets and bytes, else None."""
        if field.name not in self._texts:
            column = self._column(field)
            self._texts[field.name] = None if column is None else packed_rows.text_bytes(column)
        return self._texts[field.name]

    def values(self, name: str, start: int, end: int) -> list[Any]:
        """Return the values of a field for a range of rows."""
        if self.layout is not None and name in self.layout.by_name:
            packed = _PackedPart(self.layout, self.packed[start:end], None)
            return list(packed.stored(name).column(0).to_pylist())
        if name not in self.rows.schema.names:
            return [None] * (end - start)
        return list(self.rows.column(name).slice(start, end - start).to_pylist())

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

    def fixed(self, field: pa.Field) -> np.ndarray | None:
        """Return the bytes of a column of a fixed width."""
        values = self.chunk.fixed(field)
        return None if values is None else values.take(self.rows, axis=0)

    def texts(self, field: pa.Field) -> _Texts | None:
        texts = self.chunk.texts(field)
        if texts is None:
            return None
        starts, ends = texts[0][self.rows], texts[0][self.rows + 1]
        pieces = map(texts[1].__getitem__, map(slice, starts.tolist(), ends.tolist()))
        return _Texts(ends - starts, list(pieces))

    def stored(self, name: str) -> pa.RecordBatch:
        """Return a column as it is stored, a batch without columns if there is none."""
        if name not in self.chunk.rows.schema.names:
            return no_columns(len(self.rows))
        return self.chunk.rows.select([name]).take(pa.array(self.rows))


class _PackedPart(NamedTuple):
    """Packed rows, and their places in a result; None: in order."""

    layout: Layout
    rows: np.ndarray
    places: np.ndarray | None

    def fixed(self, field: pa.Field) -> np.ndarray | None:
        column = self.layout.find(field)
        if column is None or column.is_text:
            return None
        return packed_rows.read_fixed(self.rows, column)

    def texts(self, field: pa.Field) -> _Texts | None:
        column = self.layout.find(field)
        if column is None or not column.is_text:
            return None
        lengths, texts = packed_rows.read_texts(self.rows, column)
        return _Texts(lengths, texts)

    def stored(self, name: str) -> pa.RecordBatch:
        column = self.layout.by_name[name]
        values = _gathered(pa.field(name, column.type), [self._replace(places=None)], {})
        return pa.RecordBatch.from_arrays([values], names=[name])


class _Texts(NamedTuple):
    """Texts or bytes, with their lengths."""

    lengths: np.ndarray
    texts: np.ndarray | list[memoryview]
    """A matrix of bytes, each text at the start of a row, or a list."""

    def pieces(self) -> list[memoryview]:
        if isinstance(self.texts, list):
            return self.texts
        data = memoryview(np.ascontiguousarray(self.texts).data).cast("B")
        starts = range(0, len(data), self.texts.shape[1])
        return [data[at : at + n] for at, n in zip(starts, self.lengths.tolist(), strict=True)]


class RowCache:
    """The rows of all buckets of a topic, by bucket and offset."""

    def __init__(self, buckets: int, folder: str | Path | None) -> None:
        with os_errors_as("create a cache in", Path(folder or tempfile.gettempdir())):
            self._folder = Path(tempfile.mkdtemp(prefix="persisting-replay-", dir=folder))
        self._chunks: list[list[_Chunk]] = [[] for _ in range(buckets)]
        self._index: tuple[np.ndarray, list[_Chunk]] | None = None
        """The first places of all chunks, and the chunks; None after a change."""
        self._layouts: list[Layout] = []
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
        if last.count >= _CHUNK_ROWS or last.rows.nbytes >= _CHUNK_BYTES:
            chunks[-1] = self._stored(last)

    def store(self, bucket: int) -> None:
        """Move what was appended from memory to a file, unless it is little."""
        self._index = None
        chunks = self._chunks[bucket]
        if sum(chunk.rows.nbytes for chunk in chunks if not chunk.is_stored) < _STORED_BYTES:
            return
        while len(chunks) > 1 and _adjoins(chunks[-2], chunks[-1]):
            after, before = chunks.pop(), chunks.pop()
            chunks.append(_joined(before, after))
        for number, chunk in enumerate(chunks):
            if not chunk.is_stored:
                chunks[number] = self._stored(chunk)

    def _stored(self, chunk: _Chunk) -> _Chunk:
        """Move a chunk to files: one of packed rows, one of the columns that cannot be packed."""
        self._files += 1
        path = self._folder / str(self._files)
        layout = packed_rows.layout_of(chunk.rows)
        # One object for equal layouts: they are compared for each sample.
        layout = next((known for known in self._layouts if known == layout), layout)
        if layout is not None and layout not in self._layouts:
            self._layouts.append(layout)
        rest = chunk.rows.drop_columns([] if layout is None else list(layout.by_name))
        stored = _Chunk(chunk.first, rest, chunk.arrivals)
        stored.is_stored, stored.layout = True, layout
        with os_errors_as("write the cache", path):
            if layout is not None:
                stored.paths.append(path.with_suffix(".rows"))
                stored.packed = packed_rows.write(stored.paths[-1], chunk.rows, layout)
            if len(rest.schema):
                stored.paths.append(path.with_suffix(".arrow"))
                stored.rows = _written(stored.paths[-1], rest)
        return stored

    def drop(self, bucket: int, start: int) -> None:
        """Remove chunks whose rows are all before ``start``."""
        chunks = self._chunks[bucket]
        while chunks and chunks[0].end <= start:
            self._index = None
            for path in chunks.pop(0).paths:
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
        by_layout: dict[int, list[_Part]] = {}
        for part in self._located(buckets, offsets):
            by_layout.setdefault(id(part.chunk.layout), []).append(part)
        groups = [(some, _packed(some, len(by_layout) == 1)) for some in by_layout.values()]
        columns = []
        for field in schema:
            sources: list[_Part | _PackedPart] = []
            for some, packed in groups:
                if packed is not None and field.name in packed.layout.by_name:
                    sources.append(packed)
                else:
                    sources += some
            columns.append(_gathered(field, sources, defaults))
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
        # Numbers of 16 bits are sorted much faster.
        small = numbers.astype(np.uint16) if len(firsts) <= _FEW_CHUNKS else numbers
        order = small.argsort(kind="stable")
        rows = (wanted - firsts[numbers])[order]
        cuts = np.bincount(numbers).cumsum().tolist()
        return [
            _Part(chunks[number], rows[start:end], order[start:end])
            for number, (start, end) in enumerate(pairwise([0, *cuts]))
            if start < end
        ]

    def arrivals(self, bucket: int, start: int, end: int) -> np.ndarray:
        """Return the times at which the rows of a range of offsets arrived, in µs of Unix time."""
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
                values += chunk.values(name, low - chunk.first, high - chunk.first)
        return values

    def close(self) -> None:
        self._chunks, self._index = [], None
        self._finalizer()


def _packed(parts: list[_Part], is_all: bool) -> _PackedPart | None:
    """Read the packed columns of parts of one layout; those of all parts are put in order."""
    layout = parts[0].chunk.layout
    if layout is None:
        return None
    rows = np.empty((sum(len(part.rows) for part in parts), layout.row_bytes), np.uint8)
    end = 0
    for part in parts:
        start, end = end, end + len(part.rows)
        # Without a mode, take would copy its result once more.
        part.chunk.packed.take(part.rows, axis=0, out=rows[start:end], mode="clip")
    if len(parts) == 1:
        return _PackedPart(layout, rows, parts[0].places)
    places = np.concatenate([part.places for part in parts])
    if not is_all:
        return _PackedPart(layout, rows, places)
    return _PackedPart(layout, rows.take(_inverse(places), axis=0), None)


def _concatenated(places: list[Any]) -> np.ndarray:
    return np.concatenate(places)


def _inverse(places: np.ndarray) -> np.ndarray:
    result = np.empty(len(places), np.int64)
    result[places] = np.arange(len(places))
    return result


def _gathered(
    field: pa.Field, sources: Sequence[_Part | _PackedPart], defaults: Mapping[str, Any]
) -> pa.Array:
    """Return one column of the wanted rows. Arrow's own take costs several times as much for a few
    rows, so bytes are copied directly."""
    fixed = [source.fixed(field) for source in sources]
    places = [source.places for source in sources]
    if all(values is not None for values in fixed):
        return packed_rows.fixed_array(field.type, _placed(fixed, places))
    texts = [source.texts(field) for source in sources]
    if all(values is not None for values in texts):
        return _text_array(field.type, texts, places)
    schema = pa.schema([field])
    pieces = [align(s.stored(field.name), schema, defaults).column(0) for s in sources]
    joined = pa.concat_arrays(pieces)
    if len(sources) == 1 and places[0] is None:
        return joined
    return joined.take(pa.array(_inverse(_concatenated(places))))


def _placed(pieces: list[Any], places: list[Any]) -> np.ndarray:
    """Join arrays, and put each row at its place."""
    if len(pieces) == 1 and places[0] is None:
        result: np.ndarray = pieces[0]
        return result
    count = sum(map(len, pieces))
    result = np.empty((count, *pieces[0].shape[1:]), pieces[0].dtype)
    for piece, at in zip(pieces, places, strict=True):
        result[at] = piece
    return result


def _text_array(kind: pa.DataType, texts: list[Any], places: list[Any]) -> pa.Array:
    lengths = _placed([piece.lengths for piece in texts], places)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] >= _MOST_TEXT:
        raise StorageError("the texts of this sample take more than 2 GB; sample fewer records")
    length = int(lengths[0])
    if len(texts) == 1 and places[0] is None and isinstance(texts[0].texts, np.ndarray):
        if (lengths == length).all():
            data = pa.py_buffer(np.ascontiguousarray(texts[0].texts[:, :length]))
            return _text_of(kind, offsets, data)
    pieces = [text for some in texts for text in some.pieces()]
    if len(texts) > 1 or places[0] is not None:
        pieces = [pieces[number] for number in _inverse(_concatenated(places)).tolist()]
    return _text_of(kind, offsets, pa.py_buffer(b"".join(pieces)))


def _text_of(kind: pa.DataType, offsets: np.ndarray, data: pa.Buffer) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), data]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)


def _joinable(before: _Chunk, after: _Chunk) -> bool:
    """Whether two chunks in memory become one. Only similar sizes do, so rows are copied rarely."""
    return _adjoins(before, after) and after.count * 2 >= before.count


def _adjoins(before: _Chunk, after: _Chunk) -> bool:
    """Whether two chunks are in memory and can be one."""
    if before.is_stored or after.is_stored or before.end != after.first:
        return False
    return bool(before.rows.schema == after.rows.schema)


def _joined(before: _Chunk, after: _Chunk) -> _Chunk:
    rows = pa.concat_batches([before.rows, after.rows])
    return _Chunk(before.first, rows, np.concatenate([before.arrivals, after.arrivals]))


def _written(path: Path, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Write rows to an Arrow file, and return them as they are mapped from it."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as file:
        file.write_batch(rows)
    mapped = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    for column in mapped.columns:
        for buffer in column.buffers():
            if buffer is not None:
                packed_rows.touch(np.frombuffer(buffer, np.uint8))
    return mapped


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
