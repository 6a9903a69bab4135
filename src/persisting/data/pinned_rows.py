"""Reads pinned rows by their numbers.

The rows of a topic are numbered bucket by bucket, in the order of their offsets; with a condition,
only the rows that match are numbered. Blocking; a handle belongs to one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from persisting.data.order import Blocks
from persisting.data.pin import Pin, check_readable
from persisting.data.selection import Selection
from persisting.errors import InvalidArgument, TableError
from persisting.records import EMPTY, Rules
from persisting.records.arrow import align, merge, no_columns
from persisting.table.view import TableView
from persisting.topic import scan
from persisting.topic.scan import Filter, Slice

_BLOCK_BYTES = 1024 * 1024
_WINDOW_BLOCKS = 32
_LEAST_BLOCK, _MOST_BLOCK = 16, 2048
_SAMPLE_ROWS = 64
_GAP = 64
_SCANNED_ROWS = 4096
_SCANNED_SHARE = 0.25
"""A span of offsets without larger gaps is scanned, which is faster than a take, if it has enough
rows and enough of them are wanted. Beginning a scan costs as much as reading 1,500 rows of 1 KB."""
_TAKEN_ROWS = 8192
"""The rows of one take: fewer would cost more, and more would leave threads without work."""
_THREADS = 3


@dataclass(frozen=True)
class _Read:
    """One read of a bucket, at ascending offsets."""

    view: TableView
    offsets: np.ndarray
    names: list[str]
    is_scanned: bool

    def rows(self) -> pa.RecordBatch:
        offsets = self.offsets
        if not self.is_scanned:
            distinct, places = np.unique(offsets, return_inverse=True)
            rows = self.view.take(distinct.tolist(), self.names)
            return rows if len(distinct) == len(offsets) else rows.take(pa.array(places))
        first, length = int(offsets[0]), int(offsets[-1] - offsets[0]) + 1
        batches = list(self.view.batches(first, length, self.names, rows=length))
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        return rows if len(offsets) == length else rows.take(pa.array(offsets - first))


class PinnedRows:
    """The rows of a pin, with some columns and a condition."""

    def __init__(
        self, pin: Pin, columns: Sequence[str] | None = None, where: str | None = None
    ) -> None:
        self._pin = pin
        with self._explained():
            self._views = [pin.place.view(b, version) for b, version in enumerate(pin.versions)]
            self._fields = _merged(self._views)
            self.schema = _chosen(self._fields, columns)
            self._defaults = pin.place.open().config.options.get("schema_defaults") or {}
            self._selections = None if where is None else self._selected(where)
        counts = [view.rows for view in self._views]
        if self._selections is not None:
            counts = [selection.count for selection in self._selections]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except TableError as exc:
            raise check_readable(self._pin, exc) from exc

    def _selected(self, where: str) -> list[Selection]:
        """Find the rows that match, in every bucket."""
        condition = Filter.checked(where, self._fields)
        selections = []
        for bucket, view in enumerate(self._views):
            selection = Selection(view.start, view.rows)
            if view.dataset is not None:
                part = Slice(str(self._pin.place), bucket, view.start, view.end)
                for batch in scan.read_matching(view, part, condition):
                    selection.add(scan.divided(batch)[2].to_numpy())
            selections.append(selection)
        return selections

    @property
    def size(self) -> int:
        """The number of rows."""
        return int(self._starts[-1])

    @cached_property
    def blocks(self) -> Blocks:
        """The granularity of a shuffle: blocks of about 1 MiB, and windows of 32 blocks.

        A block has at most 2048 rows, so that the first batch of short rows comes soon. Both depend
        on the pinned rows only, and not on columns, so that all readers agree.
        """
        rows = sum(view.rows for view in self._views)
        stored = sum(size.nbytes for view in self._views for size in view.sizes)
        row_bytes = max(1, stored // max(1, rows), self._sampled_bytes())
        block = max(_LEAST_BLOCK, min(_MOST_BLOCK, _BLOCK_BYTES // row_bytes))
        return Blocks(block, _WINDOW_BLOCKS)

    def _sampled_bytes(self) -> int:
        """Return how much memory one of the first rows takes: stored rows may be compressed."""
        for view in self._views:
            if view.rows:
                with self._explained():
                    count = min(view.rows, _SAMPLE_ROWS)
                    batches = list(view.batches(view.start, count))
                return int(sum(batch.nbytes for batch in batches) // count)
        return 1

    def fetch(self, numbers: np.ndarray) -> pa.RecordBatch:
        """Return the rows with these numbers, which must be in ascending order."""
        if not len(self.schema):
            return no_columns(len(numbers))
        reads = list(self._reads(numbers))
        with self._explained():
            if len(reads) < 2:
                batches = [read.rows() for read in reads]
            else:
                batches = list(self._threads.map(_Read.rows, reads))
            return _joined([align(b, self.schema, self._defaults) for b in batches], self.schema)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="persisting-scan")

    def _reads(self, numbers: np.ndarray) -> Iterator[_Read]:
        """Divide a fetch into reads that can run at the same time."""
        names = self.schema.names
        cuts = np.searchsorted(numbers, self._starts)
        for bucket, view in enumerate(self._views):
            inside = numbers[cuts[bucket] : cuts[bucket + 1]] - self._starts[bucket]
            if not len(inside):
                continue
            if self._selections is None:
                offsets = inside + view.start
            else:
                offsets = self._selections[bucket].offsets(inside)
            for span, is_scanned in _spans(offsets):
                yield _Read(view, span, names, is_scanned)


def _merged(views: Sequence[TableView]) -> pa.Schema:
    schema = EMPTY
    for view in views:
        schema = merge(schema, view.schema, Rules(evolving=True))
    return schema


def _chosen(fields: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the fields that are read; raise for a name that the rows do not have."""
    if columns is None:
        return fields
    for name in columns:
        if name not in fields.names:
            names = ", ".join(map(repr, fields.names)) or "none"
            raise InvalidArgument(f"columns names {name!r}; the fields are: {names}")
    return pa.schema([fields.field(name) for name in columns])


def _spans(offsets: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
    """Divide ascending offsets into spans that are scanned (True), and those between them."""
    gaps = np.flatnonzero(np.diff(offsets) > _GAP) + 1
    between: list[np.ndarray] = []
    for span in np.split(offsets, gaps):
        if _is_scanned(span):
            yield from _cut(between)
            between = []
            yield span, True
        else:
            between.append(span)
    yield from _cut(between)


def _cut(spans: list[np.ndarray]) -> Iterator[tuple[np.ndarray, bool]]:
    """Join spans that are taken, and divide them into parts of similar size."""
    if spans:
        offsets = np.concatenate(spans)
        for part in np.array_split(offsets, -(-len(offsets) // _TAKEN_ROWS)):
            yield part, False


def _is_scanned(span: np.ndarray) -> bool:
    length = int(span[-1] - span[0]) + 1
    return length >= _SCANNED_ROWS and len(span) >= length * _SCANNED_SHARE


def _joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=schema)
    return pa.concat_batches(batches)
