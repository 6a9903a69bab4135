"""Arrow data from users, and batches of an older schema."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from persisting.errors import SchemaError
from persisting.records import EMPTY, Rules
from persisting.records.arrow import accept, align, merge
from persisting.records.arrow_casts import convert

EVOLVING, STRICT = Rules(evolving=True), Rules()


def test_accept_drops_metadata_and_nullability() -> None:
    field = pa.field("a", pa.int64(), nullable=False, metadata={"k": "v"})
    table = pa.table([pa.array([1])], schema=pa.schema([field], metadata={"m": "n"}))
    assert accept(table, EMPTY).schema.equals(pa.schema([("a", pa.int64())]), check_metadata=True)


def test_accept_converts_lists_to_vectors_for_a_vector_field() -> None:
    schema = pa.schema([("v", pa.list_(pa.float64(), 2))])
    fitting = pa.table({"v": [[1.0, 2.0], None]})
    assert accept(fitting, schema).schema == schema
    ragged = pa.table({"v": [[1.0, 2.0], [3.0]]})
    assert accept(ragged, schema).schema.field("v").type == pa.list_(pa.float64())


def test_merge_returns_the_same_schema_object_if_nothing_is_new() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    for rules in (EVOLVING, STRICT):
        assert merge(schema, pa.schema([("b", pa.string()), ("a", pa.int64())]), rules) is schema


def test_merge_appends_new_fields_after_the_old_ones() -> None:
    schema = pa.schema([("a", pa.int64())])
    merged = merge(schema, pa.schema([("z", pa.string()), ("a", pa.float64())]), EVOLVING)
    assert merged == pa.schema([("a", pa.float64()), ("z", pa.string())])


def test_merge_refuses_new_fields_under_strict_rules() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    for other, why in (
        ([("a", pa.int64())], "'b' is missing"),
        ([("a", pa.int64()), ("b", pa.string()), ("c", pa.string())], "'c' is not in the schema"),
        ([("a", pa.int32()), ("b", pa.string())], "'a' is int, got int32"),
    ):
        with pytest.raises(SchemaError, match=why):
            merge(schema, pa.schema(other), STRICT)


CONVERSIONS: list[tuple[list[Any], pa.DataType, pa.DataType]] = [
    ([1, None, 3, 4], pa.int32(), pa.int64()),
    ([1, None, 3, 4], pa.int64(), pa.float64()),
    ([[1], None, [], [2, None]], pa.list_(pa.int64()), pa.list_(pa.float64())),
    ([[], None, [], []], pa.list_(pa.null()), pa.list_(pa.string())),
    ([[1.5, 2.5], None, [3.5, 4.5]], pa.list_(pa.float32(), 2), pa.list_(pa.float64(), 2)),
    ([[1.5, 2.5], None, [3.5, 4.5]], pa.list_(pa.float64(), 2), pa.list_(pa.float64())),
    ([None, None], pa.null(), pa.struct([("a", pa.int64())])),
    (
        [{"a": 1}, None, {"a": None}],
        pa.struct([("a", pa.int64())]),
        pa.struct([("a", pa.float64())]),
    ),
    ([{}, None, {}], pa.struct([]), pa.struct([])),
    (
        [[[1], None], None, [], [[2, 3]]],
        pa.list_(pa.list_(pa.int64())),
        pa.list_(pa.list_(pa.float64())),
    ),
    (
        [{"a": [[1.0], None]}, None, {"a": None}, {"a": [[], [2.0]]}],
        pa.struct([("a", pa.list_(pa.list_(pa.float32())))]),
        pa.struct([("a", pa.list_(pa.list_(pa.float64())))]),
    ),
]


@pytest.mark.parametrize(("values", "old", "new"), CONVERSIONS, ids=lambda v: str(v)[:40])
def test_convert_changes_no_value_in_any_slice(
    values: list[Any], old: pa.DataType, new: pa.DataType
) -> None:
    array = pa.array(values, old)
    for start in range(len(values) + 1):
        for length in range(len(values) - start + 1):
            wider = convert(array.slice(start, length), new)
            wider.validate(full=True)
            assert wider.type == new
            assert wider.to_pylist() == values[start : start + length]


def test_convert_adds_missing_dict_fields_as_none_in_any_slice() -> None:
    old = pa.list_(pa.struct([("a", pa.int64())]))
    new = pa.list_(pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]))
    values = [[{"a": 1}, None], None, [], [{"a": None}], [{"a": 5}]]
    for start in range(len(values)):
        wider = convert(pa.array(values, old).slice(start), new)
        wider.validate(full=True)
        expected = [
            row and [item and {**item, "b": None} for item in row] for row in values[start:]
        ]
        assert wider.to_pylist() == expected


def test_convert_ignores_values_hidden_under_a_null() -> None:
    hidden = pa.array([2**60, 1, 2])
    first = pa.array([True, False, False])
    masked = pa.StructArray.from_arrays([hidden], ["a"], mask=first)
    wider = convert(masked, pa.struct([("a", pa.float64())]))
    assert wider.to_pylist() == [None, {"a": 1.0}, {"a": 2.0}]
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, 3]), hidden, mask=pa.array([True, False, False])
    )
    assert convert(lists, pa.list_(pa.float64())).to_pylist() == [None, [1.0], [2.0]]


def test_align_fills_reorders_and_widens() -> None:
    batch = pa.record_batch({"b": pa.array([1, 2]), "a": pa.array(["x", "y"])})
    schema = pa.schema([("a", pa.string()), ("b", pa.float64()), ("c", pa.int64())])
    aligned = align(batch, schema, {"c": 7})
    assert aligned.schema == schema
    assert aligned.to_pylist() == [{"a": "x", "b": 1.0, "c": 7}, {"a": "y", "b": 2.0, "c": 7}]


def test_align_to_a_schema_without_fields_keeps_the_number_of_rows() -> None:
    batch = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    assert align(batch, EMPTY).num_rows == 2
