"""What our Java classes tell the reader of a scan: metadata of the first field of its schema.

A schema may come from anywhere, such as a file that somebody else wrote, so everything in it is
data: nothing is unpickled.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pyspark.sql.types import BooleanType, StructField, StructType

from persisting.errors import InvalidArgument
from persisting.spark.partial_aggregates import COUNT_ALL, Function
from persisting.topic.scan import Slice

HINTS = "persisting.hints"
ROWS = "_persisting_rows"
"""The only field of a scan that needs none; its values are null."""

_MARK = "persisting.snapshot:"
_ROWS_MARK = "rows:"
_KEY_LENGTH = 32
_LENGTH_DIGITS = 8

_Range = tuple[int, int, int, int, int | None]
"""Bucket, start, end, epoch and version of a slice."""


class AskedAggregates(msgspec.Struct, frozen=True):
    """Aggregates that a scan returns instead of rows."""

    groups: tuple[str, ...]
    values: tuple[tuple[Function, str], ...]
    columns: str
    """The columns that are read, as Spark's JSON of a schema."""

    def rows(self) -> StructType:
        """Return the schema of the rows that are aggregated."""
        read: StructType = StructType.fromJson(json.loads(self.columns))
        return read if read.fields else StructType([StructField(ROWS, BooleanType())])

    def check(self, results: StructType) -> None:
        """Raise ``ValueError`` if the results cannot have that schema."""
        used = {*self.groups, *(name for function, name in self.values if function != COUNT_ALL)}
        missing = used - set(self.rows().names)
        if missing or len(results.fields) != len(self.groups) + len(self.values):
            raise ValueError(f"aggregates of {', '.join(sorted(used))} do not fit the schema")


class _Hints(msgspec.Struct):
    conditions: list[dict[str, Any]] | None = None
    aggregates: AskedAggregates | None = None
    partitions: list[str] | None = None
    """The first partition that the first scan of the same load planned, in base64."""


@dataclass(frozen=True)
class ScanHints:
    """The conditions of a scan, the rows that the first scan of the same load saw, and what to
    return instead of rows."""

    conditions: list[dict[str, Any]] = field(default_factory=list)
    snapshot: list[_Range] | None = None
    aggregates: AskedAggregates | None = None

    def slices(self, folder: str) -> list[Slice] | None:
        """Return the snapshot as slices of the topic in ``folder``."""
        if self.snapshot is None:
            return None
        return [Slice(folder, *found) for found in self.snapshot]


@dataclass(frozen=True)
class KeyedRows:
    """Rows as an Arrow stream. A random key, which no record can contain, shows where they are in
    the bytes of a pickled partition."""

    stream: bytes
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __getstate__(self) -> bytes:
        return self.key.encode() + self.stream

    def __setstate__(self, state: bytes) -> None:
        vars(self).update(key=state[:_KEY_LENGTH].decode(), stream=state[_KEY_LENGTH:])


def take_hints(schema: StructType) -> tuple[StructType, ScanHints]:
    """Return the schema without hints, and the hints."""
    if not schema.fields or HINTS not in (schema.fields[0].metadata or {}):
        return schema, ScanHints()
    first, *rest = schema.fields
    metadata = dict(first.metadata or {})
    try:
        decoded = msgspec.json.decode(metadata.pop(HINTS), type=_Hints)
        snapshot = _snapshot_in(decoded.partitions[0]) if decoded.partitions else None
        if decoded.aggregates is not None:
            decoded.aggregates.check(schema)
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidArgument(
            f"the schema's field {first.name!r} has metadata {HINTS!r} that is not of this "
            f"version: {exc}; remove it from the schema"
        ) from exc
    plain = StructField(first.name, first.dataType, first.nullable, metadata)
    hints = ScanHints(decoded.conditions or [], snapshot, decoded.aggregates)
    return StructType([plain, *rest]), hints


def snapshot_text(slices: Sequence[Slice], rows: KeyedRows | None = None) -> str:
    """Return slices as text that is found again in the bytes of a pickled partition.

    Spark passes partitions to Java as pickled bytes, and pickling keeps a text as it is. ``rows``
    are all rows of the scan, if a part of the same partition has them: our Java classes then return
    them without a task in Python.
    """
    ranges: list[_Range] = [(s.bucket, s.start, s.end, s.epoch, s.version) for s in slices]
    text = msgspec.json.encode(ranges).decode()
    found = "" if rows is None else f"{_ROWS_MARK}{rows.key}{len(rows.stream):0{_LENGTH_DIGITS}}"
    return f"{_MARK}{len(text):0{_LENGTH_DIGITS}}{text}{found}"


def _snapshot_in(partition: str) -> list[_Range] | None:
    """Return the slices that :func:`snapshot_text` put into a pickled partition."""
    data = base64.b64decode(partition, validate=True)
    _, mark, rest = data.rpartition(_MARK.encode())
    if not mark:
        return None
    length = int(rest[:_LENGTH_DIGITS])
    text = rest[_LENGTH_DIGITS : _LENGTH_DIGITS + length]
    return msgspec.json.decode(text, type=list[_Range])
