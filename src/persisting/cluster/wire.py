"""Requests and replies as bytes: msgpack and Arrow, never pickle.

Records are sent as msgpack, so that the owner validates them exactly as it validates a local put,
and come back as Arrow, or as msgpack where a backend keeps no schema. Errors arrive as the class
they were raised as.
"""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from persisting import errors
from persisting.errors import SchemaError, StorageError
from persisting.records.record_columns import RecordColumns, columns_of
from persisting.records.values import Values

_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
_NAIVE, _AWARE, _DATE, _TIME, _DELTA, _DECIMAL, _UUID, _VECTOR = range(1, 9)

MESSAGE_BYTES = 4 * 1024 * 1024
"""The most that a message holds, unless a single row is larger."""

_PIECE_ROWS = 512
_COLUMN_ROWS = 64
"""Fewer records are sent one after the other: a schema would be larger than they are."""
_SMALL_SCHEMA = 16 * 1024
"""Schemas up to this size are remembered in memory."""


_encoder = msgspec.msgpack.Encoder()
_EPOCH = dt.datetime(1970, 1, 1)
_UTC_EPOCH = _EPOCH.replace(tzinfo=dt.timezone.utc)
_MICROSECOND = dt.timedelta(microseconds=1)


class Request(msgspec.Struct, array_like=True):
    """One call to a host or a bucket."""

    op: str
    args: dict[str, Any] = {}
    rows: list[bytes] | None = None
    arrow: bool = False


class Reply(msgspec.Struct, array_like=True):
    """The answer to a request: a value, or the class and the text of an error."""

    value: Any = None
    error: tuple[str, str] | None = None
    rows: bytes | None = None
    arrow: bool = False
    reads_text: bool = False
    """Whether the sender takes requests as text; see :mod:`persisting.cluster.pulsing_messages`."""


_CHECK_VERSIONS = "check that all nodes run the same version of persisting"

_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    try:
        return _request_decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise StorageError(f"a request cannot be decoded: {exc}; {_CHECK_VERSIONS}") from exc


def decode_reply(data: bytes) -> Reply:
    """Decode a reply; raise the error that it carries."""
    try:
        reply = _reply_decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise StorageError(f"a reply cannot be decoded: {exc}; {_CHECK_VERSIONS}") from exc
    return raise_error(reply)


def raise_error(reply: Reply) -> Reply:
    """Raise the error that a reply carries, as the class it was; otherwise return the reply."""
    if reply.error is not None:
        raise rebuilt(*reply.error)
    return reply


def unknown_request(op: str) -> StorageError:
    return StorageError(f"unknown request {op!r}; {_CHECK_VERSIONS}")


def is_unknown_request(exc: StorageError, op: str) -> bool:
    """Whether an error says that a node, of an older version, does not know a request."""
    return str(exc).startswith(f"unknown request {op!r}")


def error_reply(exc: BaseException) -> Reply:
    """Return a reply that carries an error: the nearest class of our own, and its text."""
    text = str(exc) or repr(exc)
    if not isinstance(exc, StorageError):
        text = f"{type(exc).__name__}: {text}"
    known = (cls.__name__ for cls in type(exc).__mro__ if hasattr(errors, cls.__name__))
    return Reply(error=(next(known, StorageError.__name__), text))


def rebuilt(name: str, text: str) -> StorageError:
    """Return the error of that name in our tree, or a plain StorageError."""
    cls = getattr(errors, name, None)
    if isinstance(cls, type) and issubclass(cls, StorageError):
        return cls(text)
    return StorageError(text)


def pack_rows(rows: list[dict[str, Any]] | pa.Table) -> tuple[bytes, bool]:
    """Return rows as bytes, and whether these are Arrow."""
    if not isinstance(rows, list):
        return pack_arrow(rows), True
    return pack_records(rows), False


def unpack_rows(data: bytes, arrow: bool) -> list[dict[str, Any]] | pa.Table:
    return unpack_arrow(data) if arrow else unpack_records(data)


def pack_parts(rows: list[dict[str, Any]] | pa.Table) -> tuple[list[bytes], bool]:
    """Return rows as pieces, and whether these are Arrow. Each fits a message, unless a single
    row does not."""
    if isinstance(rows, list):
        return _pack_pieces(rows, _PIECE_ROWS), False
    step = max(1, MESSAGE_BYTES * rows.num_rows // max(1, 2 * rows.nbytes))
    slices = range(0, max(1, rows.num_rows), step)
    return [pack_arrow(rows.slice(start, step)) for start in slices], True


class PackedColumns(NamedTuple):
    """Records as Arrow columns: their schema, and pieces that each fit a message, unless a single
    row does not."""

    columns: RecordColumns
    schema: bytes
    pieces: list[bytes]


def pack_lists(parts: Sequence[Any]) -> PackedColumns | None:
    """Return lists of records, one after the other, as Arrow columns.

    Both sides need less time for many of them. None if they are few, or have different fields.
    """
    if not all(isinstance(part, list) for part in parts) or sum(map(len, parts)) < _COLUMN_ROWS:
        return None
    columns = columns_of(parts)
    return None if columns is None else pack_columns(columns)


def pack_columns(columns: RecordColumns) -> PackedColumns:
    batch = columns.batch
    schema = batch.schema.serialize().to_pybytes()
    step = max(1, MESSAGE_BYTES * batch.num_rows // max(1, 2 * batch.nbytes))
    slices = range(0, max(1, batch.num_rows), step)
    pieces = [batch.slice(start, step).serialize().to_pybytes() for start in slices]
    return PackedColumns(columns, schema, pieces)


def _read_schema(schema: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(schema))


_known_schema = lru_cache(maxsize=64)(_read_schema)
"""Every put of a producer brings the same schema."""


def unpack_columns(pieces: Sequence[bytes], schema: bytes) -> RecordColumns:
    """Return records of :func:`pack_columns`; data that would crash a reader is refused."""
    try:
        read = (_known_schema if len(schema) <= _SMALL_SCHEMA else _read_schema)(schema)
        batches = [pa.ipc.read_record_batch(pa.py_buffer(piece), read) for piece in pieces]
        for batch in batches:
            batch.validate(full=True)
        return RecordColumns(batches[0] if len(batches) == 1 else pa.concat_batches(batches))
    except (pa.ArrowException, OSError, ValueError, TypeError) as exc:
        raise StorageError(f"Arrow data from another process cannot be decoded: {exc}") from exc


def _pack_pieces(rows: list[dict[str, Any]], step: int) -> list[bytes]:
    pieces = []
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        packed = pack_records(piece)
        if len(packed) > MESSAGE_BYTES // 2 and len(piece) > 1:
            pieces += _pack_pieces(piece, max(1, len(piece) // 4))
        else:
            pieces.append(packed)
    return pieces


def unpack_parts(parts: list[bytes], arrow: bool) -> list[dict[str, Any]] | pa.Table:
    """Return received rows; Arrow data that would crash a reader is refused."""
    if arrow:
        table = pa.concat_tables([unpack_arrow(part) for part in parts])
        try:
            table.validate(full=True)
        except pa.ArrowException as exc:
            raise StorageError(f"Arrow data from another node is damaged: {exc}") from exc
        return table
    return [record for part in parts for record in unpack_records(part)]


def in_messages(parts: list[bytes]) -> list[list[bytes]]:
    """Group pieces into messages, as many per message as fit."""
    messages: list[list[bytes]] = [[]]
    size = 0
    for part in parts:
        if messages[-1] and size + len(part) > MESSAGE_BYTES:
            messages.append([])
            size = 0
        messages[-1].append(part)
        size += len(part)
    return messages


_RECORDS = frozenset({"take", "query", "read_at", "arrow_at"})


def answer_replies(op: str, answer: Any) -> list[Reply]:
    """Return the result of a table call as replies that each fit a message; the last is "end"."""
    if op not in _RECORDS and op != "rankings":
        return [Reply(["value", answer]), Reply("end")]
    lists = [answer] if op in _RECORDS else answer
    replies = [Reply(["lists", len(lists)])]
    for number, rows in enumerate(lists):
        parts, is_arrow = pack_parts(rows)
        replies += [Reply(["part", number], rows=part, arrow=is_arrow) for part in parts]
    return [*replies, Reply("end")]


def join_replies(op: str, replies: list[Reply]) -> Any:
    """Return the result that :func:`answer_replies` split."""
    kind, content = replies[0].value
    if kind == "value":
        return content
    lists: list[list[Any]] = [[] for _ in range(content)]
    tables = []
    for reply in replies[1:]:
        rows = unpack_rows(reply.rows or b"", reply.arrow)
        if isinstance(rows, list):
            lists[reply.value[1]] += rows
        else:
            tables.append(rows)
    if op == "arrow_at":
        return pa.concat_tables(tables)
    return lists if op == "rankings" else lists[0]


def pack_records(records: Sequence[Any]) -> bytes:
    """Encode records as msgpack; values of types that msgpack lacks become extensions."""
    if not _are_plain(records):
        records = [_packed(record, "") for record in records]
    return pack_plain(records)


def pack_plain(records: Sequence[Any]) -> bytes:
    """The same for records whose values msgpack has types for."""
    try:
        return _encoder.encode(records)
    except (OverflowError, UnicodeEncodeError, TypeError, RecursionError) as exc:
        # Prefer the error of a local put, which names the field.
        values = Values(evolving=True, vector=pa.float64())
        for record in records:
            for name, value in record.items():
                values.describe(value, str(name))
        raise SchemaError(f"the records cannot be sent: {exc}") from exc


def unpack_records(data: bytes) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = _records_decoder.decode(data)
    return records


def pack_arrow(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def unpack_arrow(data: bytes) -> pa.Table:
    try:
        return pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    except pa.ArrowException as exc:
        raise StorageError(f"Arrow data from another node cannot be decoded: {exc}") from exc


def _are_plain(records: Sequence[Any]) -> bool:
    """Whether msgpack has the types of all values; a loop over many records would be slow."""
    if list(map(type, records)).count(dict) != len(records):
        return False
    return _PLAIN.issuperset(map(type, chain.from_iterable(map(dict.values, records))))


def _packed(value: Any, path: str, depth: int = 0) -> Any:
    if type(value) in _PLAIN:
        return value
    if depth > 64:
        raise SchemaError(f"field {path[:80]!r} is nested too deeply; flatten it")
    if isinstance(value, dict):
        return {k: _packed(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        if _PLAIN.issuperset(map(type, value)):
            return list(value)
        return [_packed(v, f"{path}[]", depth + 1) for v in value]
    return _extension(value, path.removeprefix("."))


def _extension(value: Any, path: str) -> Any:
    canonical, own = Values(evolving=True, vector=pa.float64()).describe(value, path, top=True)
    if pa.types.is_fixed_size_list(own) and own.value_type != pa.float64():
        import numpy as np

        return msgspec.msgpack.Ext(
            _VECTOR, _encoder.encode([value.dtype.str, np.ascontiguousarray(value).tobytes()])
        )
    for kind, code, pack in _PACKERS:
        if isinstance(canonical, kind):
            return msgspec.msgpack.Ext(code(canonical), pack(canonical))
    return canonical


def _micros(delta: dt.timedelta) -> bytes:
    return (delta // _MICROSECOND).to_bytes(12, "big", signed=True)


def _pack_datetime(value: dt.datetime) -> bytes:
    return _micros(value - (_EPOCH if value.tzinfo is None else _UTC_EPOCH))


_PACKERS: tuple[tuple[type, Any, Any], ...] = (
    (dt.datetime, lambda v: _NAIVE if v.tzinfo is None else _AWARE, _pack_datetime),
    (dt.date, lambda v: _DATE, lambda v: v.isoformat().encode()),
    (dt.time, lambda v: _TIME, lambda v: v.isoformat().encode()),
    (dt.timedelta, lambda v: _DELTA, _micros),
    (decimal.Decimal, lambda v: _DECIMAL, lambda v: str(v).encode()),
    (uuid.UUID, lambda v: _UUID, lambda v: v.bytes),
)


def _unpacked(code: int, data: memoryview) -> Any:
    raw = bytes(data)
    if code in (_NAIVE, _AWARE, _DELTA):
        delta = int.from_bytes(raw, "big", signed=True) * _MICROSECOND
        return delta if code == _DELTA else delta + (_EPOCH if code == _NAIVE else _UTC_EPOCH)
    if code == _DATE:
        return dt.date.fromisoformat(raw.decode())
    if code == _TIME:
        return dt.time.fromisoformat(raw.decode())
    if code == _DECIMAL:
        return decimal.Decimal(raw.decode())
    if code == _UUID:
        return uuid.UUID(bytes=raw)
    if code == _VECTOR:
        import numpy as np

        kind, items = msgspec.msgpack.decode(raw, type=tuple[str, bytes])
        return np.frombuffer(items, dtype=kind)
    raise StorageError(f"a record holds the unknown extension {code}; {_CHECK_VERSIONS}")


_records_decoder = msgspec.msgpack.Decoder(ext_hook=_unpacked)
