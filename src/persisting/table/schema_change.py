"""Bringing a table's columns to a changed schema.

Every step is one Lance commit after which the table reads correctly under the old and the new
schema alike, so a crash between any two steps leaves nothing to repair but a spare column:

1. a new field, also one inside dicts, is added as a column of nulls (metadata only), or written
   with its default as a spare column and renamed;
2. a widened field is written as a spare column of the new type, swapped with the old one by
   renaming both in one commit, and the old one is dropped;
3. the schema metadata is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from persisting.records.arrow import fill
from persisting.records.arrow_casts import convert
from persisting.records.field_names import ARRIVAL
from persisting.table import layout

_WIDE = "_persisting_wide_"
_OLD = "_persisting_old_"


def steps(schema: pa.Schema, target: pa.Schema) -> tuple[list[pa.Field], list[pa.Field]]:
    """(fields to add, fields to replace) that bring a table's columns to ``target``."""
    added, replaced = [], []
    for field in target:
        index = schema.get_field_index(field.name)
        if index < 0:
            added.append(field)
        elif schema.field(index).type != field.type:
            extra = _additions(schema.field(index), field)
            if extra is None:
                replaced.append(field)
            else:
                added.append(extra)
    return added, replaced


def _additions(old: pa.Field, new: pa.Field) -> pa.Field | None:
    """The part of ``new`` that ``old`` lacks, if that is all they differ in.

    Lance merges such a field into the one of the same name without touching data.
    """
    if pa.types.is_list(old.type) and pa.types.is_list(new.type):
        item = _additions(old.type.value_field, new.type.value_field)
        return None if item is None else new.with_type(pa.list_(item))
    if not pa.types.is_struct(old.type) or not pa.types.is_struct(new.type):
        return None
    if [f.name for f in new.type][: old.type.num_fields] != [f.name for f in old.type]:
        return None
    parts = list(new.type)[old.type.num_fields :]
    for before in old.type:
        after = new.type.field(before.name)
        if before.type != after.type:
            part = _additions(before, after)
            if part is None:
                return None
            parts.append(part)
    return new.with_type(pa.struct(parts))


def add(dataset: Any, fields: list[pa.Field]) -> None:
    """Add columns of nulls, which costs no data."""
    dataset.add_columns(pa.schema(fields))


def write_default(dataset: Any, field: pa.Field, defaults: Mapping[str, Any]) -> None:
    """Write the spare column of a new field whose default is in every row."""
    wide = field.with_name(_WIDE + field.name)
    _compute(
        dataset,
        pa.schema([wide]),
        [ARRIVAL],
        lambda batch: [fill(field, batch.num_rows, defaults)],
    )


def name_default(dataset: Any, field: pa.Field) -> None:
    """Let the spare column of a new field take its name."""
    dataset.alter_columns({"path": _WIDE + field.name, "name": field.name})


def write_wide(dataset: Any, field: pa.Field) -> None:
    """Write the spare column of a widened field."""
    wide = field.with_name(_WIDE + field.name)
    _compute(
        dataset,
        pa.schema([wide]),
        [field.name],
        lambda batch: [convert(batch.column(0), field.type)],
    )


def swap(dataset: Any, field: pa.Field) -> None:
    """Let the spare column take the field's name, in one commit."""
    dataset.alter_columns(
        {"path": field.name, "name": _OLD + field.name},
        {"path": _WIDE + field.name, "name": field.name},
    )


def leftovers(schema: pa.Schema) -> list[str]:
    """Columns that a finished or interrupted swap left."""
    return [n for n in schema.names if n.startswith((_WIDE, _OLD))]


def replace_metadata(dataset: Any, schema: pa.Schema) -> None:
    """Record the schema of the records."""
    dataset.update_schema_metadata(layout.metadata(schema))


def _compute(dataset: Any, schema: pa.Schema, read: list[str], values: Any) -> None:
    import lance

    @lance.batch_udf(output_schema=schema)
    def computed(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(values(batch), schema=schema)

    dataset.add_columns(computed, read_columns=read)
