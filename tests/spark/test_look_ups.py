"""Rows that an index finds while Spark plans a query are returned without a task in Python."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions
from support.spark import random_queries
from support.spark.processes import Run
from support.spark.pruning import explained, make_views, pruned, put_all_types
from support.spark.topics import load, put, rows, writer

from persisting.spark import read_topic
from persisting.spark.scan_hints import KeyedRows, snapshot_text
from persisting.topic.scan import Slice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 200
CONDITIONS = [
    "id = 7",
    "id IN (1, 2, 199, 500)",
    "id > 190 AND flag",
    "i64 = 7",
    "u64 = 18446744073709551615",
    "f64 = 0.1D",
    "f32 > 0.1F",
    "text = 'b\\'c'",
    "text LIKE 'ab%' OR id < 3",
    "bin = X'0001'",
    "`at utc` = TIMESTAMP'2024-01-01T00:00:00.000001Z'",
    "day = DATE'2024-02-29'",
    "money = -1.50BD",
    "uid = '00000000-0000-0000-0000-000000000005'",
]
INDEXED = ["id", "i64", "u64", "f64", "f32", "text", "bin", "at utc", "day", "money", "uid"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic with all types in two buckets, with indexes."""
    home = tmp_path_factory.mktemp("look-ups")
    return put_all_types(home, ROWS, indexed=INDEXED)


@pytest.fixture(scope="module")
def views(spark: SparkSession, folder: Path) -> tuple[str, str]:
    """Views of the same rows: the topic with indexes, and a copy in Parquet."""
    return make_views(spark, folder, "indexed_topic", "indexed_copy")


@pytest.fixture
def simple(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """A load of 40 rows with an index on ``id``."""
    return indexed(spark, tmp_path, rows(40))


def indexed(spark: SparkSession, home: Path, records: list[dict[str, Any]]) -> DataFrame:
    with writer(home) as queue:
        queue.put_batch(records)
        queue.flush()
        queue.create_index("id", kind="scalar")
    return load(spark, home)


def jobs_of(spark: SparkSession, action: Callable[[], object]) -> int:
    """Return how many jobs an action runs."""
    group = uuid.uuid4().hex
    spark.sparkContext.setJobGroup(group, "an action of a test")
    try:
        action()
    finally:
        spark.sparkContext._jsc.clearJobGroup()
    return len(spark.sparkContext.statusTracker().getJobIdsForGroup(group))


def is_found_in_planning(df: DataFrame) -> bool:
    """Whether Spark gets the rows of the query's only scan from the planning, not from tasks."""
    leaf = df._jdf.queryExecution().sparkPlan().collectLeaves().head()
    name: str = leaf.batch().getClass().getSimpleName()
    return name == "LookedUpRows"


def texts(df: DataFrame) -> list[str]:
    return sorted(map(repr, df.collect()))


class TestRows:
    @pytest.mark.parametrize("condition", CONDITIONS)
    def test_rows_of_all_types_and_metadata_are_those_without_pruning(
        self, spark: SparkSession, folder: Path, condition: str
    ) -> None:
        frame = read_topic(spark, folder, includeMetadata=True)
        found = frame.where(condition)
        assert is_found_in_planning(found)
        assert jobs_of(spark, lambda: texts(found)) == 0
        with pruned(spark, False):
            expected = read_topic(spark, folder, includeMetadata=True).where(condition)
            assert found.schema == expected.schema
            assert texts(found) == texts(expected)
            assert texts(found)

    def test_selected_expressions_are_those_without_pruning(
        self, spark: SparkSession, folder: Path
    ) -> None:
        def query() -> DataFrame:
            return read_topic(spark, folder, includeMetadata=True).selectExpr(
                "st.c.d", "st.a + 1", "_offset", "get(list, 0)", "upper(text)", "coalesce(i8, 3)"
            )

        found = query().where("_offset >= 0 AND id IN (3, 4, 5, 6, 50)")
        assert jobs_of(spark, lambda: texts(found)) == 0
        with pruned(spark, False):
            assert texts(found) == texts(query().where("_offset >= 0 AND id IN (3, 4, 5, 6, 50)"))

    def test_key_that_no_record_has_finds_nothing(
        self, spark: SparkSession, simple: DataFrame
    ) -> None:
        missing = simple.where("id = 4000")
        assert jobs_of(spark, lambda: missing.collect()) == 0
        assert missing.collect() == []
        assert missing.count() == 0
        assert missing.toPandas().empty

    def test_empty_buckets_need_no_task(self, spark: SparkSession, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=8) as queue:
            queue.put_batch(rows(2))
            queue.flush()
            queue.create_index("id", kind="scalar")
        assert is_found_in_planning(load(spark, tmp_path).where("id = 1"))
        assert [row["id"] for row in load(spark, tmp_path).where("id = 1").collect()] == [1]

    def test_values_that_look_like_our_markers_are_returned_unchanged(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        hostile = snapshot_text([Slice("x", 0, 0, 1)], KeyedRows(b"x" * 40))
        frame = indexed(spark, tmp_path, [{"id": n, "text": f"{n}{hostile}"} for n in range(10)])
        found = frame.where("id IN (3, 4)")
        assert is_found_in_planning(found)
        assert sorted(row["text"] for row in found.collect()) == [f"3{hostile}", f"4{hostile}"]
        assert sorted(row["id"] for row in frame.where("id > 7").collect()) == [8, 9]
        assert frame.count() == 10


class TestActions:
    def test_every_action_returns_the_rows(self, spark: SparkSession, simple: DataFrame) -> None:
        few = simple.where("id < 3").select("id")
        assert sorted(row["id"] for row in few.collect()) == [0, 1, 2]
        assert sorted(row["id"] for row in few.toLocalIterator()) == [0, 1, 2]
        assert sorted(few.toPandas()["id"]) == [0, 1, 2]
        assert sorted(few.toArrow().column("id").to_pylist()) == [0, 1, 2]
        assert few.rdd.map(lambda row: row["id"]).sum() == 3
        assert few.count() == 3
        assert not few.isEmpty()
        order = [row["id"] for row in few.collect()]
        assert [row["id"] for row in few.take(2)] == order[:2]
        assert [row["id"] for row in few.tail(2)] == order[1:]
        assert [row["id"] for row in few.limit(1).collect()] == order[:1]
        assert few.limit(0).collect() == []
        assert jobs_of(spark, lambda: few.limit(2).collect()) == 0

    def test_other_operators_get_the_rows_without_python(
        self, spark: SparkSession, simple: DataFrame
    ) -> None:
        few = simple.where("id IN (5, 6, 30)")
        for query, expected in (
            (few.groupBy("even").agg(functions.sum("id")), [(False, 5), (True, 36)]),
            (few.orderBy(functions.desc("id")).select("id", "text").limit(1), [(30, "row 30")]),
            (few.selectExpr("count(*)", "max(text)"), [(3, "row 6")]),
            (few.select("id").distinct(), [(5,), (6,), (30,)]),
        ):
            assert is_found_in_planning(query)
            assert sorted(map(tuple, query.collect())) == expected

    def test_look_ups_in_joins_and_unions_have_rows_of_their_own(self, simple: DataFrame) -> None:
        one, other = simple.where("id = 3"), simple.where("id IN (3, 4)")
        assert sorted(row["id"] for row in one.union(other).collect()) == [3, 3, 4]
        joined = one.alias("l").join(other.alias("r"), "id").selectExpr("id", "l.text", "r.score")
        assert [tuple(row) for row in joined.collect()] == [(3, "row 3", rows(40)[3]["score"])]
        beside = simple.select("id").join(one.select("id", "text"), "id")
        assert [tuple(row) for row in beside.collect()] == [(3, "row 3")]

    def test_cached_look_up_answers_all_queries(self, simple: DataFrame) -> None:
        cached = simple.where("id < 5").cache()
        try:
            assert cached.count() == 5
            assert [row["text"] for row in cached.where("id = 4").collect()] == ["row 4"]
            assert sorted(row["id"] for row in cached.select("id").collect()) == [0, 1, 2, 3, 4]
        finally:
            cached.unpersist()

    def test_rows_that_are_written_are_those_of_the_look_up(
        self, spark: SparkSession, simple: DataFrame, tmp_path: Path
    ) -> None:
        simple.where("id < 4").write.parquet(str(tmp_path / "few.parquet"))
        written = spark.read.parquet(str(tmp_path / "few.parquet"))
        assert sorted(row["id"] for row in written.collect()) == [0, 1, 2, 3]


class TestPlans:
    def test_explain_shows_the_look_up_and_the_query_without_starting_python(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        frame = indexed(spark, tmp_path, rows(10))
        query = frame.where("id = 50").select("text")
        lines = explained(query).splitlines()
        assert lines[0].strip() == "LookUp"
        assert "Filter" in lines[2]
        assert "pushed: [(id IS NOT NULL), (id = 50L)]" in lines[3]
        put(tmp_path, [{"id": 50, "text": "later", "score": 0.0, "even": True}])
        assert [row["text"] for row in query.collect()] == ["later"]

    def test_the_same_frame_returns_the_same_rows_after_a_put(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        frame = indexed(spark, tmp_path, rows(10))
        query = frame.where("id >= 8")
        assert query.count() == 2
        put(tmp_path, rows(10, 10))
        assert len(query.collect()) == 2
        assert len(frame.where("id >= 7").collect()) == 3
        assert len(load(spark, tmp_path).where("id >= 8").collect()) == 12

    def test_pruning_that_is_off_plans_no_look_up(
        self, spark: SparkSession, simple: DataFrame
    ) -> None:
        with pruned(spark, False):
            query = simple.where("id = 3")
            assert "LookUp" not in explained(query)
            assert jobs_of(spark, query.collect) > 0

    def test_condition_without_an_index_is_left_to_tasks(
        self, spark: SparkSession, simple: DataFrame
    ) -> None:
        query = simple.where("text = 'row 4'")
        assert not is_found_in_planning(query)
        assert jobs_of(spark, lambda: query.collect()) == 1
        assert [row["id"] for row in query.collect()] == [4]
        assert [row["id"] for row in query.take(2)] == [4]
        assert [row["id"] for row in query.tail(2)] == [4]
        assert list(query.toPandas()["id"]) == [4]

    def test_expressions_that_only_tasks_can_evaluate_stay_with_tasks(
        self, spark: SparkSession, simple: DataFrame
    ) -> None:
        few = simple.where("id IN (4, 5)")
        twice = functions.udf(lambda value: 2 * value, "long")
        assert sorted(row[0] for row in few.select(twice("id")).collect()) == [8, 10]
        for expression in ("rand()", "transform(array(id), x -> x + 1)", "spark_partition_id()"):
            query = few.selectExpr("id", expression)
            assert "LookUp" not in explained(query)
            assert sorted(row["id"] for row in query.collect()) == [4, 5]
        nested = few.where("id = (SELECT 5L)").select("id")
        assert [row["id"] for row in nested.collect()] == [5]


class TestErrors:
    def test_error_in_an_expression_is_that_without_pruning(
        self, spark: SparkSession, simple: DataFrame
    ) -> None:
        query = simple.where("id IN (4, 5)").selectExpr("1 / (id - 4)")
        with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
            query.collect()
        with pruned(spark, False), pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
            simple.where("id IN (4, 5)").selectExpr("1 / (id - 4)").collect()
        query = simple.where("id IN (4, 5) AND 10 / (id - 4) > 0")
        with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
            query.collect()

    def test_look_up_after_a_restore_raises_until_the_topic_is_loaded_again(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(rows(5))
            queue.flush()
            queue.create_index("id", kind="scalar")
            queue.tag("five")
            queue.put_batch(rows(5, 5))
            queue.flush()
            frame = load(spark, tmp_path)
            assert len(frame.where("id = 7").collect()) == 1
            queue.restore("five")
        with pytest.raises(Exception, match="load it again"):
            frame.where("id = 4").collect()
        assert len(load(spark, tmp_path).where("id = 4").collect()) == 1


ON_EXECUTORS = """
import sys
from persisting.spark import read_topic, session

spark = session(master="local-cluster[1,1,1024]")
topic = read_topic(spark, sys.argv[1])
few = topic.where("id IN (3, 30, 1000)")
leaf = few._jdf.queryExecution().sparkPlan().collectLeaves().head()
result = {
    "batch": leaf.batch().getClass().getSimpleName(),
    "collected": sorted(row["id"] for row in few.collect()),
    "sum": few.groupBy().sum("id").first()[0],
    "ordered": [row["text"] for row in few.orderBy("id").collect()],
    "joined": topic.join(few.select("id"), "id").count(),
    "pandas": sorted(few.toPandas()["id"].tolist()),
}
spark.stop()
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_executors_without_our_classes_get_the_rows(tmp_path: Path) -> None:
    with writer(tmp_path) as queue:
        queue.put_batch(rows(40))
        queue.flush()
        queue.create_index("id", kind="scalar")
    with Run(tmp_path, ON_EXECUTORS, tmp_path / "t") as run:
        found = run.finish().result
    assert found == {
        "batch": "LookedUpRows",
        "collected": [3, 30],
        "sum": 33,
        "ordered": ["row 3", "row 30"],
        "joined": 2,
        "pandas": [3, 30],
    }


class TestRandomQueries:
    def test_random_queries_with_indexes_return_the_rows_of_parquet(
        self, spark: SparkSession, views: tuple[str, str]
    ) -> None:
        assert random_queries.compare(spark, *views, seed=100, count=20) > 10

    @pytest.mark.nightly
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("seed", range(101, 106))
    def test_many_random_queries_with_indexes_return_the_rows_of_parquet(
        self, spark: SparkSession, views: tuple[str, str], seed: int
    ) -> None:
        assert random_queries.compare(spark, *views, seed=seed, count=100) > 50

    @pytest.mark.nightly
    @pytest.mark.timeout(3600)
    def test_random_look_ups_return_the_rows_of_parquet(
        self, spark: SparkSession, views: tuple[str, str]
    ) -> None:
        """Each query is a plan of its own, so that it may be a look-up."""
        assert random_queries.compare(spark, *views, seed=110, count=200, together=1) > 100
