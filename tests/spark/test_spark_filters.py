"""The option ``filter`` keeps the rows that Spark's own filter keeps, wherever slices are cut, and
DataFrames with different filters do not affect each other."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.spark.topics import load, put, records, refused, rows, writer

from persisting.spark import read_topic
from persisting.spark.topic_scan import read_slice
from persisting.topic.scan import Filter, Slice
from persisting.topic.topic_files import TopicFolder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORDS = ["", "a", "b", "ab", "ABC", "x%", "it's", "漢字"]
DAYS = [dt.date(2024, 1, day) for day in range(1, 5)]
MOMENTS = [dt.datetime(2024, 1, 1, hour, tzinfo=dt.timezone.utc) for hour in range(4)]


def record(i: int, chance: random.Random) -> dict[str, Any]:
    def maybe(value: Any) -> Any:
        return None if chance.random() < 0.2 else value

    return {
        "id": i,
        "n": maybe(chance.randint(-3, 3)),
        "x": maybe(chance.choice([-1.5, 0.5, 1.0, 2.0])),
        "s": maybe(chance.choice(WORDS)),
        "b": maybe(chance.random() < 0.5),
        "d": maybe(chance.choice(DAYS)),
        "t": maybe(chance.choice(MOMENTS)),
        "o": maybe({"k": chance.randint(0, 2), "w": maybe("a")}),
        "nothing": None,
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a topic of two buckets with fragments of all sizes; retention removed the first ones.

    Only one bucket has the field ``late``.
    """
    folder, chance = tmp_path_factory.mktemp("home"), random.Random(5)
    with writer(folder, buckets=2) as queue:
        first = 0
        for size in (9, 1, 13, 2, 2, 40, 7, 26):
            queue.put_batch([record(i, chance) for i in range(first, first + size)])
            queue.flush()
            first += size
        queue.retain(rows=42)
        late = next(i for i in range(200, 300) if i % 2)
        queue.put({**record(late, chance), "late": 5})
    return folder


NUMBERS = st.integers(-3, 3)
COMPARED = st.sampled_from(["=", "<>", "<", "<=", ">", ">="])

COUNTED = st.sampled_from(["n", "id", "x", "o.k", "late"])


def _texts(word: str) -> str:
    return "'" + word.replace("'", "''") + "'"


TEXTS = st.sampled_from([w for w in WORDS if "'" not in w]).map(_texts)
ATOMS: st.SearchStrategy[str] = st.one_of(
    st.builds("{} {} {}".format, COUNTED, COMPARED, NUMBERS),
    st.builds("s {} {}".format, COMPARED, TEXTS),
    st.builds("s LIKE {}".format, st.sampled_from(["'a%'", "'%b%'", "'_'", "'%'", "'x%'"])),
    st.builds("s IN ({}, {})".format, TEXTS, TEXTS),
    st.builds("n NOT IN ({}, {})".format, NUMBERS, NUMBERS),
    st.builds("n BETWEEN {} AND {}".format, NUMBERS, NUMBERS),
    st.builds("n {} x".format, COMPARED),
    st.builds("n + {} {} id % 4".format, NUMBERS, COMPARED),
    st.builds("d {} DATE '{}'".format, COMPARED, st.sampled_from(DAYS)),
    st.builds("t {} TIMESTAMP '{}'".format, COMPARED, st.sampled_from(MOMENTS)),
    st.builds("{} IS {}NULL".format, st.sampled_from(["n", "s", "b", "o.w", "late", "nothing"]),
              st.sampled_from(["", "NOT "])),
    st.sampled_from(["b", "NOT b", "b = true", "b IS TRUE", "true", "false", "id = 50"]),
    st.just("`s` = 'it''s'"),
)  # fmt: skip
CONDITIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("({}) AND ({})".format, inner, inner),
        st.builds("({}) OR ({})".format, inner, inner),
        st.builds("NOT ({})".format, inner),
    ),
    max_leaves=6,
).filter(lambda condition: condition.count(" IN (") < 2)
"""At most one list: see :func:`test_lance_keeps_nulls_if_a_condition_has_two_negated_lists`."""


@dataclass
class SparkFilter:
    """The rows that Spark's own filter keeps."""

    spark: SparkSession
    home: Path

    def ids(self, conditions: list[str]) -> list[set[int]]:
        """Return for each condition the ids of the rows that Spark keeps, with one query."""
        named = [f"({c}) AS c{i}" for i, c in enumerate(conditions)]
        found = records(load(self.spark, self.home).selectExpr("id", *named))
        return [{r["id"] for r in found if r[f"c{i}"]} for i in range(len(conditions))]


def places(home: Path) -> dict[tuple[int, int], int]:
    """Return the id of each row by (bucket, offset)."""
    topic = TopicFolder.open(home / "t")
    found = {}
    for bucket in topic.buckets:
        view = topic.view(bucket)
        offset = view.start
        for batch in view.batches(view.start, view.rows, ["id"]):
            for value in batch.column(0).to_pylist():
                found[bucket, offset] = value
                offset += 1
    return found


def slices(home: Path, chance: random.Random) -> Iterator[Slice]:
    """Yield slices that cut every bucket at random places."""
    topic = TopicFolder.open(home / "t")
    for bucket in topic.buckets:
        view = topic.view(bucket)
        inner = sorted(chance.sample(range(view.start + 1, view.end), chance.randint(0, 6)))
        edges = [view.start, *inner, view.end]
        for start, end in pairwise(edges):
            yield Slice(str(home / "t"), bucket, start, end)


def check(spark_filter: SparkFilter, conditions: list[str], seed: int) -> None:
    chance, where_is = random.Random(seed), places(spark_filter.home)
    known = TopicFolder.open(spark_filter.home / "t").schema()
    target = pa.schema(
        [
            ("id", pa.int64()),
            ("_bucket", pa.int32()),
            ("_offset", pa.int64()),
            ("_time", pa.timestamp("us", tz="UTC")),
        ]
    )
    for condition, expected in zip(conditions, spark_filter.ids(conditions), strict=True):
        found: list[int] = []
        for part in slices(spark_filter.home, chance):
            for batch in read_slice(part, target, Filter(condition, known), metadata=True):
                for row in batch.to_pylist():
                    assert row["_bucket"] == part.bucket
                    assert part.start <= row["_offset"] < part.end
                    assert where_is[part.bucket, row["_offset"]] == row["id"]
                    found.append(row["id"])
        assert sorted(found) == sorted(expected), condition


COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@settings(**COMMON, max_examples=4, derandomize=True)
@given(st.lists(CONDITIONS, min_size=15, max_size=25), st.integers())
def test_random_filters_keep_the_rows_that_spark_keeps(
    spark: SparkSession, home: Path, conditions: list[str], seed: int
) -> None:
    check(SparkFilter(spark, home), conditions, seed)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@settings(**COMMON, max_examples=150)
@given(st.lists(CONDITIONS, min_size=20, max_size=30), st.integers())
def test_many_random_filters_keep_the_rows_that_spark_keeps(
    spark: SparkSession, home: Path, conditions: list[str], seed: int
) -> None:
    check(SparkFilter(spark, home), conditions, seed)


@pytest.mark.parametrize(
    "condition", ["n NOT IN (1) OR n NOT IN (2)", "NOT n IN (1) OR NOT n IN (2)"]
)
def test_lance_keeps_nulls_if_a_condition_has_two_negated_lists(
    home: Path, spark: SparkSession, condition: str
) -> None:
    """DataFusion simplifies the condition to true, which is wrong for nulls.

    If this fails, Lance has fixed it: remove it, and the filter of ``CONDITIONS``.
    """
    kept, nulls = SparkFilter(spark, home).ids([condition, "n IS NULL"])
    known, schema = TopicFolder.open(home / "t").schema(), pa.schema([("id", pa.int64())])
    found = {
        row["id"]
        for part in slices(home, random.Random(0))
        for batch in read_slice(part, schema, Filter(condition, known), metadata=False)
        for row in batch.to_pylist()
    }
    assert nulls
    assert kept | nulls >= found > kept


@pytest.mark.parametrize(
    "condition",
    [
        "n > 0 AND (s = 'a' OR b)",
        "o.k = 1",
        "late IS NULL",
        "late = 5",
        "nothing IS NULL AND x > 0",
        "t >= TIMESTAMP '2024-01-01 02:00:00+00:00'",
    ],
)
def test_pushed_filter_keeps_the_same_rows_as_spark(
    spark: SparkSession, home: Path, condition: str
) -> None:
    plain = load(spark, home).filter(condition)
    pushed = load(spark, home, filter=condition, rowsPerPartition=11)
    expected = sorted(r.id for r in plain.collect())
    assert sorted(r.id for r in pushed.collect()) == expected
    assert sorted(r.id for r in pushed.filter(condition).collect()) == expected


class TestDataFramesOfOneTopic:
    @pytest.fixture
    def topic(self, tmp_path: Path) -> Path:
        put(tmp_path, rows(12))
        return tmp_path

    def test_filter_does_not_change_the_dataframe_it_came_from(
        self, spark: SparkSession, topic: Path
    ) -> None:
        df = load(spark, topic)
        assert [r.id for r in df.filter("id = 3").collect()] == [3]
        assert df.count() == 12
        assert sorted(r.id for r in df.filter("id < 3").collect()) == [0, 1, 2]

    def test_unions_have_the_rows_of_both_sides(self, spark: SparkSession, topic: Path) -> None:
        df = load(spark, topic)
        own = df.filter("id = 1").union(df.filter("id = 2"))
        assert sorted(r.id for r in own.collect()) == [1, 2]
        pushed = load(spark, topic, filter="id = 1").union(load(spark, topic, filter="id = 2"))
        assert sorted(r.id for r in pushed.collect()) == [1, 2]
        mixed = load(spark, topic, filter="id < 2").union(df)
        assert mixed.count() == 14

    def test_self_joins_have_the_rows_of_both_sides(self, spark: SparkSession, topic: Path) -> None:
        df = load(spark, topic)
        joined = df.filter("even").alias("a").join(df.alias("b"), "id").select("id", "b.text")
        assert sorted((r.id, r.text) for r in joined.collect()) == [
            (i, f"row {i}") for i in range(0, 12, 2)
        ]
        left = load(spark, topic, filter="id < 6", columns="id")
        right = load(spark, topic, filter="id > 3", columns="id,text")
        both = left.join(right, "id")
        assert sorted((r.id, r.text) for r in both.collect()) == [(4, "row 4"), (5, "row 5")]

    def test_views_with_different_filters_do_not_affect_each_other(
        self, spark: SparkSession, topic: Path
    ) -> None:
        views = {"few": ", filter 'id < 2'", "whole": "", "odd": ", filter 'NOT even'"}
        for name, where in views.items():
            spark.sql(
                f"CREATE TEMPORARY VIEW {name} USING persisting "
                f"OPTIONS (path '{topic}', topic 't'{where})"
            )
        try:
            counts = spark.sql(
                "SELECT (SELECT count(*) FROM few), (SELECT count(*) FROM whole WHERE id > 8), "
                "(SELECT count(*) FROM odd), (SELECT count(*) FROM whole), "
                "(SELECT count(*) FROM few JOIN odd USING (id))"
            )
            assert [tuple(row) for row in counts.collect()] == [(2, 3, 6, 12, 1)]
        finally:
            for name in views:
                spark.catalog.dropTempView(name)

    def test_read_topic_pushes_down_the_filter_of_each_call(
        self, spark: SparkSession, topic: Path
    ) -> None:
        one = read_topic(spark, topic, "t", columns=["text"], where="id = 1")
        two = read_topic(spark, topic / "t", where="id >= 10", includeMetadata=True)
        assert [r.text for r in one.collect()] == ["row 1"]
        assert sorted(r.id for r in two.collect()) == [10, 11]
        assert one.unionByName(two.select("text")).count() == 3

    def test_filter_sees_new_rows_and_fields(self, spark: SparkSession, topic: Path) -> None:
        load(spark, topic, filter="id > 10").count()
        put(topic, [{"id": 12, "new": 5}, {"id": 13, "new": 6}])
        assert sorted(r.id for r in load(spark, topic, filter="id > 10").collect()) == [11, 12, 13]
        assert [r.id for r in load(spark, topic, filter="new = 6").collect()] == [13]


class TestInvalidConditions:
    @pytest.mark.parametrize(
        ("condition", "words"),
        [
            ("id >", "option filter='id >'.*"),
            ("nope > 3", "option filter='nope > 3' names 'nope'; the fields are: 'id'"),
            ("id = 1) OR (1 = 1", "option filter=.*bracket"),
            ('"id" = 1', "option filter=.*backticks"),
            ("id = ?", r"option filter=.*'\?'"),
            ("text > 3 AND", "option filter="),
            ("id", "option filter="),
            (" ", "filter"),
        ],
    )
    def test_invalid_condition_is_refused_before_the_read(
        self, spark: SparkSession, home: Path, condition: str, words: str
    ) -> None:
        with refused("InvalidArgument", words):
            load(spark, home, filter=condition).count()
