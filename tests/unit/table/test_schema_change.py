"""The steps that bring a table to a changed schema."""

from __future__ import annotations

import pyarrow as pa
import pytest

from persisting.table import schema_change


def schema(**fields: pa.DataType) -> pa.Schema:
    return pa.schema(list(fields.items()))


def struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct(list(fields.items()))


INT, FLOAT, TEXT = pa.int64(), pa.float64(), pa.string()


def test_the_same_columns_in_any_order_need_no_schema_change() -> None:
    assert schema_change.steps(schema(a=INT, b=TEXT), schema(b=TEXT, a=INT)) == ([], [])


def test_a_new_field_is_added_and_a_widened_one_is_replaced() -> None:
    added, replaced = schema_change.steps(schema(a=INT), schema(a=FLOAT, b=TEXT))
    assert [f.name for f in added] == ["b"]
    assert replaced == [pa.field("a", FLOAT)]


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        (struct(x=INT), struct(x=INT, y=TEXT), struct(y=TEXT)),
        (pa.list_(struct(x=INT)), pa.list_(struct(x=INT, y=TEXT)), pa.list_(struct(y=TEXT))),
        (struct(d=struct(x=INT)), struct(d=struct(x=INT, y=TEXT)), struct(d=struct(y=TEXT))),
    ],
)
def test_a_new_field_inside_dicts_is_added_without_rewriting_the_others(
    old: pa.DataType, new: pa.DataType, part: pa.DataType
) -> None:
    added, replaced = schema_change.steps(schema(a=old), schema(a=new))
    assert replaced == []
    assert [f.type for f in added] == [part]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (struct(x=INT), struct(x=FLOAT, y=TEXT)),
        (pa.list_(INT), pa.list_(FLOAT)),
        (pa.list_(FLOAT, 2), pa.list_(FLOAT)),
        (pa.list_(pa.null()), pa.list_(struct(x=INT))),
    ],
)
def test_any_other_type_change_replaces_the_column(old: pa.DataType, new: pa.DataType) -> None:
    added, replaced = schema_change.steps(schema(a=old), schema(a=new))
    assert (added, replaced) == ([], [pa.field("a", new)])


def test_spare_columns_are_recognized_by_name() -> None:
    names = schema(a=INT, _persisting_wide_a=FLOAT, _persisting_old_b=INT, _persisting_time=INT)
    assert schema_change.spare_columns(names) == ["_persisting_wide_a", "_persisting_old_b"]
