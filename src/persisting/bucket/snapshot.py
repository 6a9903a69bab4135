"""One consistent view of a bucket: a version of the table and the chunks after it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from persisting.bucket.chunk import CONVERT_BYTES, ROWS_AT_ONCE, Chunk, rows_at_once
from persisting.errors import OffsetOutOfRange
from persisting.records.arrow import align
from persisting.table.view import Size, TableView

_PAGE_BYTES = 4 * 1024 * 1024
_SEARCHED_ROWS = 65_536
"""A search for a time reads this many rows at a time instead of halving the range further."""
"""A page of a stream ends once its rows take this many bytes of Arrow data."""


class Page(NamedTuple):
    """Rows of a read with the offset of the first one and the epoch of the bucket.

    A stream hands over pages of the bucket's ``batch_size`` rows. The epoch rises when the bucket
    is restored to an older version: in another epoch the same offset may hold another row.
    """

    first: int
    rows: Any
    epoch: int = 0


class Snapshot:
    """Rows ``start`` to ``end`` at one point in time. Reading it blocks; use a thread."""

    def __init__(
        self,
        view: TableView,
        chunks: Sequence[tuple[Chunk, int]],
        schema: pa.Schema,
        defaults: Mapping[str, Any],
        epoch: int = 0,
    ) -> None:
        """``chunks`` come with their row count at that time: the last one may still grow."""
        self.view, self._chunks = view, chunks
        self.schema, self.defaults = schema, defaults
        self.epoch = epoch
        self.start, self.persisted = view.start, view.end
        self.end = view.end + sum(count for _, count in chunks)

    def first(self, offset: int) -> int:
        """Return where a read from ``offset`` begins; 0 means the earliest row that is left."""
        if offset == 0 or offset >= self.start:
            return max(offset, self.start)
        raise OffsetOutOfRange(
            f"offset {offset} was removed by retention: the first one left is {self.start}. Read "
            "from there, or from 0, which means the earliest"
        )

    def window(self, offset: int, limit: int | None) -> int:
        """Return how many rows a read from ``offset`` returns."""
        left = max(0, self.end - offset)
        return left if limit is None else min(limit, left)

    def rows_within(self, offset: int, nbytes: int) -> int:
        """Return how many rows from ``offset`` take about ``nbytes``, at least one.

        A row counts with the average of its fragment, as stored, or of its chunk.
        """
        parts = [*self.view.sizes, *(Size(count, chunk.nbytes) for chunk, count in self._chunks)]
        rows, end = 0, self.view.start
        for part in parts:
            end += part.rows
            count = min(part.rows, end - offset)
            if count > 0:
                row_bytes = max(1, part.nbytes // part.rows)
                fitting = nbytes // row_bytes
                if fitting < count:
                    return max(1, rows + fitting)
                rows, nbytes = rows + count, nbytes - count * row_bytes
        return max(1, rows)

    def batches(
        self, offset: int, limit: int | None, columns: list[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield a window as Arrow batches of the snapshot's schema, or of some of its columns."""
        schema = self.schema
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        left = self.window(offset, limit)
        if left and offset < self.persisted:
            for batch in self.view.batches(offset, left, schema.names):
                left -= batch.num_rows
                offset += batch.num_rows
                yield align(batch, schema, self.defaults)
        start = self.persisted
        for chunk, count in self._chunks:
            if left and offset < start + count:
                first = offset - start
                batch = chunk.batch_slice(first, min(count, first + left))
                left -= batch.num_rows
                offset += batch.num_rows
                yield align(batch, schema, self.defaults)
            start += count

    def table(self, offset: int, limit: int | None) -> pa.Table:
        """Read a window as one Arrow table."""
        return pa.Table.from_batches(list(self.batches(offset, limit)), schema=self.schema)

    def blocks(
        self, offset: int, limit: int | None, page_rows: int
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield a window as lists of records that a stream cuts into pages of ``page_rows``.

        A list holds whole pages, except the last one, and one that ends early because its rows
        take several megabytes.
        """
        block: list[dict[str, Any]] = []
        nbytes = 0
        for rows, size in self._converted(offset, limit):
            block += rows
            nbytes += size
            rest = len(block) % page_rows
            if nbytes >= _PAGE_BYTES and rest == len(block):
                rest = 0
            if rest < len(block):
                following = block[len(block) - rest :]
                del block[len(block) - rest :]
                yield block
                block, nbytes = following, 0
        if block:
            yield block

    def _converted(
        self, offset: int, limit: int | None
    ) -> Iterator[tuple[list[dict[str, Any]], int]]:
        """Yield a window as lists of records and their bytes, each converted in a short step."""
        for batch in self.batches(offset, limit):
            nbytes = batch.nbytes
            step = rows_at_once(nbytes, batch.num_rows)
            for start in range(0, batch.num_rows, step):
                rows = batch.slice(start, step).to_pylist()
                yield rows, nbytes * len(rows) // batch.num_rows

    def take(self, offsets: Sequence[int], schema: pa.Schema | None = None) -> list[Any]:
        """Return the records at ``offsets``, in that order, with the fields of ``schema``."""
        schema = self.schema if schema is None else schema
        for offset in offsets:
            if not self.start <= offset < self.end:
                raise OffsetOutOfRange(
                    f"there is no offset {offset}; there are {self.start} to {self.end - 1}"
                    if self.end > self.start
                    else f"there is no offset {offset}: nothing is stored"
                )
        stored = [offset for offset in offsets if offset < self.persisted]
        persisted: dict[int, Any] = {}
        for start in range(0, len(stored), ROWS_AT_ONCE):
            part = stored[start : start + ROWS_AT_ONCE]
            batch = align(self.view.take(part, schema.names), schema, self.defaults)
            persisted |= zip(part, batch.to_pylist(), strict=True)
        return [
            persisted[offset] if offset in persisted else self._buffered(offset, schema)
            for offset in offsets
        ]

    def _buffered(self, offset: int, schema: pa.Schema) -> Any:
        firsts = self._firsts
        index = bisect_right(firsts, offset) - 1
        row = offset - firsts[index]
        batch = self._chunks[index][0].batch_slice(row, row + 1)
        return align(batch, schema, self.defaults).to_pylist()[0]

    @cached_property
    def _firsts(self) -> list[int]:
        """The first offset of each chunk."""
        return list(accumulate((count for _, count in self._chunks), initial=self.persisted))[:-1]

    def buffered_arrivals(self) -> np.ndarray:
        """Return the time at which each buffered row was accepted, in µs of Unix time."""
        times = [chunk.arrivals(count) for chunk, count in self._chunks]
        return np.concatenate(times) if times else np.zeros(0, "int64")

    @property
    def buffer_key(self) -> tuple[tuple[Chunk, int], ...]:
        """Two snapshots with equal keys have the same buffered rows."""
        return tuple(self._chunks)

    def records(self, offset: int, limit: int | None) -> list[dict[str, Any]]:
        """Read a window as records."""
        records: list[dict[str, Any]] = []
        for rows, _ in self._converted(offset, limit):
            records += rows
        return records

    def offset_at(self, timestamp: int) -> int:
        """Return the first offset whose record arrived at ``timestamp`` (µs of Unix time) or later.

        Arrival times never decrease from one record to the next.
        """
        low, high = self.start, self.persisted
        while high - low > _SEARCHED_ROWS:
            middle = (low + high) // 2
            if self.view.arrival(middle) < timestamp:
                low = middle + 1
            else:
                high = middle
        if low < high:
            low += int(np.searchsorted(self.view.arrivals(low, high - low), timestamp))
        for chunk, count in self._chunks if low == self.persisted else ():
            if chunk.arrival >= timestamp:
                low += int(np.searchsorted(chunk.arrivals(count), timestamp))
                break
            low += count
        return low

    def arrival_of(self, offset: int) -> int:
        """Return the time at which a record arrived, in µs of Unix time; 0 if it is not there."""
        if self.start <= offset < self.persisted:
            return self.view.arrival(offset)
        first = self.persisted
        for chunk, count in self._chunks:
            if first <= offset < first + count:
                return int(chunk.arrivals(count)[offset - first])
            first += count
        return 0

    def is_quick(self, offset: int, limit: int | None) -> bool:
        """Whether a read needs no disk and so few conversions that a thread would cost more."""
        if offset < self.persisted:
            return False
        rows = self.window(offset, limit)
        if rows > ROWS_AT_ONCE // 10 or rows * len(self.schema) > 2 * ROWS_AT_ONCE:
            return rows == 0
        size = sum(chunk.nbytes for chunk, _ in islice(self._chunks, 100))
        return len(self._chunks) <= 100 and size <= CONVERT_BYTES
