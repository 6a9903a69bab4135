"""How two types are merged."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest

from persisting.records.evolution import Conflict, learn, widen

INT, FLOAT, TEXT, NULL = pa.int64(), pa.float64(), pa.string(), pa.null()


def struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct(list(fields.items()))


LEARNED = [
    (NULL, INT, INT),
    (INT, NULL, INT),
    (INT, INT, INT),
    (pa.list_(NULL), pa.list_(TEXT), pa.list_(TEXT)),
    (pa.list_(NULL), pa.list_(FLOAT, 3), pa.list_(FLOAT)),
    (pa.list_(FLOAT, 2), pa.list_(FLOAT, 2), pa.list_(FLOAT, 2)),
    (struct(a=NULL), struct(a=INT), struct(a=INT)),
    (struct(a=INT, b=NULL), struct(b=TEXT, a=NULL), struct(a=INT, b=TEXT)),
    (pa.list_(struct(a=NULL)), pa.list_(struct(a=FLOAT)), pa.list_(struct(a=FLOAT))),
]
WIDENED = [
    (INT, FLOAT, FLOAT),
    (FLOAT, INT, FLOAT),
    (pa.int8(), pa.int32(), pa.int32()),
    (pa.int32(), INT, INT),
    (pa.uint8(), pa.int8(), pa.int16()),
    (pa.uint32(), pa.int8(), INT),
    (pa.uint8(), pa.uint64(), pa.uint64()),
    (pa.float16(), pa.float32(), pa.float32()),
    (pa.float32(), INT, FLOAT),
    (pa.list_(INT), pa.list_(FLOAT), pa.list_(FLOAT)),
    (pa.list_(FLOAT, 2), pa.list_(FLOAT, 3), pa.list_(FLOAT)),
    (pa.list_(FLOAT, 2), pa.list_(pa.float32(), 2), pa.list_(FLOAT, 2)),
    (pa.list_(FLOAT, 2), pa.list_(INT), pa.list_(FLOAT)),
    (struct(a=INT), struct(b=TEXT), struct(a=INT, b=TEXT)),
    (struct(a=INT), struct(b=TEXT, a=FLOAT), struct(a=FLOAT, b=TEXT)),
    (pa.list_(struct(a=INT)), pa.list_(struct(b=INT)), pa.list_(struct(a=INT, b=INT))),
    (struct(), struct(a=INT), struct(a=INT)),
]
IMPOSSIBLE = [
    (INT, TEXT),
    (TEXT, INT),
    (INT, pa.bool_()),
    (pa.bool_(), FLOAT),
    (TEXT, pa.binary()),
    (pa.date32(), pa.timestamp("us")),
    (pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
    (pa.uint64(), INT),
    (pa.list_(INT), INT),
    (pa.list_(INT), struct(a=INT)),
    (pa.list_(INT), pa.list_(TEXT)),
    (struct(a=INT), struct(a=TEXT)),
    (pa.decimal128(38, 18), FLOAT),
    (pa.uuid(), pa.binary(16)),
]
STRICT_ONLY = [
    (INT, FLOAT),
    (pa.int8(), INT),
    (pa.list_(FLOAT, 2), pa.list_(FLOAT, 3)),
    (struct(a=INT), struct(b=INT)),
]


@pytest.mark.parametrize(("old", "new", "both"), LEARNED)
def test_a_strict_schema_fills_in_unknown_types(
    old: pa.DataType, new: pa.DataType, both: pa.DataType
) -> None:
    assert learn(old, new, "f") == both


@pytest.mark.parametrize(("old", "new", "both"), LEARNED + WIDENED)
def test_an_evolving_schema_widens(old: pa.DataType, new: pa.DataType, both: pa.DataType) -> None:
    assert widen(old, new, "f") == both


@pytest.mark.parametrize(("old", "new"), IMPOSSIBLE)
def test_types_without_a_common_type_conflict_in_both_orders(
    old: pa.DataType, new: pa.DataType
) -> None:
    for first, second in ((old, new), (new, old)):
        with pytest.raises(Conflict):
            widen(first, second, "f")
        with pytest.raises(Conflict):
            learn(first, second, "f")


@pytest.mark.parametrize(("old", "new"), STRICT_ONLY)
def test_a_strict_schema_does_not_widen(old: pa.DataType, new: pa.DataType) -> None:
    with pytest.raises(Conflict):
        learn(old, new, "f")


@pytest.mark.parametrize(("old", "new", "both"), LEARNED + WIDENED)
def test_widening_a_widened_type_changes_nothing(
    old: pa.DataType, new: pa.DataType, both: pa.DataType
) -> None:
    assert widen(both, old, "f") == both
    assert widen(both, new, "f") == both


def test_widening_numbers_does_not_depend_on_their_order() -> None:
    numbers = [pa.int8(), pa.uint8(), pa.int32(), pa.float16(), pa.float32(), FLOAT, INT]
    for old, new in itertools.combinations(numbers, 2):
        assert widen(old, new, "f") == widen(new, old, "f")


def test_a_type_conflict_names_the_path() -> None:
    with pytest.raises(Conflict) as caught:
        widen(struct(a=pa.list_(struct(b=INT))), struct(a=pa.list_(struct(b=TEXT))), "f")
    assert (caught.value.path, caught.value.old, caught.value.new) == ("f.a[].b", INT, TEXT)
