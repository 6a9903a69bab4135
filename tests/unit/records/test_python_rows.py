"""Arrow data as Python records: the same objects as Arrow's own conversion."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persisting.records.python_rows import python_rows

VALUES: dict[pa.DataType, list[Any]] = {
    pa.int8(): [-128, 127],
    pa.int64(): [-(2**63), 2**63 - 1],
    pa.uint64(): [0, 2**64 - 1],
    pa.float32(): [0.1, float("inf")],
    pa.float64(): [0.1, -0.0],
    pa.bool_(): [True, False],
    pa.string(): ["", "日本\x00x"],
    pa.large_string(): ["a", "b"],
    pa.binary(): [b"", b"\xff"],
    pa.timestamp("us"): [dt.datetime(2020, 1, 1), dt.datetime(1960, 1, 1)],
    pa.list_(pa.int64()): [[1], []],
    pa.struct({"a": pa.int64()}): [{"a": 1}, {"a": None}],
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
@pytest.mark.parametrize("with_null", [False, True])
def test_values_are_those_of_arrows_own_conversion(kind: pa.DataType, with_null: bool) -> None:
    values = [*VALUES[kind], None] if with_null else VALUES[kind]
    table = pa.table({"id": range(len(values)), "value": pa.array(values, kind)})
    found, expected = python_rows(table), table.to_pylist()
    assert found == expected
    assert [type(row["value"]) for row in found] == [type(row["value"]) for row in expected]
    assert all(type(row["id"]) is int for row in found)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.text()), max_size=20))
def test_chunked_tables_are_converted_in_order(rows: list[tuple[int, str]]) -> None:
    schema = pa.schema({"n": pa.int64(), "text": pa.string()})
    parts = [pa.table({"n": [n], "text": [text]}, schema=schema) for n, text in rows]
    table = pa.concat_tables(parts) if parts else schema.empty_table()
    assert python_rows(table) == [{"n": n, "text": text} for n, text in rows]


@pytest.mark.parametrize("name", ["'", '"', "\\", "\n", "{x}", "日", "v0", "", "__import__('os')"])
def test_any_name_of_a_field_is_only_a_key(name: str) -> None:
    batch = pa.RecordBatch.from_pylist([{name: 1, "other": "a"}, {name: 2, "other": "b"}])
    assert python_rows(batch) == batch.to_pylist()


def test_single_column_is_converted() -> None:
    assert python_rows(pa.table({"a": [1, 2]})) == [{"a": 1}, {"a": 2}]


def test_tables_with_very_many_columns_are_converted() -> None:
    table = pa.table({f"c{number}": [number, None] for number in range(300)})
    assert python_rows(table) == table.to_pylist()


def test_tables_without_columns_keep_their_rows() -> None:
    table = pa.table({"a": [1, 2]}).select([])
    assert python_rows(table) == table.to_pylist()
