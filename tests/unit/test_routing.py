"""The bucket of a value is the same however it comes."""

from __future__ import annotations

from decimal import Decimal
from enum import Enum

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persisting.queue import SchemaError
from persisting.topic.routing import bucket_of, table_by_bucket

VALUES = [
    ["", "a", "ä", None, "a", "日本", "a" * 1000],
    [0, -1, 2**63 - 1, -(2**63), None, 7],
    [1.0, 0.5, None, -0.0, float("inf")],
    [True, False, None],
    [b"x", None, b""],
    [Decimal("1.50"), None],
]


def found(values: pa.ChunkedArray | pa.Array, buckets: int) -> dict[int, list[int]]:
    table = pa.table({"id": values, "n": pa.array(range(len(values)))})
    parts = table_by_bucket(table, "id", buckets)
    return {bucket: part.column("n").to_pylist() for bucket, part in parts.items()}


def expected(values: list[object], buckets: int) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(bucket_of(value, buckets), []).append(place)
    return places


@pytest.mark.parametrize("buckets", [1, 2, 3, 4, 7, 64, 65_536])
@pytest.mark.parametrize("values", VALUES, ids=lambda values: type(values[0]).__name__)
def test_a_table_goes_where_its_records_go(values: list[object], buckets: int) -> None:
    array = pa.array(values)
    assert found(array, buckets) == expected(array.to_pylist(), buckets)


@given(st.lists(st.lists(st.none() | st.text(max_size=8), max_size=5), min_size=1, max_size=5))
def test_chunks_are_one_column(chunks: list[list[str | None]]) -> None:
    column = pa.chunked_array([pa.array(one, pa.string()) for one in chunks], pa.string())
    assert found(column, 5) == expected(column.to_pylist(), 5)


def test_the_rule_of_pulsings_queues_is_kept() -> None:
    assert [bucket_of(value, 4) for value in ("a", "b", "", None, 1, "1")] == [1, 3, 2, 2, 3, 3]


class Color(str, Enum):
    RED = "red"


def test_an_enum_of_texts_goes_where_its_text_goes() -> None:
    assert [bucket_of(Color.RED, n) for n in (2, 7, 64)] == [
        bucket_of("red", n) for n in (2, 7, 64)
    ]


def test_text_that_is_no_unicode_is_refused_in_our_words() -> None:
    with pytest.raises(SchemaError, match="unicode"):
        bucket_of("\ud800", 4)
