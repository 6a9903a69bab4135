"""Keeps the rows of a replay buffer in memory-mapped files, for quick random access.

A table is fast to scan and slow to read in single rows. The cache holds copies of the rows as
Arrow files in a temporary folder. It can be rebuilt from the topic at any time, so nothing of it is
synced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from persisting.fs import os_errors_as
from persisting.records.arrow import align

_CHUNK_ROWS = 65536
_CHUNK_BYTES = 64 * 1024 * 1024
_OFFSET_BITS = 44
"""A bucket and an offset in one number."""


class _Chunk:
    """Rows of consecutive offsets."""

    def __init__(
        self, first: int, rows: pa.RecordBatch, arrivals: np.ndarray, path: Path | None = None
    ) -> None:
        self.first, self.rows, self.arrivals, self.path = first, rows, arrivals, path

    @property
    def end(self) -> int:
        return self.first + int(self.rows.num_rows)


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
            rows = pa.concat_batches([before.rows, after.rows])
            arrivals = np.concatenate([before.arrivals, after.arrivals])
            chunks.append(_Chunk(before.first, rows, arrivals))
        last = chunks[-1]
        if last.rows.num_rows >= _CHUNK_ROWS or last.rows.nbytes >= _CHUNK_BYTES:
            chunks[-1] = self._stored(last)

    def _stored(self, chunk: _Chunk) -> _Chunk:
        self._files += 1
        path = self._folder / f"{self._files}.arrow"
        with os_errors_as("write the cache", path):
            schema = chunk.rows.schema
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
                file.write_batch(chunk.rows)
            rows = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
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
        if self._index is None:
            ordered = [(b, chunk) for b, chunks in enumerate(self._chunks) for chunk in chunks]
            firsts = np.array([(b << _OFFSET_BITS) + chunk.first for b, chunk in ordered])
            self._index = firsts, [chunk for _, chunk in ordered]
        firsts, chunks = self._index
        places = (buckets << _OFFSET_BITS) + offsets
        order = np.argsort(places)
        places = places[order]
        numbers = np.searchsorted(firsts, places, side="right") - 1
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        pieces = []
        for number, inside in zip(
            numbers[np.concatenate([[0], cuts])], np.split(places, cuts), strict=True
        ):
            rows = chunks[number].rows.take(pa.array(inside - firsts[number]))
            pieces.append(align(rows, schema, defaults))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_batches(pieces).take(pa.array(back))

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


def _joinable(before: _Chunk, after: _Chunk) -> bool:
    """Whether two chunks in memory become one. Only similar sizes do, so rows are copied rarely."""
    if before.path is not None or before.end != after.first:
        return False
    if before.rows.schema != after.rows.schema:
        return False
    return bool(after.rows.num_rows * 2 >= before.rows.num_rows)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
