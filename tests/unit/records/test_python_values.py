"""One value: its canonical form, its type, and whether it fits."""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.comparing import same

from persisting.errors import SchemaError
from persisting.records.values import AWARE, DECIMAL, NAIVE, UUID, Misfit, Values, type_name

FLOATS = pa.float64()
STRICT = Values(evolving=False, vector=FLOATS)
EVOLVING = Values(evolving=True, vector=FLOATS)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (None, pa.null()),
        (True, pa.bool_()),
        (1, pa.int64()),
        (1.5, pa.float64()),
        ("a", pa.string()),
        (b"a", pa.binary()),
        (dt.datetime(2024, 1, 1), NAIVE),
        (dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc), AWARE),
        (dt.date(2024, 1, 1), pa.date32()),
        (dt.time(1), pa.time64("us")),
        (dt.timedelta(1), pa.duration("us")),
        (Decimal(1), DECIMAL),
        (uuid.UUID(int=1), UUID),
        ([], pa.list_(pa.null())),
        ([1], pa.list_(pa.int64())),
        ([None, "a"], pa.list_(pa.string())),
        ({}, pa.struct([])),
        ({"a": 1, "b": None}, pa.struct([("a", pa.int64()), ("b", pa.null())])),
        ([{"a": 1}, None], pa.list_(pa.struct([("a", pa.int64())]))),
    ],
    ids=repr,
)
def test_describe_returns_the_arrow_type_of_a_python_value(value: Any, dtype: pa.DataType) -> None:
    for values in (STRICT, EVOLVING):
        canonical, own = values.describe(value, "f", top=True)
        assert own == dtype
        assert same(value, canonical)


def test_a_list_of_floats_is_a_vector_only_at_the_top_level() -> None:
    assert STRICT.describe([0.5, 1.5], "f", top=True)[1] == pa.list_(FLOATS, 2)
    assert STRICT.describe([0.5, 1.5], "f")[1] == pa.list_(FLOATS)
    assert STRICT.describe([[0.5]], "f", top=True)[1] == pa.list_(pa.list_(FLOATS))
    assert STRICT.describe([0.5, None], "f", top=True)[1] == pa.list_(FLOATS)
    assert STRICT.describe([1, 2], "f", top=True)[1] == pa.list_(pa.int64())


def test_a_numpy_array_keeps_its_float_width() -> None:
    for width, dtype in ((np.float16, pa.float16()), (np.float32, pa.float32())):
        _, own = STRICT.describe(np.array([0.1, 0.2], dtype=width), "f", top=True)
        assert own == pa.list_(dtype, 2)


def test_a_narrower_vector_type_rounds_python_floats() -> None:
    narrow = Values(evolving=False, vector=pa.float32())
    value, own = narrow.describe([0.1, 0.5], "f", top=True)
    assert own == pa.list_(pa.float32(), 2)
    assert value == [float(np.float32(0.1)), 0.5]
    assert narrow.describe(0.1, "f")[0] == 0.1


def test_dicts_in_a_list_are_merged_if_the_schema_evolves() -> None:
    value, own = EVOLVING.describe([{"a": 1}, {"b": "x"}], "f")
    assert value == [{"a": 1, "b": None}, {"a": None, "b": "x"}]
    assert own.value_type == pa.struct([("a", pa.int64()), ("b", pa.string())])
    with pytest.raises(SchemaError, match="'f'"):
        STRICT.describe([{"a": 1}, {"b": "x"}], "f")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, pa.float64()),
        (2**60, pa.float64()),
        (-1, pa.int8()),
        (255, pa.uint8()),
        (0.5, pa.float16()),
        (b"ab", pa.binary(2)),
        (Decimal("1.5"), pa.decimal128(5, 2)),
        ([1], pa.list_(FLOATS)),
        ([1, 2], pa.list_(FLOATS, 2)),
        ((0.5, 1.5), pa.list_(FLOATS, 2)),
        (None, pa.string()),
    ],
    ids=repr,
)
def test_a_value_fits_a_type_that_holds_it_exactly(value: Any, dtype: pa.DataType) -> None:
    fitted = STRICT.fit(value, dtype, "f")
    stored = pa.array([fitted], dtype).to_pylist()[0]
    assert stored == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, pa.int64()),
        (True, pa.float64()),
        (1, pa.bool_()),
        (1.0, pa.int64()),
        ("1", pa.int64()),
        (1, pa.string()),
        ("a", pa.binary()),
        (b"a", pa.string()),
        (128, pa.int8()),
        (-1, pa.uint8()),
        (0.1, pa.float32()),
        (b"abc", pa.binary(2)),
        (Decimal("1.234"), pa.decimal128(5, 2)),
        (1, DECIMAL),
        (dt.date(2024, 1, 1), NAIVE),
        (dt.datetime(2024, 1, 1), pa.date32()),
        (dt.datetime(2024, 1, 1), AWARE),
        (dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc), NAIVE),
        ([1.0], pa.list_(FLOATS, 2)),
        ([1.0, None], pa.list_(FLOATS, 2)),
        (["a"], pa.list_(pa.int64())),
        ({"a": 1}, pa.list_(pa.int64())),
        ([1], pa.struct([("a", pa.int64())])),
        ({"b": 1}, pa.struct([("a", pa.int64())])),
        (uuid.UUID(int=1), pa.binary(16)),
    ],
    ids=repr,
)
def test_a_value_of_another_type_does_not_fit(value: Any, dtype: pa.DataType) -> None:
    for values in (STRICT, EVOLVING):
        with pytest.raises(Misfit):
            values.fit(value, dtype, "f")


def test_an_int_that_a_float_cannot_hold_exactly_raises() -> None:
    with pytest.raises(SchemaError, match=r"'f'.*9007199254740993"):
        STRICT.fit(2**53 + 1, pa.float64(), "f")


def test_a_dict_may_lack_fields_only_if_the_schema_evolves() -> None:
    dtype = pa.struct([("a", pa.int64()), ("b", pa.string())])
    assert EVOLVING.fit({"b": "x"}, dtype, "f") == {"a": None, "b": "x"}
    with pytest.raises(Misfit):
        STRICT.fit({"b": "x"}, dtype, "f")


def test_schema_errors_name_the_path_of_the_value() -> None:
    with pytest.raises(SchemaError, match=r"'f\.a\[1\]\.b'"):
        STRICT.describe({"a": [{"b": 1}, {"b": 2**64}]}, "f")


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (pa.int64(), "int"),
        (pa.string(), "str"),
        (pa.null(), "None"),
        (UUID, "UUID"),
        (DECIMAL, "Decimal"),
        (NAIVE, "datetime without timezone"),
        (AWARE, "datetime with timezone"),
        (pa.list_(pa.int64()), "list of int"),
        (pa.list_(FLOATS, 3), "vector of 3 floats"),
        (pa.struct([("a", pa.int64()), ("b", pa.int64())]), "dict with a, b"),
        (pa.struct([]), "dict with no fields"),
        (pa.int32(), "int32"),
    ],
)
def test_type_name_uses_the_terms_of_python(dtype: pa.DataType, words: str) -> None:
    assert type_name(dtype) == words
