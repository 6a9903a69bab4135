"""Brings a table's columns to a changed schema.

Every step is one Lance commit, after which the table reads correctly under both the old and the new
schema. So a crash between two steps leaves nothing to repair but a spare column:

1. a new field, even inside dicts, is added as a column of nulls (metadata only); a new field with a
   default is written as a spare column and then renamed;
2. a widened field is written as a spare column of the new type and swapped with the old column by
   renaming both in one commit; then the old column is dropped;
3. the schema metadata is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from persisting.records.arrow import fill
from persisting.records.arrow_casts import convert
from persisting.records.field_names import ARRIVAL
from persisting.table import layout
from persisting.table.commit import Committer
from persisting.table.lance_errors import translated

_WIDE = "_persisting_wide_"
_OLD = "_persisting_old_"


def evolve(
    committer: Committer, schema: pa.Schema, physical: pa.Schema, defaults: Mapping[str, Any]
) -> None:
    """Bring the columns to ``physical``, the layout of records of ``schema``.

    A new field gets its default in every stored row.
    """
    view = committer.view
    assert view.dataset is not None
    if schema.equals(view.schema) and not any(steps(view.dataset.schema, physical)):
        return
    finish(committer)
    dataset = committer.fresh_handle()
    added, replaced = steps(dataset.schema, physical)
    # A known field without a type holds only Nones, which were put as such: it gets no default.
    known = set(view.schema.names)
    new = {k: v for k, v in defaults.items() if k not in known and v is not None}
    empty = [field for field in added if field.name not in new]
    if empty:
        _add_nulls(dataset, empty)
        committer.publish(dataset)
    for field in added:
        if field.name in new:
            _write_default(dataset, field, new)
            committer.publish(dataset)
            _name_default(dataset, field)
            committer.publish(dataset)
    for field in replaced:
        _write_wide(dataset, field)
        committer.publish(dataset)
        _swap(dataset, field)
        committer.publish(dataset)
        dataset.drop_columns(spare_columns(dataset.schema))
        committer.publish(dataset)
    dataset.update_schema_metadata(layout.metadata(schema))
    committer.publish(dataset)
    committer.record_checksums()


def finish(committer: Committer) -> None:
    """Drop the spare columns that an interrupted change left."""
    with translated("finish a schema change of", committer.root):
        dataset = committer.fresh_handle()
        spare = spare_columns(dataset.schema)
        if spare:
            dataset.drop_columns(spare)
            committer.publish(dataset)


def set_encodings(committer: Committer, physical: pa.Schema) -> None:
    """Have later writes encode columns as ``physical`` does."""
    dataset = committer.view.dataset
    if dataset is None:
        return
    changes = layout.encoding_changes(dataset.schema, physical)
    if changes:
        with translated("change the compression of", committer.root):
            dataset = committer.fresh_handle()
            dataset.update_field_metadata(changes)
            committer.publish(dataset)


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
    """The part of ``new`` that ``old`` lacks; None if they differ in anything else.

    Lance merges such a part into the field of the same name without touching data.
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


def spare_columns(schema: pa.Schema) -> list[str]:
    """The columns that an interrupted change, or one that is not finished yet, left."""
    return [name for name in schema.names if name.startswith((_WIDE, _OLD))]


def _add_nulls(dataset: Any, fields: list[pa.Field]) -> None:
    """Add columns of nulls, which writes no data."""
    dataset.add_columns(pa.schema(fields))


def _write_default(dataset: Any, field: pa.Field, defaults: Mapping[str, Any]) -> None:
    """Write the spare column of a new field, with its default in every row."""
    _write_spare(dataset, field, ARRIVAL, lambda column: fill(field, len(column), defaults))


def _name_default(dataset: Any, field: pa.Field) -> None:
    """Give the spare column of a new field its name."""
    dataset.alter_columns({"path": _WIDE + field.name, "name": field.name})


def _write_wide(dataset: Any, field: pa.Field) -> None:
    """Write the spare column of a widened field."""
    _write_spare(dataset, field, field.name, lambda column: convert(column, field.type))


def _swap(dataset: Any, field: pa.Field) -> None:
    """Give the spare column of a widened field its name, in one commit with the old column's."""
    dataset.alter_columns(
        {"path": field.name, "name": _OLD + field.name},
        {"path": _WIDE + field.name, "name": field.name},
    )


def _write_spare(
    dataset: Any, field: pa.Field, source: str, values: Callable[[pa.Array], pa.Array]
) -> None:
    """Write a spare column for ``field``, computed from the column ``source``."""
    import lance

    schema = pa.schema([field.with_name(_WIDE + field.name)])

    @lance.batch_udf(output_schema=schema)
    def computed(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([values(batch.column(0))], schema=schema)

    dataset.add_columns(computed, read_columns=[source])
