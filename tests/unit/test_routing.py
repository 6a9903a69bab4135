"""A value is routed to the same bucket as a record field and as an Arrow column."""

from __future__ import annotations

from decimal import Decimal
from enum import Enum

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persisting.queue import SchemaError
from persisting.topic.routing import bucket_of, by_bucket, table_by_bucket

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
def test_rows_of_a_table_are_routed_like_records(values: list[object], buckets: int) -> None:
    array = pa.array(values)
    assert found(array, buckets) == expected(array.to_pylist(), buckets)


@pytest.mark.parametrize("buckets", [1, 2, 3, 4, 7, 64, 65_536])
@pytest.mark.parametrize(
    "values",
    [*VALUES, ["a", "ä", ""], [0, -1, 10**40, 7], [True, False], [1, True], [1, "1"], []],
    ids=str,
)
def test_records_of_a_list_are_routed_like_single_ones(values: list[object], buckets: int) -> None:
    records = [{"id": value, "n": place} for place, value in enumerate(values)]
    parts = by_bucket(records, "id", buckets)
    places = {bucket: [record["n"] for record in part] for bucket, part in parts.items()}
    assert places == expected(values, buckets)


@given(st.lists(st.lists(st.none() | st.text(max_size=8), max_size=5), min_size=1, max_size=5))
def test_chunked_columns_are_routed_as_one(chunks: list[list[str | None]]) -> None:
    column = pa.chunked_array([pa.array(one, pa.string()) for one in chunks], pa.string())
    assert found(column, 5) == expected(column.to_pylist(), 5)


def test_routing_follows_the_rule_of_pulsing_queues() -> None:
    assert [bucket_of(value, 4) for value in ("a", "b", "", None, 1, "1")] == [1, 3, 2, 2, 3, 3]


class Color(str, Enum):
    RED = "red"


def test_string_enum_is_routed_like_its_text() -> None:
    assert [bucket_of(Color.RED, n) for n in (2, 7, 64)] == [
        bucket_of("red", n) for n in (2, 7, 64)
    ]


def test_routing_refuses_invalid_unicode_with_its_own_error() -> None:
    with pytest.raises(SchemaError, match="unicode"):
        bucket_of("\ud800", 4)
