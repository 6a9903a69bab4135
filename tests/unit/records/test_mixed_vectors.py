"""Vectors as lists, tuples and arrays of any width are converted alike, in bulk and one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persisting.bucket.chunk import prepare
from persisting.errors import SchemaError
from persisting.records import EMPTY, RecordEncoder, Rules

WIDE, NARROW = Rules(evolving=True), Rules(evolving=True, vector=pa.float32())


def stored(
    records: list[dict[str, Any]], rules: Rules = WIDE, *, together: bool = True
) -> pa.Table:
    """Put records in one list or one by one; return what is stored, in the last schema."""
    encoder, batches = RecordEncoder(EMPTY, rules, defined=False), []
    for part in [records] if together else [[record] for record in records]:
        prepared = prepare(encoder, part)
        encoder = prepared.encoder
        batches += [chunk.batch for chunk in prepared.chunks]
    merged = encoder.schema
    rows = [row for batch in batches for row in batch.to_pylist()]
    return pa.Table.from_pylist(rows, schema=merged)


def floats(kind: str, values: list[float]) -> Any:
    if kind == "list":
        return values
    if kind == "tuple":
        return tuple(values)
    if kind == "scalars":
        return list(np.array(values, np.float64))
    return np.array(values, kind)


KINDS = st.sampled_from(["list", "tuple", "scalars", "float64", "float32", "float16"])
NUMBERS = st.one_of(
    st.floats(width=16), st.floats(width=32), st.floats(), st.sampled_from([0.5, -0.0, 1e300])
)
VALUES = st.one_of(st.none(), st.tuples(KINDS, st.lists(NUMBERS, min_size=3, max_size=3)))


@given(values=st.lists(VALUES, min_size=1, max_size=12))
def test_lists_and_single_records_give_the_same_vectors(values: list[Any]) -> None:
    with np.errstate(over="ignore"):
        records = [{"id": 1, "v": None if v is None else floats(*v)} for v in values]
    together, apart = stored(records), stored(records, together=False)
    assert together.schema.equals(apart.schema)
    for one, other, record in zip(
        together.column("v").to_pylist(), apart.column("v").to_pylist(), records, strict=True
    ):
        given = record["v"]
        if given is None:
            assert one is None
            assert other is None
            continue
        expected = [float(number) for number in given]
        for found in (one, other):
            assert all(
                a == b or (math.isnan(a) and math.isnan(b))
                for a, b in zip(found, expected, strict=True)
            )


def test_narrow_array_first_and_exact_lists_later_stay_narrow() -> None:
    records = [{"v": np.array([0.5, 1.5], np.float32)}, {"v": [2.5, 3.5]}, {"v": (1, 2)}]
    assert stored(records).schema.field("v").type == pa.list_(pa.float32(), 2)


def test_list_that_would_be_rounded_widens_the_field() -> None:
    table = stored([{"v": np.array([0.5, 1.5], np.float32)}, {"v": [0.1, 0.2]}])
    assert table.schema.field("v").type == pa.list_(pa.float64(), 2)
    assert table.column("v").to_pylist() == [[0.5, 1.5], [0.1, 0.2]]


def test_chosen_width_rounds_wider_floats() -> None:
    table = stored([{"v": [0.1, 0.2]}, {"v": [0.1, 7]}, {"v": np.array([0.1, 0.2])}], NARROW)
    assert table.schema.field("v").type == pa.list_(pa.float32(), 2)
    assert table.column("v").to_pylist()[2] == np.array([0.1, 0.2], np.float32).tolist()
    with pytest.raises(SchemaError, match="beyond the range of float32"):
        stored([{"v": [0.1, 0.2]}, {"v": [1e39, 0.2]}], NARROW)


def test_list_of_numpy_floats_is_a_vector() -> None:
    table = stored([{"v": list(np.array([0.5, 1.5], np.float32))}])
    assert table.schema.field("v").type == pa.list_(pa.float64(), 2)


def test_int_that_a_float_cannot_hold_is_refused_in_a_vector() -> None:
    with pytest.raises(SchemaError, match="cannot hold the int 9007199254740993 exactly"):
        stored([{"v": [0.5, 1.5]}, {"v": [0.5, 2**53 + 1]}])


@pytest.mark.parametrize("value", [[True, 0.5], ["a", 0.5], "ab", 3])
def test_values_that_are_not_vectors_are_refused(value: Any) -> None:
    with pytest.raises(SchemaError, match="'v"):
        stored([{"v": [0.5, 1.5]}, {"v": value}])
