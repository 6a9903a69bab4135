"""One version of the table, to read from.

A view never changes: a reader that holds one sees the same rows while flushes continue. Its offsets
count from the first record that the bucket ever had; retention removed the rows before ``start``,
and the first row of the table is the one at ``start``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from persisting.records.field_names import ARRIVAL
from persisting.table import layout
from persisting.table.lance_errors import translated

SCAN_ROWS = 4096
"""Rows per batch of a scan; bounds what a reader holds in memory."""

_PAGE_ROWS = 2048
_AHEAD_PAGES = 8
_AHEAD_BYTES = 1024 * 1024


class _Ahead(NamedTuple):
    """Rows that were read ahead, because a reader reads page after page."""

    first: int
    names: tuple[str, ...]
    rows: pa.RecordBatch

    def page(self, offset: int, limit: int, names: tuple[str, ...]) -> pa.RecordBatch | None:
        start = offset - self.first
        if names != self.names or start < 0 or start + limit > self.rows.num_rows:
            return None
        return self.rows.slice(start, limit)


class FragmentSize(NamedTuple):
    """The size of a fragment."""

    rows: int
    nbytes: int


def sizes_of(fragments: Any) -> tuple[FragmentSize, ...]:
    """The sizes of fragments, given as metadata objects."""
    return tuple(
        FragmentSize(f.physical_rows, sum(file.file_size_bytes or 0 for file in f.files))
        for f in fragments
    )


class TableView:
    """The rows of one version; an empty view stands for a table that does not exist yet."""

    def __init__(
        self,
        dataset: Any | None,
        schema: pa.Schema,
        sizes: tuple[FragmentSize, ...] = (),
        start: int = 0,
    ) -> None:
        self.dataset, self.schema, self.sizes, self.start = dataset, schema, sizes, start
        self.version = dataset.version if dataset is not None else 0
        self.rows = sum(size.rows for size in sizes)
        self.end = start + self.rows
        self._ahead: _Ahead | None = None
        self._after_last = -1
        """Where the last page ended. Threads may share a view: a race costs only an extra read."""

    @cached_property
    def fragments(self) -> list[Any]:
        """The fragments' metadata objects, in the order of their rows."""
        if self.dataset is None:
            return []
        return [fragment.metadata for fragment in self.dataset.get_fragments()]

    @cached_property
    def _firsts(self) -> dict[int, int]:
        """The offset of the first row of each fragment, by fragment id."""
        firsts, offset = {}, self.start
        for fragment, size in zip(self.fragments, self.sizes, strict=True):
            firsts[fragment.id] = offset
            offset += size.rows
        return firsts

    def offsets_of(self, addresses: pa.ChunkedArray) -> list[int]:
        """The offsets of rows, given by Lance's row addresses."""
        numbers = addresses.to_numpy()
        fragments, within = numbers >> np.uint64(32), numbers & np.uint64(0xFFFFFFFF)
        return [
            self._firsts[fragment] + row
            for fragment, row in zip(fragments.tolist(), within.tolist(), strict=True)
        ]

    def arrival(self, offset: int) -> int:
        """The arrival time of the row at ``offset``, in µs of Unix time."""
        assert self.dataset is not None
        position = offset - self.start
        with translated("read", self.dataset.uri):
            row = self.dataset.scanner(columns=[ARRIVAL], offset=position, limit=1).to_table()
            return int(row.column(0).cast("int64")[0].as_py())

    def arrivals(self, offset: int, count: int) -> np.ndarray:
        """The arrival times of ``count`` rows from ``offset`` on, in µs of Unix time."""
        assert self.dataset is not None
        position = offset - self.start
        with translated("read", self.dataset.uri):
            rows = self.dataset.scanner(columns=[ARRIVAL], offset=position, limit=count).to_table()
            return rows.column(0).cast("int64").to_numpy()

    def arrivals_at(self, offsets: Sequence[int]) -> list[int]:
        """The arrival times of the rows at some offsets, in µs of Unix time."""
        assert self.dataset is not None
        with translated("read", self.dataset.uri):
            rows = self.dataset.take([offset - self.start for offset in offsets], [ARRIVAL])
            times: list[int] = rows.column(0).cast("int64").to_pylist()
            return times

    def falling_arrival(self) -> int | None:
        """The first offset whose row arrived earlier than the row before it, or None."""
        if self.dataset is None:
            return None
        offset, last = self.start, 0
        with translated("read", self.dataset.uri):
            for batch in self.dataset.scanner(columns=[ARRIVAL], scan_in_order=True).to_batches():
                times = batch.column(0).cast("int64").to_numpy()
                falls = np.flatnonzero(np.diff(times, prepend=last) < 0)
                if len(falls):
                    return offset + int(falls[0])
                offset, last = offset + len(times), int(times[-1]) if len(times) else last
        return None

    def batches(
        self,
        offset: int,
        limit: int,
        names: list[str] | None = None,
        *,
        rows: int = SCAN_ROWS,
        arrival: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Rows ``offset`` to ``offset + limit`` in order, with the fields ``names`` (None: all).

        With ``arrival`` the last column is the arrival time of each row.
        """
        limit = min(limit, self.end - offset)
        if limit <= 0 or self.dataset is None:
            return
        schema = self._schema_of(names)
        page = None if arrival or limit > _PAGE_ROWS else self._page(offset, limit, schema)
        if page is not None:
            yield page
        else:
            yield from self._scan(offset, limit, schema, rows, arrival=arrival)

    def _page(self, offset: int, limit: int, schema: pa.Schema) -> pa.RecordBatch | None:
        """Return a page from the rows read ahead; read ahead if the page follows the previous one.

        None if the page has to be scanned by itself.
        """
        names, follows = tuple(schema.names), offset == self._after_last and len(schema) > 0
        self._after_last = offset + limit
        page = None if self._ahead is None else self._ahead.page(offset, limit, names)
        if page is not None or not follows:
            return page
        stored = sum(size.nbytes for size in self.sizes) // max(1, self.rows)
        count = min(_AHEAD_PAGES * limit, _AHEAD_BYTES // max(1, stored), self.end - offset)
        if count <= limit:
            return None
        rows = pa.concat_batches(list(self._scan(offset, count, schema, count)))
        self._ahead = _Ahead(offset, names, rows)
        return rows.slice(0, limit)

    def _scan(
        self, offset: int, limit: int, schema: pa.Schema, rows: int, *, arrival: bool = False
    ) -> Iterator[pa.RecordBatch]:
        assert self.dataset is not None
        with translated("read", self.dataset.uri):
            scanner = self.dataset.scanner(
                columns=self._columns(schema, arrival=arrival),
                offset=offset - self.start,
                limit=limit,
                batch_size=min(limit, rows),
                scan_in_order=True,
            )
            found = 0
            for batch in scanner.to_batches():
                found += batch.num_rows
                records = layout.to_logical(batch, schema)
                if arrival:
                    records = records.append_column(layout.ARRIVAL_FIELD, batch.column(ARRIVAL))
                yield records
            if found != limit:
                raise OSError(f"found {found} of {limit} rows from offset {offset}")

    def take(self, offsets: Sequence[int], names: list[str] | None = None) -> pa.RecordBatch:
        """The rows at ``offsets``, in that order."""
        assert self.dataset is not None
        schema = self._schema_of(names)
        with translated("read", self.dataset.uri):
            positions = [offset - self.start for offset in offsets]
            rows = self.dataset.take(positions, columns=self._columns(schema))
            batches = rows.combine_chunks().to_batches()
            return layout.to_logical(batches[0], schema)

    def _schema_of(self, names: list[str] | None) -> pa.Schema:
        return pa.schema([f for f in self.schema if names is None or f.name in names])

    def _columns(self, schema: pa.Schema, *, arrival: bool = False) -> list[str]:
        present = set(self.dataset.schema.names)  # type: ignore[union-attr]
        columns = [f.name for f in schema if f.name in present]
        return [*columns, ARRIVAL] if arrival or not columns else columns
