"""Chunks of accepted records: what the buffer, the log and a flush handle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persisting.errors import SchemaError
from persisting.records import RecordEncoder, arrow
from persisting.records.evolution import integers_become_floats, is_float_list, is_vector
from persisting.records.record_columns import RecordColumns

ROWS_AT_ONCE = 1000
"""Rows converted in one step, which holds the interpreter for about a millisecond."""

_ARROW_ROWS = 65536
CONVERT_BYTES = 1 << 20
"""Arrow bytes converted from or to Python objects in one step."""


class Chunk:
    """Records of one schema, as private copies of rows or as an Arrow batch."""

    __slots__ = (
        "_batch",
        "_open",
        "_rows",
        "arrival",
        "count",
        "encoder",
        "first_sequence",
        "log_bytes",
        "nbytes",
        "sequence",
        "times",
    )

    def __init__(
        self,
        encoder: RecordEncoder,
        *,
        rows: list[dict[str, Any]] | None = None,
        batch: pa.RecordBatch | None = None,
        nbytes: int = 0,
    ) -> None:
        self.encoder = encoder
        self._rows, self._batch = rows, batch
        self.count = len(rows) if rows is not None else batch.num_rows  # type: ignore[union-attr]
        self.nbytes = nbytes or (batch.nbytes if batch is not None else 0)
        self.arrival = 0
        """When the last of the records was accepted, in microseconds of Unix time."""
        self.times: list[int] | np.ndarray | None = None
        """The same for each record, where they were accepted at different times."""
        self.sequence = 0
        """Log sequence of the last frame of their entry, 0 without a log."""
        self.first_sequence = 0
        """The same for the first of the records."""
        self.log_bytes = 0
        """Bytes that they take in the log."""
        self._open = rows is not None

    @property
    def schema(self) -> pa.Schema:
        return self.encoder.schema

    def arrivals(self, count: int) -> np.ndarray:
        """Return the time at which each of the first ``count`` records was accepted; never
        decreasing."""
        if self.times is None:
            return np.full(count, self.arrival, "int64")
        return np.asarray(self.times[:count], "int64")

    @property
    def batch(self) -> pa.RecordBatch:
        """The records as Arrow."""
        if self._batch is None:
            assert self._rows is not None
            self._batch, self._rows = self.encoder.to_batch(self._rows), None
        return self._batch

    def batch_slice(self, start: int, stop: int) -> pa.RecordBatch:
        """Return some of the records as Arrow without converting the others."""
        rows = self._rows
        if rows is not None:
            return self.encoder.to_batch(rows[start:stop])
        return self.batch.slice(start, stop - start)

    @property
    def is_open(self) -> bool:
        """Whether rows may still be added."""
        return self._open

    def can_take(self, encoder: RecordEncoder, count: int, nbytes: int) -> bool:
        """Whether ``count`` more rows of this encoder may be added."""
        if not self._open or self.encoder is not encoder:
            return False
        small = self.count + count <= ROWS_AT_ONCE and self.nbytes + nbytes <= MAX_BATCH_BYTES
        return small or not self.count

    @property
    def rows(self) -> list[dict[str, Any]] | None:
        """The records as plain rows, None once they are Arrow."""
        return self._rows

    def slice(self, start: int, count: int) -> Chunk:
        """Return some of the records as another chunk that shares their memory."""
        share = self.nbytes * count // max(1, self.count)
        return Chunk(self.encoder, batch=self.batch.slice(start, count), nbytes=max(1, share))

    def without(self, count: int) -> Chunk:
        """Return the records after the first ``count``, as a chunk that takes no more rows."""
        kept = self.count - count
        share = max(1, self.nbytes * kept // self.count)
        if self._rows is not None:
            rest = Chunk(self.encoder, rows=self._rows[count : self.count], nbytes=share)
            rest.seal()
        else:
            rest = Chunk(self.encoder, batch=self.batch.slice(count, kept), nbytes=share)
        rest.arrival = self.arrival
        rest.times = None if self.times is None else self.times[count : self.count]
        rest.logged(self.sequence, max(1, self.log_bytes * kept // self.count))
        return rest

    def logged(self, sequence: int, log_bytes: int) -> None:
        """Note the last sequence of the entry that holds the records, and their share of it."""
        self.sequence = self.first_sequence = sequence
        self.log_bytes = log_bytes

    def add(self, row: dict[str, Any], nbytes: int, arrival: int) -> None:
        """Add a row that was accepted at ``arrival``, not before the last one."""
        assert self._rows is not None
        if self.times is None:
            self.times = []
        assert isinstance(self.times, list)
        self._rows.append(row)
        self.times.append(arrival)
        self.arrival = arrival
        self.count += 1
        self.nbytes += nbytes

    def join(self, other: Chunk) -> None:
        """Add the rows of another open chunk that is accepted at the same time."""
        assert self._rows is not None
        assert other._rows is not None
        self._rows += other._rows
        self.count += other.count
        self.nbytes += other.nbytes

    def append(self, row: dict[str, Any], nbytes: int) -> None:
        """Add a row that is accepted at the same time."""
        assert self._rows is not None
        self._rows.append(row)
        self.count += 1
        self.nbytes += nbytes

    def absorb(self, other: Chunk, arrival: int) -> None:
        """Add the rows of another open chunk, accepted at ``arrival``."""
        assert self._rows is not None
        assert other._rows is not None
        if self.times is None:
            self.times = []
        assert isinstance(self.times, list)
        self._rows += other._rows
        self.times += [arrival] * other.count
        self.arrival, self.sequence = arrival, other.sequence
        self.first_sequence = self.first_sequence or other.first_sequence
        self.log_bytes += other.log_bytes
        self.count += other.count  # last: readers take as many rows as are counted
        self.nbytes += other.nbytes

    def seal(self) -> None:
        """Take no more rows."""
        self._open = False


class Loosened(NamedTuple):
    """A field whose vectors a put would turn into plain lists."""

    name: str
    size: int
    vectors: int
    """How many vectors of that size the put has before the first other value."""
    other: str
    """The first other value, in words."""


@dataclass(frozen=True)
class Prepared:
    """Checked and converted records, not yet accepted.

    ``base`` is the encoder they were checked against; if the bucket has changed its encoder since,
    they are prepared again. ``encoder`` is the one after these records.
    """

    base: RecordEncoder
    encoder: RecordEncoder
    chunks: list[Chunk]
    large: frozenset[str] = frozenset()
    """Fields with whole numbers that a float cannot represent."""
    loosened: tuple[Loosened, ...] = ()
    """Fields whose vectors become lists, if the rules keep vectors."""

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
        if self.encoder is not self.base:
            for field in self.base.schema:
                yield field, self.encoder.schema.field(field.name).type

    @property
    def rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


def copy_row(encoder: RecordEncoder, record: Any) -> tuple[dict[str, Any], int] | None:
    """Return a copy of a plain record and its rough size; None if it needs :func:`prepare`."""
    size = encoder.known_row(record)
    return None if size is None or size > MAX_BATCH_BYTES else (dict(record), size)


def prepare(encoder: RecordEncoder, records: Sequence[Any]) -> Prepared:
    """Check and convert records, or raise :class:`SchemaError`.

    Works in slices, because Arrow's converter holds the interpreter.
    """
    after, converted = encoder, []
    start, step = 0, encoder.slice_rows
    while start < len(records):
        part = records if not start and len(records) <= step else records[start : start + step]
        alike = after.batch_of_alike(part)
        nbytes = alike.get_total_buffer_size() if alike is not None else 0
        if alike is not None and nbytes <= MAX_BATCH_BYTES:
            batches = [(alike, nbytes)]
        else:
            rows, after = after.take(part)
            batches = [(batch, batch.nbytes) for batch in _batches(after, rows)]
            nbytes = sum(size for _, size in batches)
        converted.append((after, batches))
        start += len(part)
        step = after.slice_rows = rows_at_once(nbytes, len(part))
    chunks = []
    for encoder_then, batches in converted:
        for batch, size in batches:
            if encoder_then is not after:
                batch, size = arrow.align(batch, after.schema, after.rules.defaults), 0
            chunks.append(Chunk(after, batch=batch, nbytes=size))
    return Prepared(
        encoder,
        after,
        _check_sizes(chunks),
        _large_int_fields(after, chunks),
        tuple(_loosened(encoder, after, records)),
    )


def rows_at_once(nbytes: int, rows: int) -> int:
    """Return how many rows of this size to convert in one step, which holds the interpreter."""
    return max(1, min(ROWS_AT_ONCE, CONVERT_BYTES * rows // max(1, nbytes)))


def prepare_arrow(encoder: RecordEncoder, data: Any) -> Prepared:
    """Check Arrow data and align it with the schema, or raise :class:`SchemaError`."""
    table = arrow.accept(data, encoder.schema)
    schema = arrow.merge(encoder.schema, table.schema, encoder.rules, defined=encoder.defined)
    unchanged = schema is encoder.schema and encoder.defined
    after = encoder if unchanged else RecordEncoder(schema, encoder.rules)
    chunks = []
    batches = table.to_batches(max_chunksize=_ARROW_ROWS)
    if not table.schema.names and data.num_rows:
        batches = [arrow.no_columns(data.num_rows)]
    for batch in (part for whole in batches for part in _parts(whole)):
        try:
            aligned = arrow.align(batch, schema, encoder.rules.defaults)
        except pa.ArrowException as exc:
            raise SchemaError(f"the Arrow data does not fit the schema exactly: {exc}") from exc
        chunks.append(Chunk(after, batch=aligned))
    return Prepared(
        encoder,
        after,
        _check_sizes(chunks),
        _large_int_fields(after, chunks),
        tuple(_loosened_arrow(encoder, after, table)),
    )


def columns_fit(encoder: RecordEncoder, columns: RecordColumns) -> bool:
    """Whether columns have exactly the fields of the schema."""
    given, schema = columns.batch.schema, encoder.schema
    if not encoder.defined:
        return False
    return given.equals(schema) or (given.names == schema.names and given.types == schema.types)


def prepare_columns(encoder: RecordEncoder, columns: RecordColumns) -> Prepared:
    """Check records that arrive as Arrow columns, or raise :class:`SchemaError`.

    Columns of exactly the schema are what the records would be converted to.
    """
    if not columns_fit(encoder, columns):
        return prepare(encoder, columns.to_records())
    batch = columns.batch
    if not batch.schema.equals(encoder.schema, check_metadata=True):
        batch = pa.RecordBatch.from_arrays(batch.columns, schema=encoder.schema)
    nbytes = batch.nbytes
    if batch.num_rows and nbytes <= MAX_BATCH_BYTES:
        chunks = [Chunk(encoder, batch=batch, nbytes=nbytes)]
    else:
        chunks = [Chunk(encoder, batch=part) for part in _parts(batch)]
    return Prepared(encoder, encoder, _check_sizes(chunks), _large_int_fields(encoder, chunks))


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into slices that fit into a frame of the log."""
    if batch.num_rows < 2 or batch.nbytes <= MAX_BATCH_BYTES:
        yield from [batch] if batch.num_rows else []
        return
    middle = batch.num_rows // 2
    yield from _parts(batch.slice(0, middle))
    yield from _parts(batch.slice(middle))


def _check_sizes(chunks: list[Chunk]) -> list[Chunk]:
    """Return the chunks, or raise if a record is too large for a frame of the log."""
    for chunk in chunks:
        if chunk.nbytes > _MAX_RECORD_BYTES:
            raise SchemaError(
                f"a record takes {chunk.nbytes:,} bytes, more than the {_MAX_RECORD_BYTES:,} that "
                "one record may have; split it"
            )
    return chunks


def _large_int_fields(encoder: RecordEncoder, chunks: list[Chunk]) -> frozenset[str]:
    if not encoder.rules.evolving:
        return frozenset()
    return frozenset(
        name
        for chunk in chunks
        for name in encoder.integer_columns
        if arrow.beyond_float(chunk.batch.column(name))
    )


def _loosened(
    before: RecordEncoder, after: RecordEncoder, records: Sequence[Any]
) -> Iterator[Loosened]:
    """Yield the fields that hold vectors, before or at first in these records, and lists later."""
    if before is after or not after.rules.keep_vectors:
        return
    for field in after.schema:
        known = _type_in(before.schema, field.name)
        if not is_float_list(field.type) or (known is not None and is_float_list(known)):
            continue
        values = [value for record in records if (value := record.get(field.name)) is not None]
        if known is not None and is_vector(known):
            size = known.list_size
        else:
            size = _vector_length(values[0]) if values else None
        if not size:
            continue  # the field begins as a list
        others = ((n, v) for n, v in enumerate(values) if _vector_length(v) != size)
        for vectors, value in islice(others, 1):
            yield Loosened(field.name, size, vectors, _in_words(value))


def _loosened_arrow(
    before: RecordEncoder, after: RecordEncoder, table: pa.Table
) -> Iterator[Loosened]:
    """The same for Arrow data, whose own types say what is new: lists, or vectors."""
    if before is after or not after.rules.keep_vectors:
        return
    for field in before.schema:
        if not is_vector(field.type) or not is_float_list(after.schema.field(field.name).type):
            continue
        other = "a list with None in it"
        for chunk in table.column(field.name).chunks:
            lengths = pc.drop_null(pc.list_value_length(chunk))
            others = lengths.filter(pc.not_equal(lengths, field.type.list_size))
            if len(others):
                other = _floats(others[0].as_py())
                break
        yield Loosened(field.name, field.type.list_size, 0, other)


def _type_in(schema: pa.Schema, name: str) -> pa.DataType | None:
    return schema.field(name).type if name in schema.names else None


def _vector_length(value: Any) -> int | None:
    """Return the length of a list or array of numbers; None if the value is neither."""
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim == 1 else None
    if not isinstance(value, (list, tuple)) or any(item is None for item in value):
        return None
    return len(value)


def _in_words(value: Any) -> str:
    length = _vector_length(value)
    return "a list with None in it" if length is None else _floats(length)


def _floats(length: int) -> str:
    return "an empty list" if not length else f"{length} float{'s' if length > 1 else ''}"


def _batches(encoder: RecordEncoder, rows: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    """Yield the rows as batches; several if a single array cannot hold them."""
    try:
        batch = encoder.to_batch(rows)
        if batch.nbytes <= MAX_BATCH_BYTES or len(rows) == 1:
            yield batch
            return
    except SchemaError as exc:
        if not isinstance(exc.__cause__, pa.ArrowCapacityError) or len(rows) == 1:
            raise
    middle = len(rows) // 2
    yield from _batches(encoder, rows[:middle])
    yield from _batches(encoder, rows[middle:])


MAX_BATCH_BYTES = 64 * 1024 * 1024
_MAX_RECORD_BYTES = 2_000_000_000
