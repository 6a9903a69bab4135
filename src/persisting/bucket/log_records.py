"""The payloads of log frames: records of one or more buckets, and their schema.

Records of a put are logged as an Arrow batch (``BATCH``), or as plain rows (``RECORDS``) if they
were put one by one: a row costs a few bytes and a microsecond that way, an Arrow message some
hundred bytes and ten times the time. Both begin with a list of sections that says which of the rows
belong to which bucket.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import pyarrow as pa

from persisting import codec
from persisting.bucket.chunk import Chunk
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.errors import WALError
from persisting.records import RecordEncoder
from persisting.records.arrow import no_columns
from persisting.wal import Payload
from persisting.wal.frame import BATCH, RECORDS, SCHEMA, Frame

MIN_COMPRESSED_BYTES = 256
_HEAD = struct.Struct("<I")

_Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


class Section(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The rows of one bucket in a frame; sections and their rows are in the same order."""

    bucket: _Natural
    epoch: _Count
    """How many times the bucket had been restored to an older version."""
    offset: _Natural
    """The offset of the first row in its bucket."""
    rows: _Count
    producers: list[ProducerSequence] = []
    """The numbered puts that these rows complete."""


_sections_decoder = msgspec.msgpack.Decoder(list[Section])
_raw_rows_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_values_decoder = msgspec.msgpack.Decoder(list[Any])
_rows_decoder = msgspec.msgpack.Decoder(list[list[Any]])
_encoder = msgspec.msgpack.Encoder()


def schema_payload(schema: pa.Schema) -> Payload:
    """Return the schema of the frames that follow."""
    raw = memoryview(schema.serialize())
    return Payload(SCHEMA, codec.NONE, len(raw), raw)


def batch_payload(batch: pa.RecordBatch, sections: Sequence[Section], codec_id: int) -> Payload:
    """Return the rows of a batch, which are sorted by section."""
    return _packed(BATCH, memoryview(batch.serialize()), sections, codec_id)


def rows_payload(
    rows: Sequence[dict[str, Any]], sections: Sequence[Section], codec_id: int
) -> Payload:
    """Return plain rows, whose values are in the order of the schema's fields."""
    raw = _encoder.encode([list(row.values()) for row in rows])
    return _packed(RECORDS, raw, sections, codec_id)


def _packed(
    kind: int, raw: bytes | memoryview, sections: Sequence[Section], codec_id: int
) -> Payload:
    encoded = _encoder.encode(sections)
    head = _HEAD.pack(len(encoded)) + encoded
    if codec_id != codec.NONE and len(raw) >= MIN_COMPRESSED_BYTES:
        packed = codec.compress(codec_id, raw)
        if len(packed) < len(raw):
            return Payload(kind, codec_id, len(raw), packed, head)
    return Payload(kind, codec.NONE, len(raw), raw, head)


def read_schema(frame: Frame, place: Any) -> pa.Schema:
    """Return the schema in a frame."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(decompressed(frame, frame.payload)))
    except (pa.ArrowException, EOFError, OSError, ValueError) as exc:
        raise _unreadable("schema", frame.sequence, place, exc) from exc


def read_sections(frame: Frame, place: Any) -> list[Section]:
    """Return the sections of a frame."""
    return split_payload(frame, place)[0]


def split_payload(frame: Frame, place: Any) -> tuple[list[Section], memoryview]:
    """Return the sections of a frame, and its rows as stored."""
    payload = memoryview(frame.payload)
    try:
        (length,) = _HEAD.unpack_from(payload)
        end = _HEAD.size + length
        if end > len(payload):
            raise ValueError("it is longer than its frame")
        return _sections_decoder.decode(payload[_HEAD.size : end]), payload[end:]
    except (struct.error, ValueError, RecursionError) as exc:
        raise _unreadable("list of sections", frame.sequence, place, exc) from exc


def read_many_sections(count: int, encoded: Sequence[bytes]) -> list[Section] | None:
    """Return the sections of several frames, given the bytes of those of each frame; None if one of
    them cannot be read."""
    try:
        return _sections_decoder.decode(join_elements(count, encoded))
    except (ValueError, RecursionError):
        return None


def join_elements(count: int, elements: Sequence[bytes]) -> bytes:
    """Return a MessagePack array of ``count`` elements, given their bytes in one or more parts."""
    return b"".join((b"\xdd", count.to_bytes(4, "big"), *elements))


def array_head(count: int) -> int:
    """Return how many bytes a MessagePack array has before its first element."""
    return 1 if count < 16 else 3 if count < 1 << 16 else 5


def row_sizes(rows: bytes) -> list[int] | None:
    """Return how many bytes each plain row has, None if the rows cannot be read."""
    try:
        sizes = [len(row) for row in _raw_rows_decoder.decode(rows)]
    except (ValueError, RecursionError):
        return None
    return sizes if array_head(len(sizes)) + sum(sizes) == len(rows) else None


def read_values(raw: bytes | memoryview, sequence: int, place: Any) -> list[list[Any]]:
    """Return the rows of a ``RECORDS`` frame as lists of values."""
    try:
        return _rows_decoder.decode(raw)
    except (ValueError, RecursionError) as exc:
        raise _unreadable("records", sequence, place, exc) from exc


def read_batch(
    frame: Frame, stored: memoryview, encoder: RecordEncoder | None, place: Any
) -> pa.RecordBatch:
    """Return the Arrow rows of a frame."""
    schema = checked_schema(encoder, frame, place)
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(decompressed(frame, stored)), schema)
        batch.validate()
    except (pa.ArrowException, EOFError, OSError, ValueError) as exc:
        raise _unreadable("records", frame.sequence, place, exc) from exc
    return batch


def check_rows(sequence: int, needed: int, rows: int, place: Any) -> None:
    """Raise if a frame has fewer rows than its sections need."""
    if needed > rows:
        raise WALError(
            f"the frame at sequence {sequence} of the log in {place} has {rows} rows, but its "
            f"sections need {needed}: the log was not written by persisting"
        )


def checked_schema(encoder: RecordEncoder | None, frame: Frame, place: Any) -> pa.Schema:
    """Return the schema of a frame's rows, or raise if none came before it."""
    if encoder is None:
        raise WALError(
            f"the log in {place} has records at sequence {frame.sequence} without a schema before "
            "them"
        )
    return encoder.schema


def chunk_of_values(
    encoder: RecordEncoder, values: Sequence[Sequence[Any]], sequence: int, place: Any
) -> Chunk:
    """Return rows of values, at least one, as a chunk."""
    columns = _columns_of(values, sequence, place)
    return chunk_of_columns(encoder, columns, len(values), sequence, place)


def read_columns(
    raw: bytes, width: int | None, sequence: int, place: Any
) -> Sequence[Sequence[Any]]:
    """Return the columns of rows, given as in a ``RECORDS`` frame, or with ``width`` as all values
    of rows that have this many values each."""
    if width is None:
        return _columns_of(read_values(raw, sequence, place), sequence, place)
    try:
        values = _values_decoder.decode(raw)
    except (ValueError, RecursionError) as exc:
        raise _unreadable("records", sequence, place, exc) from exc
    return [values[column::width] for column in range(width)]


def _columns_of(
    values: Sequence[Sequence[Any]], sequence: int, place: Any
) -> Sequence[Sequence[Any]]:
    try:
        return list(zip(*values, strict=True))
    except ValueError as exc:
        raise _unreadable("records", sequence, place, exc) from exc


def chunk_of_columns(
    encoder: RecordEncoder, columns: Sequence[Sequence[Any]], rows: int, sequence: int, place: Any
) -> Chunk:
    """Return columns of values as a chunk of ``rows`` rows, at least one."""
    schema = encoder.schema
    try:
        if len(columns) != len(schema):
            raise ValueError("a row has another number of fields than its schema")
        arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if not columns:
            batch = no_columns(rows)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as exc:
        raise _unreadable("records", sequence, place, exc) from exc
    return Chunk(encoder, batch=batch)


def unknown_kind(frame: Frame, place: Any) -> WALError:
    """Return the error for a frame that this version does not know."""
    return WALError(
        f"the log in {place} holds a frame of unknown kind {frame.kind} at sequence "
        f"{frame.sequence}; it was written by a newer version, upgrade persisting"
    )


def decompressed(frame: Frame, stored: bytes | memoryview) -> bytes:
    return bytes(codec.decompress(frame.codec, stored, frame.raw_length))


def _unreadable(what: str, sequence: int, place: Any, exc: BaseException) -> WALError:
    return WALError(
        f"the {what} at sequence {sequence} of the log in {place} cannot be read: {exc}"
    )
