"""The layout of records in a Lance table.

The table has the fields of the records, in any order, and one column of our own: when the row was
accepted. A field that was only ever None has no column yet.

An empty dict is a struct with one unused child, since Lance cannot store a struct without children.
A dict in a list whose first field is a list of lists gets an unused first child too: Lance derives
the nulls of such dicts from their first child, and gets them wrong there.

The schema of the records, in the user's order, is stored in the table's schema metadata, so that
every version can be read on its own.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import pyarrow as pa

from persisting.errors import TableError
from persisting.records.arrow import no_columns
from persisting.records.arrow_casts import convert
from persisting.records.field_names import ARRIVAL
from persisting.table.alignment import aligned

FORMAT = 1
SCHEMA_KEY = "persisting.schema"
FORMAT_KEY = "persisting.format"
ARRIVAL_FIELD = pa.field(ARRIVAL, pa.timestamp("us", tz="UTC"))

_UNUSED = "_persisting_empty"


_CODEC = b"lance-encoding:compression"


def _encoding_of(codec: str, chunk: int) -> dict[bytes, bytes]:
    return {
        _CODEC: codec.encode(),
        b"lance-encoding:structural-encoding": b"miniblock",
        b"lance-encoding:minichunk-size": str(chunk).encode(),
    }


# Chunk sizes were measured: without a codec Lance compresses text by itself, and lz4 beats that
# only with large chunks.
_ENCODINGS: dict[str | None, dict[bytes, bytes]] = {
    None: {},
    "zstd": _encoding_of("zstd", 65536),
    "lz4": _encoding_of("lz4", 262144),
    "snappy": _encoding_of("lz4", 65536),
}
EFFECTIVE = {None: None, "zstd": "zstd", "lz4": "lz4", "snappy": "lz4 (64 KiB chunks)"}
"""The codec that the table uses for each ``compression`` option; Lance has no snappy."""


class UnreadableSchema(TableError):
    """The schema in a table's metadata cannot be decoded."""


def physical_schema(
    schema: pa.Schema, compression: str | None, *, plain_lists: bool = False
) -> pa.Schema:
    """The columns of a table for records of ``schema``.

    With ``plain_lists`` the compression is not used for lists.
    """
    columns = []
    for field in [ARRIVAL_FIELD, *(f for f in schema if not pa.types.is_null(f.type))]:
        plain = plain_lists and _list_levels(field.type) > 0
        columns.append(_column(field, None if plain else compression))
    return pa.schema(columns, metadata(schema))


def to_physical(batch: pa.RecordBatch, arrival: pa.Array, target: pa.Schema) -> pa.RecordBatch:
    """Convert a batch of records, with its arrival times, to a batch of the table."""
    columns = []
    for field in target:
        if field.name == ARRIVAL:
            columns.append(arrival)
        else:
            columns.append(aligned(convert(batch.column(field.name), field.type)))
    return pa.RecordBatch.from_arrays(columns, schema=target)


def to_logical(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a batch of the table to records of ``schema``."""
    columns = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            columns.append(convert(batch.column(index), field.type))
    if not columns:
        return no_columns(batch.num_rows)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def metadata(schema: pa.Schema) -> dict[str, str]:
    """The schema metadata of a table for records of ``schema``."""
    plain = schema.remove_metadata().serialize().to_pybytes()
    return {SCHEMA_KEY: base64.b64encode(plain).decode(), FORMAT_KEY: str(FORMAT)}


def logical_schema(table_schema: pa.Schema, path: object) -> pa.Schema:
    """The schema of the records in a table; raises if Persisting did not write the table."""
    entries: Mapping[bytes, bytes] = table_schema.metadata or {}
    encoded, version = entries.get(SCHEMA_KEY.encode()), entries.get(FORMAT_KEY.encode())
    if encoded is None or version is None:
        raise TableError(
            f"{path} is a Lance table that no Persisting backend wrote; "
            "import it into a topic instead of opening it as one"
        )
    if not version.isdigit() or int(version) > FORMAT:
        raise TableError(
            f"{path} has table format {version.decode(errors='replace')}, but this version reads "
            f"up to {FORMAT}; upgrade persisting"
        )
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded)))
    except (ValueError, OSError, pa.ArrowException) as exc:
        raise UnreadableSchema(f"the schema stored in {path} cannot be read: {exc}") from exc


def has_columns_of(table_schema: pa.Schema, schema: pa.Schema) -> bool:
    """Whether the table has all columns for records of ``schema``."""
    names = set(table_schema.names)
    needed = {f.name for f in schema if not pa.types.is_null(f.type)}
    return needed | {ARRIVAL} <= names


def encoding_changes(schema: pa.Schema, target: pa.Schema) -> dict[str, dict[str, str | None]]:
    """The field metadata to set or remove so that later writes encode as ``target`` says."""
    changes: dict[str, dict[str, str | None]] = {}
    for field in target:
        if field.name in schema.names:
            _compare_encodings(schema.field(field.name), field, field.name, changes)
    return changes


def _compare_encodings(
    old: pa.Field, new: pa.Field, path: str, changes: dict[str, dict[str, str | None]]
) -> None:
    before, after = _encoding(old), _encoding(new)
    if before != after:
        changes[path] = {**dict.fromkeys(before), **after}
    if not pa.types.is_fixed_size_list(old.type):
        for i in range(min(old.type.num_fields, new.type.num_fields)):
            child = old.type.field(i)
            _compare_encodings(child, new.type.field(i), f"{path}.{child.name}", changes)


def _encoding(field: pa.Field) -> dict[str, str]:
    entries = field.metadata or {}
    return {k.decode(): v.decode() for k, v in entries.items() if k.startswith(b"lance-encoding:")}


def _column(field: pa.Field, compression: str | None) -> pa.Field:
    """The column of a field. For a nested column Lance takes the layout from its top level, and the
    codec from its leaves."""
    column = _physical_field(field, compression)
    entries = {k: v for k, v in _ENCODINGS[compression].items() if k != _CODEC}
    if column.type.num_fields and not pa.types.is_fixed_size_list(column.type) and entries:
        return column.with_metadata(entries)
    return column


def _physical_field(field: pa.Field, compression: str | None, *, in_list: bool = False) -> pa.Field:
    dtype = field.type
    if pa.types.is_fixed_size_list(dtype):
        return pa.field(field.name, dtype)
    if pa.types.is_list(dtype):
        item = _physical_field(dtype.value_field, compression, in_list=True)
        return pa.field(field.name, pa.list_(item))
    if pa.types.is_struct(dtype):
        children = [_physical_field(f, compression, in_list=in_list) for f in dtype]
        if not children or (in_list and _list_levels(children[0].type) > 1):
            children.insert(0, pa.field(_UNUSED, pa.bool_()))
        return pa.field(field.name, pa.struct(children))
    if pa.types.is_null(dtype) or not _ENCODINGS[compression]:
        return pa.field(field.name, dtype)
    return pa.field(field.name, dtype, metadata=_ENCODINGS[compression])


def _list_levels(dtype: pa.DataType) -> int:
    inner = max((_list_levels(dtype.field(i).type) for i in range(dtype.num_fields)), default=0)
    return inner + bool(pa.types.is_list(dtype))
