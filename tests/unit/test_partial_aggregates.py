"""Results of tasks, which Spark combines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from persisting.spark import partial_aggregates
from persisting.spark.partial_aggregates import PartialAggregates

ROWS = pa.schema([("key", pa.string()), ("n", pa.int64()), ("x", pa.float32())])


def batches(*columns: Iterable[Any], size: int = 3) -> list[pa.RecordBatch]:
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, ROWS, strict=True)], schema=ROWS)
    return table.to_batches(size)


def results(how: PartialAggregates, read: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    found = list(how.of(read))
    assert all(batch.schema == how.schema for batch in found)
    return [row for batch in found for row in batch.to_pylist()]


BY_KEY = PartialAggregates(
    ("key",),
    (("count_all", "*"), ("count", "n"), ("sum", "n"), ("min", "key"), ("sum", "x")),
    pa.schema(
        [
            ("key", pa.string()),
            ("all", pa.int64()),
            ("count", pa.int64()),
            ("sum", pa.int64()),
            ("min", pa.string()),
            ("x", pa.float64()),
        ]
    ),
)


def test_rows_of_several_batches_become_one_result_per_group() -> None:
    read = batches(["a", "b", None] * 4, [1, None, 3] * 4, [0.5, 0.25, None] * 4)
    found = sorted(results(BY_KEY, read), key=lambda row: str(row["key"]))
    assert found == [
        {"key": None, "all": 4, "count": 4, "sum": 12, "min": None, "x": None},
        {"key": "a", "all": 4, "count": 4, "sum": 4, "min": "a", "x": 2.0},
        {"key": "b", "all": 4, "count": 0, "sum": None, "min": "b", "x": 1.0},
    ]


def test_rows_are_passed_on_singly_once_grouping_joins_hardly_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partial_aggregates, "_ROWS_TOGETHER", 4)
    read = batches("aabcddeefgg", [1, 2, None, *range(8)], [1.0] * 11, size=4)
    found = results(BY_KEY, read)
    assert [row["key"] for row in found] == list("abc" + "ddeefgg")
    assert found[2] == {"key": "c", "all": 1, "count": 1, "sum": 0, "min": "c", "x": 1.0}
    assert found[1] == {"key": "b", "all": 1, "count": 0, "sum": None, "min": "b", "x": 1.0}
    assert found[3] == {"key": "d", "all": 1, "count": 1, "sum": 1, "min": "d", "x": 1.0}


@pytest.mark.parametrize("large", [2**62, -(2**62), -(2**63)])
def test_sums_that_could_leave_their_range_are_left_to_spark(large: int) -> None:
    how = PartialAggregates((), (("sum", "n"),), pa.schema([("sum", pa.int64())]))
    numbers = [large, None, 1, large]
    found = results(how, batches("abcd", numbers, [None] * 4))
    assert [row["sum"] for row in found] == numbers
    assert [row["sum"] for row in results(how, batches("ab", [2**61, 5], [None] * 2))] == [
        2**61 + 5
    ]


def test_no_rows_are_one_result_without_groups_and_none_with_groups() -> None:
    totals = PartialAggregates(
        (),
        (("count_all", "*"), ("count", "n"), ("max", "n")),
        pa.schema([("all", pa.int64()), ("count", pa.int64()), ("max", pa.int64())]),
    )
    assert results(totals, []) == [{"all": 0, "count": 0, "max": None}]
    assert results(BY_KEY, []) == []


def test_fields_may_be_named_like_results() -> None:
    schema = pa.schema([("value 0_sum", pa.int64()), ("count_all", pa.int64())])
    table = pa.table([[1, 1, 2], [5, 6, 7]], schema=schema)
    how = PartialAggregates(
        ("value 0_sum",),
        (("sum", "count_all"), ("count_all", "*")),
        pa.schema([("value 0_sum", pa.int64()), ("s", pa.int64()), ("c", pa.int64())]),
    )
    found = [row for batch in how.of(table.to_batches()) for row in batch.to_pylist()]
    assert sorted(tuple(row.values()) for row in found) == [(1, 11, 2), (2, 7, 1)]


def test_large_rows_are_not_all_held_in_memory_for_grouping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partial_aggregates, "_BYTES_TOGETHER", 1000)
    totals = PartialAggregates((), (("max", "key"),), pa.schema([("max", pa.string())]))
    read = batches(["x" * 600] * 6, range(6), [None] * 6, size=1)
    assert len(results(totals, read)) == 3
