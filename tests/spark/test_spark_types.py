"""Every value that a topic stores goes through Spark and comes back equal.

The exceptions are those that Spark has no type for: UUIDs become text, half-precision floats
become floats, vectors become arrays, and unsigned numbers the next wider signed ones.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from support.comparing import assert_same, canonical
from support.record_strategies import tables
from support.spark.topics import content, load, put, records, save, stored
from support.values import GOOD_NAMES, VALUES

from persisting.spark.types import spark_schema, to_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UTC = dt.timezone.utc

SPARK_TYPES: dict[str, Any] = {
    "void": None,
    "boolean": True,
    "bigint": 2**63 - 1,
    "double": 0.1,
    "string": "text",
    "binary": b"\x00\xff",
    "timestamp": dt.datetime(2024, 1, 1, tzinfo=UTC),
    "timestamp_ntz": dt.datetime(2024, 1, 1),
    "date": dt.date(2024, 2, 29),
    "time(6)": dt.time(1, 2, 3, 4),
    "interval day to second": dt.timedelta(days=1, microseconds=1),
    "decimal(38,18)": Decimal("1.5"),
    "array<bigint>": [1, None],
    "array<array<string>>": [["a"], None, []],
    "array<void>": [],
    "struct<>": {},
    "struct<a:bigint,b:array<struct<c:double>>>": {"a": 1, "b": [{"c": 0.5}]},
    "array<timestamp>": [dt.datetime(2024, 1, 1, tzinfo=UTC)],
}
"""By Spark type, a value that is read as this type; see the docs."""

CONVERTED: dict[str, tuple[Any, str]] = {
    "uuid": (UUID(int=5), "string"),
    "uuids": ([UUID(int=5), None], "array<string>"),
    "uuid in a dict": ({"a": UUID(int=5)}, "struct<a:string>"),
    "vector": ([0.5, 1.5], "array<double>"),
    "narrow vector": (np.array([0.5, 1.5], np.float32), "array<float>"),
    "half vector": (np.array([0.5, 1.5], np.float16), "array<float>"),
}

ARROW: dict[str, tuple[pa.Array, str]] = {
    "uint8": (pa.array([255, None], pa.uint8()), "smallint"),
    "uint16": (pa.array([65535, None], pa.uint16()), "int"),
    "uint32": (pa.array([2**32 - 1, None], pa.uint32()), "bigint"),
    "uint64": (pa.array([2**64 - 1, None], pa.uint64()), "decimal(20,0)"),
    "int8": (pa.array([-128, None], pa.int8()), "tinyint"),
    "int16": (pa.array([-(2**15), None], pa.int16()), "smallint"),
    "int32": (pa.array([-(2**31), None], pa.int32()), "int"),
    "float": (pa.array([0.1, None], pa.float32()), "float"),
    "half": (pa.array([np.float16(0.1), None], pa.float16()), "float"),
    "fixed": (pa.array([b"abcd", None], pa.binary(4)), "binary"),
    "decimal": (pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)), "decimal(10,2)"),
    "money": (pa.array([Decimal(10**19), None], pa.decimal128(20, 0)), "decimal(20,0)"),
    "large": (pa.array(["a", None], pa.large_string()), "string"),
    "dictionary": (pa.array(["a", None]).dictionary_encode(), "string"),
    "date64": (pa.array([86_400_000, None], pa.date64()), "date"),
    "seconds": (pa.array([1, None], pa.timestamp("s")), "timestamp_ntz"),
    "berlin": (pa.array([1000, None], pa.timestamp("ns", "Europe/Berlin")), "timestamp"),
    "time32": (pa.array([1, None], pa.time32("s")), "time(6)"),
    "duration": (pa.array([1, None], pa.duration("s")), "interval day to second"),
    "vector32": (pa.array([[0.1, 2], None], pa.list_(pa.float32(), 2)), "array<float>"),
    "shorts": (pa.array([[1, None], None], pa.list_(pa.uint16())), "array<int>"),
    "longs": (pa.array([[2**64 - 1], None], pa.list_(pa.uint64())), "array<decimal(20,0)>"),
    "struct": (pa.array([{"a": 7}, None], pa.struct([("a", pa.uint32())])), "struct<a:bigint>"),
}


def as_spark(value: Any) -> Any:
    """Convert the parts of a value for which Spark has no type."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Mapping):
        return {name: as_spark(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_spark(item) for item in value]
    return value


def through_spark(
    spark: SparkSession, folder: Path, table: list[dict[str, Any]] | pa.Table, **options: Any
) -> list[dict[str, Any]]:
    """Put rows to a topic, copy it with Spark, and return the rows of the copy."""
    put(folder, table, "one", buckets=1)
    save(load(spark, folder, "one", **options), folder, "two", numBuckets=1)
    return stored(folder, "two")


def test_every_value_comes_back_equal(spark: SparkSession, tmp_path: Path) -> None:
    row = {"id": 0, **VALUES}
    empty: dict[str, Any] = {"id": 1, **dict.fromkeys(VALUES)}
    found = through_spark(spark, tmp_path, [row, empty, row])
    for got, put_in in zip(found, [row, empty, row], strict=True):
        for name, value in put_in.items():
            assert_same(as_spark(canonical(value)), got[name], name)


def test_every_value_inside_lists_and_dicts_comes_back_equal(
    spark: SparkSession, tmp_path: Path
) -> None:
    row: dict[str, Any] = {"id": 0}
    for name, value in VALUES.items():
        row[f"{name} list"] = [value, None]
        row[f"{name} dict"] = {"x": value}
        row[f"{name} dicts"] = [{"x": value}, {"x": None}, None]
        row[f"{name} deep"] = {"y": [[{"x": [value]}], []]}
    table = [row, {**dict.fromkeys(row), "id": 1}, row]
    found = through_spark(spark, tmp_path, table)
    for got, put_in in zip(found, table, strict=True):
        for name, value in put_in.items():
            assert_same(as_spark(canonical(value)), got[name], name)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_slices_of_nested_values_are_cut_correctly(
    spark: SparkSession, tmp_path: Path, step: int
) -> None:
    def row(i: int) -> dict[str, Any]:
        return {
            "id": i,
            "lists": None if i % 4 == 3 else [[j, None] if j % 3 else None for j in range(i % 5)],
            "dicts": [{"a": str(j), "b": {"c": [j] * j}} for j in range(i % 3)],
            "dict": None if i % 5 == 2 else {"a": i, "b": None if i % 2 else [0.5] * i},
            "vector": None if i % 6 == 5 else [float(i), 0.5],
            "uuids": None if i % 7 == 1 else [UUID(int=j) for j in range(i % 4)],
            "nested": None if i % 3 == 1 else [{"u": UUID(int=i), "t": dt.time(1)}] * (i % 3),
        }

    table = [row(i) for i in range(30)]
    put(tmp_path, table, "one", buckets=1)
    df = load(spark, tmp_path, "one", rowsPerPartition=step, startingOffsets='{"0": 3}')
    by_filter = load(spark, tmp_path, "one", rowsPerPartition=step, filter="id % 2 = 1 OR id > 20")
    assert [as_spark(row) for row in table[3:]] == records(df)
    expected = [as_spark(row) for row in table if row["id"] % 2 or row["id"] > 20]
    assert expected == records(by_filter)


def test_every_value_has_its_documented_spark_type(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, [{"id": 1, **SPARK_TYPES}], buckets=1)
    found = load(spark, tmp_path).drop("id")
    assert {kind: name for name, kind in found.dtypes} == {name: name for name in SPARK_TYPES}


def test_values_without_a_spark_type_are_converted(spark: SparkSession, tmp_path: Path) -> None:
    found = through_spark(spark, tmp_path, [{"id": 1, **{n: v for n, (v, _) in CONVERTED.items()}}])
    kinds = dict(load(spark, tmp_path, "one").dtypes)
    for name, (value, kind) in CONVERTED.items():
        assert kinds[name] == kind
        assert_same(as_spark(canonical(value)), found[0][name], name)


def test_arrow_types_come_back_equal(spark: SparkSession, tmp_path: Path) -> None:
    columns = {name: array for name, (array, _) in ARROW.items()}
    found = through_spark(spark, tmp_path, pa.table({"id": pa.array([0, 1]), **columns}))
    kinds = dict(load(spark, tmp_path, "one").dtypes)
    original = stored(tmp_path, "one")
    for name, (_, kind) in ARROW.items():
        assert kinds[name] == kind, name
        for before, after in zip(original, found, strict=True):
            assert before[name] == after[name], name


def test_names_of_all_kinds_come_back_equal(spark: SparkSession, tmp_path: Path) -> None:
    inner = {name: i for i, name in enumerate(GOOD_NAMES)}
    row = {"id": 1, **inner, "nested": inner, "dicts": [inner]}
    assert through_spark(spark, tmp_path, [row]) == [row]


def test_names_that_differ_in_case_come_back(spark: SparkSession, tmp_path: Path) -> None:
    row = {"id": 0, "a": 1, "A": "x", "nested": {"b": 1, "B": "y"}}
    assert through_spark(spark, tmp_path, [row]) == [row]


def test_fields_keep_their_order(spark: SparkSession, tmp_path: Path) -> None:
    row = {"z": 1, "id": 0, "a": {"y": 1, "x": 2}}
    found = through_spark(spark, tmp_path, [row])
    assert (list(found[0]), list(found[0]["a"])) == (["z", "id", "a"], ["y", "x"])


def test_arrays_from_vectors_can_be_written_back_to_their_topic(
    spark: SparkSession, tmp_path: Path
) -> None:
    put(tmp_path, [{"id": i, "v": [0.5, i / 2], "u": np.float32([i])} for i in range(5)])
    save(load(spark, tmp_path).selectExpr("id + 5 AS id", "v", "u"), tmp_path)
    put(tmp_path, [{"id": 10, "v": [0.0, 0.0], "u": np.float32([9])}])
    assert load(spark, tmp_path).count() == 11
    from support.spark.topics import writer

    with writer(tmp_path) as queue:
        assert {r["id"] for r in queue.search(vector=[0.5, 2.0], column="v", k=2)} == {4, 9}


def test_values_computed_by_spark_are_stored_with_their_types(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = spark.sql(
        """SELECT 1 AS id, 5Y AS tiny, 5S AS small, 1.5F AS single, 1.50BD AS exact,
        TIMESTAMP'2024-01-01 00:00:00+02:00' AS moment, TIMESTAMP_NTZ'2024-01-01' AS naive,
        DATE'2024-02-29' AS day, TIME'01:02:03.000004' AS clock, INTERVAL '1' HOUR AS span,
        CAST('ab' AS CHAR(3)) AS fixed, X'00ff' AS raw, array(1, null) AS items,
        named_struct('a', null, 'b', array()) AS parts, null AS nothing"""
    )
    save(df, tmp_path)
    (found,) = stored(tmp_path)
    assert found == {
        "id": 1,
        "tiny": 5,
        "small": 5,
        "single": 1.5,
        "exact": Decimal("1.50"),
        "moment": dt.datetime(2023, 12, 31, 22, tzinfo=UTC),
        "naive": dt.datetime(2024, 1, 1),
        "day": dt.date(2024, 2, 29),
        "clock": dt.time(1, 2, 3, 4),
        "span": dt.timedelta(hours=1),
        "fixed": "ab",
        "raw": b"\x00\xff",
        "items": [1, None],
        "parts": {"a": None, "b": []},
        "nothing": None,
    }


def test_times_do_not_depend_on_the_time_zone_of_the_session(
    spark: SparkSession, tmp_path: Path
) -> None:
    moments = [dt.datetime(2024, 7, 1, 12, tzinfo=UTC), dt.datetime(1, 1, 2, tzinfo=UTC)]
    table = [{"id": i, "t": m, "n": m.replace(tzinfo=None)} for i, m in enumerate(moments)]
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
        found = through_spark(spark, tmp_path, table)
        where = load(spark, tmp_path, "one", filter="t > timestamp '2024-01-01 00:00:00Z'")
        assert where.count() == 1
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    assert found == table


def check(table: list[dict[str, Any]], spark: SparkSession, folder: Path) -> None:
    table = [{"id": i, **{f"f {n}": v for n, v in r.items()}} for i, r in enumerate(table)]
    put(folder, table, "one", buckets=2)
    save(load(spark, folder, "one", rowsPerPartition=2), folder, "two", numBuckets=2)
    before, after = content(folder, "one"), content(folder, "two")
    for bucket in before:
        assert_same([as_spark(r) for r in before[bucket]], after[bucket])


COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    "derandomize": True,
}


@settings(**COMMON, max_examples=6)
@given(table=tables(lacking=True))
def test_records_of_any_schema_come_back(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, table: list[dict[str, Any]]
) -> None:
    check(table, spark, tmp_path_factory.mktemp("any"))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@settings(**COMMON | {"derandomize": False}, max_examples=300)
@given(table=tables(lacking=True))
def test_many_records_of_any_schema_come_back(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, table: list[dict[str, Any]]
) -> None:
    check(table, spark, tmp_path_factory.mktemp("any"))


@settings(deadline=None, max_examples=100)
@given(table=tables(lacking=True))
def test_batches_of_any_schema_and_any_slice_have_the_types_of_spark(
    table: list[dict[str, Any]],
) -> None:
    """The conversion alone, without Spark: slices have offsets into shared buffers."""
    from persisting.bucket.chunk import prepare
    from persisting.records import EMPTY, RecordEncoder, Rules

    keyed = [{"the key": i, **record} for i, record in enumerate(table * 2)]
    prepared = prepare(RecordEncoder(EMPTY, Rules(evolving=True)), keyed)
    whole = pa.Table.from_batches([c.batch for c in prepared.chunks]).combine_chunks()
    target = spark_schema(whole.schema)
    for batch in whole.to_batches():
        for start in range(batch.num_rows):
            (found,) = to_spark([batch.slice(start)], target)
            found.validate(full=True)
            expected = [as_spark(r) for r in batch.slice(start).to_pylist()]
            for one, other in zip(expected, found.to_pylist(), strict=True):
                assert_same(one, other)


def test_not_a_number_is_not_null(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, [{"id": i, "x": x} for i, x in enumerate([math.nan, None, 1.0])])
    df = load(spark, tmp_path)
    assert [r.id for r in df.filter("isnan(x)").collect()] == [0]
    assert [r.id for r in df.filter("x IS NULL").collect()] == [1]
