"""Every row of the tables of docs/guide/schema.md holds."""

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
"""One value for each row of the first table, in order."""

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
"""Records for each row of the second table, in order; an empty list stands for deep nesting."""


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pages
def test_schema_page_tables_have_the_tested_rows(page: Path):
    stored, refused, _ = tables(page)[:3]
    assert len(stored) - 1 == len(STORED)
    assert len(refused) - 1 == len(REFUSED)


@pages
@pytest.mark.parametrize("row", range(len(STORED)))
@backends
async def test_value_is_stored_with_the_documented_type(page, kind, row, tmp_path):
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
async def test_refused_value_raises_and_stores_nothing(kind, row, tmp_path):
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
"""For each row of the third table: a value, a wider value, and the resulting type."""


@pytest.mark.parametrize("row", range(len(WIDENED)))
@pytest.mark.parametrize("flushed", [False, True])
async def test_field_widens_to_the_documented_type(row, flushed, tmp_path):
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
