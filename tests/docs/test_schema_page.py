"""The tables of docs/guide/schema.md, row by row."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.doc_pages import DOCS, both, code, tables

from persisting.errors import SchemaError
from persisting.queue import LanceBackend, PersistingBackend

pages = pytest.mark.parametrize("page", both("guide/schema.md"), ids=["en", "zh"])
backends = pytest.mark.parametrize("kind", [LanceBackend, PersistingBackend])

UTC = dt.timezone.utc

STORED: list[Any] = [
    True,
    -(2**63),
    1.5,
    "中文 é",
    b"\0\xff",
    dt.datetime(2024, 5, 6, 7, 8, 9, 10),
    dt.datetime(2024, 5, 6, 7, 8, tzinfo=dt.timezone(dt.timedelta(hours=2))),
    dt.date(2024, 5, 6),
    dt.time(7, 8, 9, 10),
    dt.timedelta(days=1, microseconds=1),
    decimal.Decimal("12.5"),
    uuid.UUID(int=7),
    [1, None],
    [0.1, 0.2],
    {"a": 1},
    [{"a": 1}],
    None,
    np.int16(3),
    np.array([0.5, 1.5], dtype="float32"),
]
"""One value for each row of the first table, in its order."""

REFUSED: list[list[dict[Any, Any]]] = [
    [{"x": 2**63}],
    [{"x": object()}, {"x": {1, 2}}, {"x": 1j}],
    [{"x": "\ud800"}],
    [{"x": dt.time(1, tzinfo=UTC)}],
    [{"x": decimal.Decimal(10) ** 20}, {"x": decimal.Decimal("NaN")}],
    [{"x": [1, "a"]}],
    [],
    [{1: 2}, {"x": {1: 2}}],
    [{"": 1}, {"a.b": 1}, {"a`b": 1}, {"a\0b": 1}, {"x" * 1025: 1}],
    [{"_persisting_x": 1}, {"_rowid": 1}, {"_rowaddr": 1}, {"_rowoffset": 1}],
]
"""Records for each row of the second table, in its order; the nested one is made below."""


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pages
def test_the_tables_have_the_rows_that_are_tested_here(page: Path):
    stored, refused, _ = tables(page)[:3]
    assert len(stored) - 1 == len(STORED)
    assert len(refused) - 1 == len(REFUSED)


@pages
@pytest.mark.parametrize("row", range(len(STORED)))
@backends
async def test_a_value_is_stored_under_the_type_of_its_row(page, kind, row, tmp_path):
    cells = tables(page)[0][1 + row]
    value = STORED[row]
    async with kind(0, str(tmp_path)) as backend:
        await backend.put({"x": value})
        await backend.flush()
        (record,) = await backend.get()
        dtype = (await backend.get_arrow()).schema.field("x").type
    expected = value.tolist() if isinstance(value, np.ndarray) else value
    assert record["x"] == expected
    if code(cells[1]):
        assert str(dtype) == code(cells[1])


@pytest.mark.parametrize("row", range(len(REFUSED)))
@backends
async def test_what_cannot_be_stored_raises_and_stores_nothing(kind, row, tmp_path):
    async with kind(0, str(tmp_path)) as backend:
        for record in REFUSED[row] or [{"x": nested(40)}]:
            with pytest.raises(SchemaError):
                await backend.put(record)
        assert backend.total_count() == 0


def column(*values: Any, dtype: pa.DataType) -> pa.Table:
    return pa.table({"x": pa.array(values, dtype)})


WIDENED: list[tuple[Any, Any, str]] = [
    (None, "text", "string"),
    (1, 1.5, "double"),
    (column(1, dtype=pa.int32()), 2**40, "int64"),
    (column(1, dtype=pa.int8()), column(255, dtype=pa.uint8()), "int16"),
    ({"a": [{"b": 1}]}, {"a": [{"c": "x"}]}, "struct<a: list<item: struct<b: int64, c: string>>>"),
    ([1], [1.5, 2.5, None], "list<item: double>"),
    ([1.0, 2.0], [1.0], "list<item: double>"),
]
"""A first value, a wider one and the type after them, for each row of the third table."""


@pytest.mark.parametrize("row", range(len(WIDENED)))
@pytest.mark.parametrize("flushed", [False, True])
async def test_a_type_widens_as_its_row_says(row, flushed, tmp_path):
    assert len(tables(DOCS / "guide/schema.md")[2]) - 1 == len(WIDENED)
    first, second, expected = WIDENED[row]
    async with PersistingBackend(0, str(tmp_path)) as backend:
        for value in (first, second):
            if isinstance(value, pa.Table):
                await backend.put_arrow(value)
            else:
                await backend.put({"x": value})
            if flushed:
                await backend.flush()
        assert str((await backend.get_arrow()).schema.field("x").type) == expected
        assert backend.total_count() == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("text", 1),
        (True, 1),
        (1, True),
        (dt.date(2024, 1, 1), dt.datetime(2024, 1, 1)),
        (dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 1, tzinfo=UTC)),
        (2**53 + 1, 1.5),
    ],
)
async def test_other_changes_raise_and_keep_what_there_is(first, second, tmp_path):
    async with PersistingBackend(0, str(tmp_path)) as backend:
        await backend.put({"x": first})
        with pytest.raises(SchemaError, match="field 'x'"):
            await backend.put({"x": second})
        assert await backend.get() == [{"x": first}]


@pytest.mark.parametrize(
    "second",
    [{"a": 1}, {"a": 1, "b": 2.5, "c": 3}, {"a": "1", "b": 2.5}, {"a": 1.5, "b": 2.5}],
    ids=["missing", "extra", "type", "float in int"],
)
async def test_lance_backend_takes_only_the_fields_of_the_first_record(second, tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put({"a": 1, "b": 2.5})
        with pytest.raises(SchemaError):
            await backend.put(second)
        await backend.put({"b": 3, "a": None})
        assert await backend.get() == [{"a": 1, "b": 2.5}, {"a": None, "b": 3.0}]


async def test_lance_backend_takes_vectors_of_one_length(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put({"v": [1.0, 2.0]})
        with pytest.raises(SchemaError, match="vector of 2 floats, got vector of 1"):
            await backend.put({"v": [1.0]})


async def test_adding_a_field_rewrites_no_stored_data(tmp_path):
    async with PersistingBackend(0, str(tmp_path)) as backend:
        await backend.put_batch([{"a": n} for n in range(1000)])
        await backend.flush()
        before = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "data.lance/data").iterdir()}
        await backend.put({"a": 1, "b": "new"})
        await backend.flush()
        after = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "data.lance/data").iterdir()}
        assert before.items() <= after.items()
        assert len(after) == len(before) + 1


async def test_a_vector_that_becomes_a_list_is_told_in_the_log(tmp_path, caplog):
    async with PersistingBackend(0, str(tmp_path)) as backend:
        await backend.put({"v": [1.0, 2.0]})
        await backend.put({"v": [1.0]})
    assert "can no longer be searched" in caplog.text
