"""Accepted records on their way: the pieces that the buffer, the log and a flush handle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from persisting.errors import SchemaError
from persisting.records import RecordEncoder, arrow
from persisting.records.evolution import integers_become_floats

ROWS_AT_ONCE = 1000
"""Rows converted in one go; the interpreter is held for about a millisecond."""

_ARROW_ROWS = 65536
CONVERT_BYTES = 1 << 20
"""Arrow bytes made from, or turned into, Python objects in one go."""


class Chunk:
    """Records of one schema, as rows that no one else can change or as an Arrow batch."""

    __slots__ = (
        "_batch",
        "_open",
        "_rows",
        "arrival",
        "count",
        "nbytes",
        "sequence",
        "shaper",
        "times",
    )

    def __init__(
        self,
        shaper: RecordEncoder,
        *,
        rows: list[dict[str, Any]] | None = None,
        batch: pa.RecordBatch | None = None,
        nbytes: int = 0,
    ) -> None:
        self.shaper = shaper
        self._rows, self._batch = rows, batch
        self.count = len(rows) if rows is not None else batch.num_rows  # type: ignore[union-attr]
        self.nbytes = nbytes or (batch.nbytes if batch is not None else 0)
        self.arrival = 0
        """When the last of the records was accepted, in microseconds of Unix time."""
        self.times: list[int] | np.ndarray | None = None
        """The same for each record, where they were accepted at different times."""
        self.sequence = 0
        """Where the log holds them, 0 without a log."""
        self._open = rows is not None

    @property
    def schema(self) -> pa.Schema:
        return self.shaper.schema

    def arrivals(self, count: int) -> np.ndarray:
        """When each of the first ``count`` records was accepted; they never fall."""
        if self.times is None:
            return np.full(count, self.arrival, "int64")
        return np.asarray(self.times[:count], "int64")

    @property
    def batch(self) -> pa.RecordBatch:
        """The records as Arrow."""
        if self._batch is None:
            assert self._rows is not None
            self._batch, self._rows = self.shaper.to_batch(self._rows), None
        return self._batch

    def batch_slice(self, start: int, stop: int) -> pa.RecordBatch:
        """Some of the records as Arrow, without converting the others."""
        rows = self._rows
        if rows is not None:
            return self.shaper.to_batch(rows[start:stop])
        return self.batch.slice(start, stop - start)

    @property
    def is_row(self) -> bool:
        """Whether rows may still join it."""
        return self._open

    def can_take(self, shaper: RecordEncoder) -> bool:
        """Whether a row of this shaper may still be added."""
        small = self.count < ROWS_AT_ONCE and self.nbytes < _MAX_BATCH_BYTES
        return self._open and self.shaper is shaper and small

    def add(self, row: dict[str, Any], nbytes: int, arrival: int) -> None:
        """Add a row that was accepted at ``arrival``, after those before it."""
        assert self._rows is not None
        if self.times is None:
            self.times = []
        assert isinstance(self.times, list)
        self._rows.append(row)
        self.times.append(arrival)
        self.arrival = arrival
        self.count += 1
        self.nbytes += nbytes

    def absorb(self, other: Chunk) -> None:
        """Add the rows of another open chunk."""
        assert self._rows is not None
        assert other._rows is not None
        self._rows += other._rows
        self.count += other.count
        self.nbytes += other.nbytes

    def seal(self) -> None:
        """Take no more rows."""
        self._open = False


@dataclass(frozen=True)
class Prepared:
    """Checked and converted records, not yet accepted.

    ``base`` is the shaper they were checked against; if the bucket has moved on, they are prepared
    again. ``shaper`` is the one after them.
    """

    base: RecordEncoder
    shaper: RecordEncoder
    chunks: list[Chunk]
    large: frozenset[str] = frozenset()
    """Fields with whole numbers that could not become floats."""

    @property
    def widened(self) -> list[str]:
        """Fields whose whole numbers become floats."""
        return [old.name for old, new in self._changes() if integers_become_floats(old.type, new)]

    @property
    def unsearchable(self) -> list[str]:
        """Fields whose vectors become plain lists."""
        return [
            old.name
            for old, new in self._changes()
            if pa.types.is_fixed_size_list(old.type) and pa.types.is_list(new)
        ]

    def _changes(self) -> Iterator[tuple[pa.Field, pa.DataType]]:
        if self.shaper is not self.base:
            for field in self.base.schema:
                yield field, self.shaper.schema.field(field.name).type

    @property
    def rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


def copy_row(shaper: RecordEncoder, record: Any) -> tuple[dict[str, Any], int] | None:
    """A copy of a plain record and its rough size; None if it needs :func:`prepare`."""
    size = shaper.known_row(record)
    return None if size is None or size > _MAX_BATCH_BYTES else (dict(record), size)


def prepare(shaper: RecordEncoder, records: Sequence[Any]) -> Prepared:
    """Check and convert records; raises :class:`SchemaError` and keeps nothing of them.

    In slices, so that Arrow's converter, which holds the interpreter, is never at it for long.
    """
    after, taken = shaper, []
    start, step = 0, shaper.slice_rows
    while start < len(records):
        some = records if not start and len(records) <= step else records[start : start + step]
        alike = after.batch_of_alike(some)
        nbytes = alike.get_total_buffer_size() if alike is not None else 0
        if alike is not None and nbytes <= _MAX_BATCH_BYTES:
            batches = [(alike, nbytes)]
        else:
            rows, after = after.take(some)
            batches = [(batch, batch.nbytes) for batch in _batches(after, rows)]
            nbytes = sum(size for _, size in batches)
        taken.append((after, batches))
        start += len(some)
        step = after.slice_rows = rows_at_once(nbytes, len(some))
    chunks = []
    for at, batches in taken:
        for batch, size in batches:
            if at is not after:
                batch, size = arrow.align(batch, after.schema, after.rules.defaults), 0
            chunks.append(Chunk(after, batch=batch, nbytes=size))
    return Prepared(shaper, after, _checked(chunks), _large(after, chunks))


def rows_at_once(nbytes: int, rows: int) -> int:
    """Rows like these that convert quickly enough to hold the interpreter meanwhile."""
    return max(1, min(ROWS_AT_ONCE, CONVERT_BYTES * rows // max(1, nbytes)))


def prepare_arrow(shaper: RecordEncoder, data: Any) -> Prepared:
    """Check an Arrow table against the schema."""
    table = arrow.accept(data, shaper.schema)
    schema = arrow.merge(shaper.schema, table.schema, shaper.rules, defined=shaper.defined)
    unchanged = schema is shaper.schema and shaper.defined
    after = shaper if unchanged else RecordEncoder(schema, shaper.rules)
    chunks = []
    batches = table.to_batches(max_chunksize=_ARROW_ROWS)
    if not table.schema.names and data.num_rows:
        batches = [arrow.no_columns(data.num_rows)]
    for batch in (part for whole in batches for part in _parts(whole)):
        try:
            aligned = arrow.align(batch, schema, shaper.rules.defaults)
        except pa.ArrowException as exc:
            raise SchemaError(f"the Arrow data does not fit the schema exactly: {exc}") from exc
        chunks.append(Chunk(after, batch=aligned))
    return Prepared(shaper, after, _checked(chunks), _large(after, chunks))


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in slices that the log and the table take easily."""
    if batch.num_rows < 2 or batch.nbytes <= _MAX_BATCH_BYTES:
        yield from [batch] if batch.num_rows else []
        return
    middle = batch.num_rows // 2
    yield from _parts(batch.slice(0, middle))
    yield from _parts(batch.slice(middle))


def _checked(chunks: list[Chunk]) -> list[Chunk]:
    """The chunks, or raise where a record is too large for a frame of the log."""
    for chunk in chunks:
        if chunk.nbytes > _MAX_RECORD_BYTES:
            raise SchemaError(
                f"a record takes {chunk.nbytes:,} bytes, more than the {_MAX_RECORD_BYTES:,} that "
                "one may have; divide it"
            )
    return chunks


def _large(shaper: RecordEncoder, chunks: list[Chunk]) -> frozenset[str]:
    if not shaper.rules.evolving:
        return frozenset()
    return frozenset(
        name
        for chunk in chunks
        for name in shaper.integer_columns
        if arrow.beyond_float(chunk.batch.column(name))
    )


def _batches(shaper: RecordEncoder, rows: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    """The rows as batches; more than one where a single array cannot hold them."""
    try:
        batch = shaper.to_batch(rows)
        if batch.nbytes <= _MAX_BATCH_BYTES or len(rows) == 1:
            yield batch
            return
    except SchemaError as exc:
        if not isinstance(exc.__cause__, pa.ArrowCapacityError) or len(rows) == 1:
            raise
    middle = len(rows) // 2
    yield from _batches(shaper, rows[:middle])
    yield from _batches(shaper, rows[middle:])


_MAX_BATCH_BYTES = 64 * 1024 * 1024
_MAX_RECORD_BYTES = 2_000_000_000
