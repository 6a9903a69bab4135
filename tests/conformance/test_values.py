"""Every supported value reads back equal at any place in a record."""

from __future__ import annotations

import datetime as dt
import enum
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.buckets import Bucket
from support.comparing import assert_same
from support.values import GOOD_NAMES, INDIA, ODD_OFFSET, UTC, VALUES

from persisting.queue import SchemaError


async def check(keeper: Bucket, rows: list[dict[str, Any]]) -> None:
    """Assert that rows read the same before a flush, after it, and after reopening."""
    backend = keeper.open()
    for row in rows:
        await backend.put(row)
    await backend.put_batch(rows)
    assert_same(rows * 2, await backend.get(), "buffered")
    await backend.flush()
    assert_same(rows * 2, await backend.get(), "flushed")
    await backend.put_batch(rows)
    backend = await keeper.reopen(backend)
    assert_same(rows * 3, await backend.get(), "reopened")
    for offset in range(len(rows)):
        assert_same(rows[offset : offset + 1], await backend.get(offset, 1), "alone")


@pytest.mark.parametrize("name", VALUES)
async def test_value_reads_back_equal_at_any_nesting(keeper: Bucket, name: str) -> None:
    value = VALUES[name]
    row = {
        "value": value,
        "list": [value, None],
        "dict": {"x": value},
        "dicts": [{"x": value}, {"x": None}, None],
        "deep": {"y": [[{"x": [value]}], []]},
    }
    await check(keeper, [row, row, dict.fromkeys(row), row])


async def test_all_values_together_read_back_equal(keeper: Bucket) -> None:
    await check(keeper, [dict(VALUES), dict.fromkeys(VALUES), dict(VALUES)])


async def test_whole_numbers_among_floats_read_back_as_floats(keeper: Bucket) -> None:
    backend = keeper.open()
    for _ in range(2):
        await backend.put({"top": [1, 2.5], "inside": {"x": [None, 1, 2.5]}})
    expected = {"top": [1.0, 2.5], "inside": {"x": [None, 1.0, 2.5]}}
    assert_same([expected] * 2, await backend.get())
    await backend.flush()
    assert_same([expected] * 2, await backend.get())


async def test_numpy_times_read_back_as_python_times(keeper: Bucket) -> None:
    backend = keeper.open()
    for _ in range(2):
        await backend.put(
            {
                "t": np.datetime64("2024-01-02T03:04:05.000006"),
                "n": np.datetime64("2024-01-02T03:04:05", "ns"),
                "d": np.datetime64("2024-01-02"),
                "s": np.timedelta64(90, "s"),
            }
        )
    expected = {
        "t": dt.datetime(2024, 1, 2, 3, 4, 5, 6),
        "n": dt.datetime(2024, 1, 2, 3, 4, 5),
        "d": dt.date(2024, 1, 2),
        "s": dt.timedelta(seconds=90),
    }
    assert_same([expected] * 2, await backend.get())
    await backend.flush()
    assert_same([expected] * 2, await backend.get())


async def test_pandas_times_are_exact_or_refused(keeper: Bucket) -> None:
    backend = keeper.open()
    good = {
        "t": pd.Timestamp("2024-01-01 00:00:00.000001"),
        "z": pd.Timestamp("2024-01-01", tz="Asia/Tokyo"),
        "d": pd.Timedelta(microseconds=1),
    }
    bad = {
        "t": pd.Timestamp("2024-01-01 00:00:00.000000001"),
        "z": pd.NaT,
        "d": pd.Timedelta(1, "ns"),
    }
    for _ in range(2):
        await backend.put(good)
        for name, value in bad.items():
            with pytest.raises(SchemaError, match=f"'{name}'"):
                await backend.put({**good, name: value})
    await backend.flush()
    expected = {
        "t": dt.datetime(2024, 1, 1, 0, 0, 0, 1),
        "z": dt.datetime(2023, 12, 31, 15, tzinfo=UTC),
        "d": dt.timedelta(microseconds=1),
    }
    assert_same([expected] * 2, await backend.get())


async def test_subclasses_read_back_as_their_base(keeper: Bucket) -> None:
    class Colour(enum.IntEnum):
        RED = 1

    class Kind(str, enum.Enum):
        A = "a"

    backend = keeper.open()
    for _ in range(2):
        await backend.put({"c": Colour.RED, "k": Kind.A, "f": np.float64(0.5)})
    assert_same([{"c": 1, "k": "a", "f": 0.5}] * 2, await backend.get())


class Opaque:
    pass


UNSTORABLE: dict[str, Any] = {
    "int-above": 2**63,
    "int-below": -(2**63) - 1,
    "np-uint64-above": np.uint64(2**63),
    "object": Opaque(),
    "set": {1, 2},
    "complex": 1j,
    "np-complex": np.complex128(1j),
    "long-double": np.longdouble(1),
    "function": len,
    "range": range(3),
    "class": int,
    "generator": (i for i in range(3)),
    "surrogate": "a\ud800",
    "int-key": {1: 2},
    "bytes-key": {b"a": 2},
    "none-key": {None: 2},
    "time-with-zone": dt.time(1, tzinfo=UTC),
    "timedelta-max": dt.timedelta.max,
    "timedelta-min": dt.timedelta(microseconds=-(2**63 - 1)),
    "np-year-0": np.datetime64("0000-01-01"),
    "np-years-0": np.array(["0000-01-01", "2020-01-01"], dtype="datetime64[D]"),
    "np-masked": np.ma.array([1, 2], mask=[0, 1]),
    "np-record": np.array([(1, 2.0)], dtype=[("a", int), ("b", float)])[0],
    "np-records": np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    "decimal-nan": Decimal("NaN"),
    "decimal-inf": Decimal("Infinity"),
    "decimal-wide": Decimal("1e20"),
    "decimal-fine": Decimal("1e-19"),
    "not-a-time": np.datetime64("NaT"),
    "nanoseconds": np.datetime64("2024-01-01T00:00:00.000000001"),
    "far-year": np.datetime64("20000-01-01T00:00:00"),
    "before-year-1": dt.datetime.min.replace(tzinfo=INDIA),
    "after-year-9999": dt.datetime.max.replace(tzinfo=ODD_OFFSET),
    "mixed-list": [1, "a"],
    "bool-and-int": [True, 1],
    "list-and-int": [[1], 1],
    "float-and-large-int": [1.5, 2**53 + 1],
    "empty-key": {"": 1},
    "dotted-key": {"a.b": 1},
}


@pytest.mark.parametrize(("kind", "large"), [("float32", 1e300), ("float16", 70000.0)])
async def test_narrow_vector_refuses_values_that_would_become_infinite(
    stored: Bucket, kind: str, large: float
) -> None:
    backend = stored.open(vector_type=kind)
    fine = [{"v": [0.5, math.inf]}] * 20
    await backend.put_batch(fine)
    for put in (backend.put, lambda row: backend.put_batch([*fine, row])):
        with pytest.raises(SchemaError, match=f"'v' holds .*beyond the range of {kind}"):
            await put({"v": [0.5, large]})
    await backend.put(fine[0])
    backend = await stored.reopen(backend)
    assert await backend.get() == [*fine, fine[0]]


@pytest.mark.parametrize("name", UNSTORABLE)
async def test_unstorable_value_raises_with_the_field_name(keeper: Bucket, name: str) -> None:
    value = UNSTORABLE[name]
    backend = keeper.open()
    records = [
        {"id": 1, "field": value},
        {"id": 1, "field": [value]},
        {"id": 1, "field": {"x": value}},
        {"id": 1, "field": [{"x": value}]},
    ]
    for record in records:
        with pytest.raises(SchemaError, match="field"):
            await backend.put(record)
        with pytest.raises(SchemaError, match="field"):
            await backend.put_batch([{"id": 0, "field": None}, record])
    assert backend.total_count() == 0


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (1, 2**63),
        ("a", "\udfff"),
        (dt.timedelta(1), dt.timedelta.max),
        (Decimal(1), Decimal("NaN")),
        (Decimal(1), Decimal("1e-19")),
        (dt.datetime(2024, 1, 1, tzinfo=UTC), dt.datetime.min.replace(tzinfo=INDIA)),
        (dt.time(1), dt.time(1, tzinfo=UTC)),
        ([1, 2], [1, 2**63]),
        ({"x": "a"}, {"x": "\ud800"}),
        ([{"x": 1}], [{"x": 2**63}]),
    ],
    ids=repr,
)
async def test_a_bad_value_raises_after_good_ones_of_its_kind(
    keeper: Bucket, good: Any, bad: Any
) -> None:
    backend = keeper.open()
    await backend.put({"field": good})
    await backend.put_batch([{"field": good}] * 3)
    with pytest.raises(SchemaError, match="field"):
        await backend.put({"field": bad})
    with pytest.raises(SchemaError, match="field"):
        await backend.put_batch([{"field": good}, {"field": bad}, {"field": good}])
    assert_same([{"field": good}] * 4, await backend.get())
    await backend.flush()
    assert_same([{"field": good}] * 4, await backend.get())


def nested_lists(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


async def test_a_record_that_contains_itself_raises(keeper: Bucket) -> None:
    endless: list[Any] = []
    endless.append(endless)
    backend = keeper.open()
    with pytest.raises(SchemaError, match="deep"):
        await backend.put({"a": endless})
    assert backend.total_count() == 0


async def test_nesting_is_stored_up_to_the_limit_and_refused_beyond(keeper: Bucket) -> None:
    backend = keeper.open()
    await backend.put({"a": nested_lists(20)})
    await backend.flush()
    assert await backend.get() == [{"a": nested_lists(20)}]
    with pytest.raises(SchemaError, match="deep"):
        await backend.put({"a": nested_lists(60)})


async def test_any_readable_name_can_be_a_field(keeper: Bucket) -> None:
    row = {name: i for i, name in enumerate(GOOD_NAMES)}
    await check(keeper, [{**row, "nested": dict(row), "dicts": [dict(row)]}] * 2)


async def test_names_that_differ_in_case_are_different_fields(keeper: Bucket) -> None:
    await check(keeper, [{"a": 1, "A": "x", "nested": {"b": 1, "B": "y"}}] * 2)


@pytest.mark.parametrize(
    "name",
    ["", "a.b", "a`b", "a\0b", "_rowid", "_rowaddr", "*", "_persisting_time", "\ud800", "x" * 2000],
    ids=lambda n: repr(n)[:20],
)
async def test_unusual_field_name_is_stored_or_refused(keeper: Bucket, name: str) -> None:
    backend = keeper.open()
    with pytest.raises(SchemaError):
        await backend.put({"ok": 1, name: 1})
    with pytest.raises(SchemaError):
        await backend.put({"ok": 1, "nested": [{name: 1}]})
    assert backend.total_count() == 0
