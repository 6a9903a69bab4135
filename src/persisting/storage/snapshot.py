"""One consistent view of a bucket: a version of the table and the chunks behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from persisting.schema.arrow import align
from persisting.storage.chunk import CONVERT_BYTES, ROWS_AT_ONCE, Chunk, rows_at_once
from persisting.table.view import TableView


class Snapshot:
    """Rows ``0`` to ``end`` as they stood at one moment. Reading it blocks; use a thread."""

    def __init__(
        self,
        view: TableView,
        chunks: Sequence[tuple[Chunk, int]],
        schema: pa.Schema,
        defaults: Mapping[str, Any],
    ) -> None:
        """``chunks`` come with their count at that moment: the last one may still grow."""
        self._view, self._chunks = view, chunks
        self.schema, self._defaults = schema, defaults
        self.persisted = view.rows
        self.end = view.rows + sum(count for _, count in chunks)

    def window(self, offset: int, limit: int | None) -> int:
        """How many rows a read from ``offset`` finds."""
        left = max(0, self.end - offset)
        return left if limit is None else min(limit, left)

    def batches(
        self, offset: int, limit: int | None, columns: list[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a window as Arrow batches of the snapshot's schema, or some columns of it."""
        schema = self.schema
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        left = self.window(offset, limit)
        if left and offset < self.persisted:
            for batch in self._view.batches(offset, left, schema.names):
                left -= batch.num_rows
                offset += batch.num_rows
                yield align(batch, schema, self._defaults)
        start = self.persisted
        for chunk, count in self._chunks:
            if left and offset < start + count:
                first = offset - start
                batch = chunk.batch_slice(first, min(count, first + left))
                left -= batch.num_rows
                offset += batch.num_rows
                yield align(batch, schema, self._defaults)
            start += count

    def table(self, offset: int, limit: int | None) -> pa.Table:
        """A window as one Arrow table."""
        return pa.Table.from_batches(list(self.batches(offset, limit)), schema=self.schema)

    def pages(self, offset: int, limit: int | None) -> Iterator[list[dict[str, Any]]]:
        """A window as lists of records, each made in one short step."""
        for batch in self.batches(offset, limit):
            step = rows_at_once(batch.nbytes, batch.num_rows)
            for start in range(0, batch.num_rows, step):
                yield batch.slice(start, step).to_pylist()

    def records(self, offset: int, limit: int | None) -> list[dict[str, Any]]:
        """A window as records."""
        found: list[dict[str, Any]] = []
        for page in self.pages(offset, limit):
            found += page
        return found

    def offset_at(self, timestamp: int) -> int:
        """The first offset whose record arrived at ``timestamp`` (µs of Unix time) or later.

        Times of arrival never fall from one record to the next.
        """
        low, high = 0, self.persisted
        while low < high:
            middle = (low + high) // 2
            if self._view.arrival(middle) < timestamp:
                low = middle + 1
            else:
                high = middle
        for chunk, count in self._chunks if low == self.persisted else ():
            if chunk.arrival >= timestamp:
                if chunk.arrivals is not None:
                    low += int(np.searchsorted(chunk.arrivals, timestamp))
                break
            low += count
        return low

    def is_quick(self, offset: int, limit: int | None) -> bool:
        """Whether a read needs no disk and few conversions, so that a thread costs more."""
        if offset < self.persisted:
            return False
        rows = self.window(offset, limit)
        if rows > ROWS_AT_ONCE // 10:
            return rows == 0
        size = sum(chunk.nbytes for chunk, _ in islice(self._chunks, 100))
        return len(self._chunks) <= 100 and size <= CONVERT_BYTES
