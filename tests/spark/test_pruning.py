"""Queries push their columns and conditions down to topics, and return the same rows as without."""

from __future__ import annotations

import base64
import datetime as dt
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from pyspark.serializers import CPickleSerializer
from pyspark.sql import functions
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType
from support.doc_pages import both
from support.spark import random_queries
from support.spark.processes import Run
from support.spark.pruning import (
    catalog_of,
    explained,
    logged_by_java,
    make_views,
    pruned,
    put_all_types,
)
from support.spark.topics import load, put, rows, writer

from persisting.errors import InvalidArgument
from persisting.spark import (
    batch_reader,
    install_pruning,
    jobs,
    pruning,
    read_topic,
    session,
)
from persisting.spark.batch_reader import SlicePartition, TopicReader
from persisting.spark.scan_hints import _MARK, HINTS, ScanHints, snapshot_text, take_hints
from persisting.spark.source import _to_arrow, read_schema
from persisting.spark.source_options import ReadOptions
from persisting.spark.topic_scan import pushed_hint
from persisting.topic import scan
from persisting.topic.routing import bucket_of
from persisting.topic.scan import Slice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 400


def optimized(df: DataFrame) -> str:
    plan: str = df._jdf.queryExecution().optimizedPlan().treeString()
    return plan


def relations(df: DataFrame) -> list[list[str]]:
    """Return the columns of each scan in the optimized plan."""
    lines = [line.split("RelationV2[")[1] for line in optimized(df).splitlines() if "Rel" in line]
    listed = [line.split("]")[0] for line in lines]
    return [[name.split("#")[0] for name in line.split(", ") if name] for line in listed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic with all types, in two buckets with several fragments each."""
    return put_all_types(tmp_path_factory.mktemp("pruning"), ROWS)


@pytest.fixture(scope="module")
def views(spark: SparkSession, folder: Path) -> tuple[str, str]:
    """Views of the same rows: the topic, and a copy in Parquet, written without pruning."""
    return make_views(spark, folder, "pruned_topic", "parquet_copy")


@pytest.fixture(scope="module")
def simple(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    home = tmp_path_factory.mktemp("simple")
    put(home, rows(40))
    return load(spark, home)


class TestPlans:
    def test_scan_lists_the_columns_of_the_result_and_of_conditions(
        self, simple: DataFrame
    ) -> None:
        query = simple.where("score > 5").select("id")
        assert relations(query) == [["id", "score"]]
        assert sorted(row["id"] for row in query.collect()) == [
            row["id"] for row in rows(40) if row["score"] > 5
        ]

    def test_explain_names_what_is_pushed(self, simple: DataFrame) -> None:
        query = simple.where("score > 5 AND text LIKE 'row 2%' AND upper(text) = 'ROW 24'")
        text = explained(query)
        assert "pushed: [" in text
        assert "score > 5.0D" in text.split("pushed: [")[1]
        assert "startswith(text, 'row 2')" in text.split("pushed: [")[1]
        assert "upper" not in text.split("pushed: [")[1].split("]")[0]
        assert [row["id"] for row in query.collect()] == [24]

    @pytest.mark.parametrize("page", both("guide/spark.md"), ids=["en", "zh"])
    def test_plan_in_the_guide_is_what_spark_prints(
        self, spark: SparkSession, tmp_path: Path, page: Path
    ) -> None:
        put(tmp_path, [{"id": 1, "action": "open", "score": 0.5}])
        query = load(spark, tmp_path).where("score > 0.6").select("id")
        execution = query._jdf.queryExecution()
        printed = execution.toString()
        _, _, text = page.read_text("utf-8").partition("best.explain(True)\n")
        shown = [line[2:] for line in text.partition("print(")[0].splitlines()]
        assert len(shown) == 6
        for line in shown:
            for part in line.split("…"):
                assert re.sub(r"#\d+", "#", part) in re.sub(r"#\d+", "#", printed)

    def test_all_columns_are_listed_where_pruning_is_off(
        self, spark: SparkSession, simple: DataFrame
    ) -> None:
        with pruned(spark, False):
            query = simple.where("score > 5").select("id")
            assert relations(query) == [["id", "text", "score", "even"]]
            assert "pushed" not in explained(query)
            assert query.count() == sum(row["score"] > 5 for row in rows(40))

    @pytest.mark.parametrize("by_name", [False, True], ids=["path", "name"])
    def test_setting_of_a_session_turns_pruning_off_and_on_again(
        self, spark: SparkSession, tmp_path: Path, by_name: bool
    ) -> None:
        put(tmp_path, rows(10))
        catalog = catalog_of(spark, tmp_path)

        def plans() -> list[str]:
            frame = spark.table(f"{catalog}.t") if by_name else load(spark, tmp_path)
            query = frame.where("score > 1").select("id")
            assert sorted(row["id"] for row in query.collect()) == [5, 6, 7, 8, 9]
            total = frame.selectExpr("sum(id)")
            assert total.collect() == [(45,)]
            columns = "; ".join(", ".join(names) for names in relations(query) + relations(total))
            return [columns, str("pushed" in explained(query) or "aggregated" in explained(total))]

        assert session(conf={"spark.persisting.pruning": "false"}) is spark
        try:
            assert plans() == ["id, text, score, even; id, text, score, even", "False"]
        finally:
            session(conf={"spark.persisting.pruning": "true"})
        assert plans() == ["id, score; id", "True"]

    def test_metadata_is_read_by_name_where_pruning_is_off(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(4), buckets=1)
        catalog = catalog_of(spark, tmp_path)
        with pruned(spark, False):
            query = spark.sql(f"SELECT _offset FROM {catalog}.t WHERE id > 1 AND _bucket = 0")
            assert [row["_offset"] for row in query.collect()] == [2, 3]
            assert relations(query) == [["id", "text", "score", "even", "_bucket", "_offset"]]

    @pytest.mark.parametrize("by_name", [False, True], ids=["path", "name"])
    def test_fields_that_differ_only_in_case_are_all_read_and_reported_once(
        self, spark: SparkSession, tmp_path: Path, by_name: bool
    ) -> None:
        put(tmp_path, [{"id": n, "st": {"b": n, "B": n}, "a": n, "A": 10 * n} for n in range(5)])
        catalog = catalog_of(spark, tmp_path)

        def loaded() -> DataFrame:
            return spark.table(f"{catalog}.t") if by_name else load(spark, tmp_path)

        with logged_by_java(spark) as log:
            renamed = loaded().toDF("id", "st", "small", "large")
            query = renamed.where("large > 10").select("small")
            assert relations(query) == [["id", "st", "a", "A"]]
            assert "pushed" not in explained(query)
            assert sorted(row["small"] for row in query.collect()) == [2, 3, 4]
            assert "aggregated" not in explained(renamed.selectExpr("sum(large)"))
            assert renamed.selectExpr("sum(small)", "sum(large)").collect() == [(10, 100)]
            assert str(log.toString()).count("differ only in case") == 1
        with pytest.raises(Exception, match="AMBIGUOUS_REFERENCE"):
            loaded().select("a")
        spark.conf.set("spark.sql.caseSensitive", "true")
        try:
            query = loaded().where("A > 10").select("a")
            assert relations(query) == [["a", "A"]]
            assert "pushed" in explained(query)
            assert sorted(row["a"] for row in query.collect()) == [2, 3, 4]
        finally:
            spark.conf.unset("spark.sql.caseSensitive")

    def test_count_reads_no_column(self, spark: SparkSession, tmp_path: Path) -> None:
        put(tmp_path, rows(40))
        frame = load(spark, tmp_path)
        query = frame.selectExpr("count(*)")
        assert relations(query) == [[]]
        for file in (tmp_path / "t").glob("bucket_*/data.lance/data/*.lance"):
            file.unlink()
        assert query.collect()[0][0] == 40
        with pytest.raises(Exception, match="cannot read"):
            frame.selectExpr("count(text)").collect()

    def test_nested_field_is_read_alone(self, spark: SparkSession, tmp_path: Path) -> None:
        made = [{"id": n, "st": {"a": n, "b": "x" * n, "c": {"d": n / 2}}} for n in range(50)]
        put(tmp_path, made)
        query = load(spark, tmp_path).select("id", "st.a", "st.c.d").where("st.a > 3")
        schema = query._jdf.queryExecution().optimizedPlan().collectLeaves().head().schema()
        assert schema.simpleString() == "struct<id:bigint,st:struct<a:bigint,c:struct<d:double>>>"
        found = sorted(tuple(row) for row in query.collect())
        assert found == [(n, n, n / 2) for n in range(4, 50)]


class TestOwnReaders:
    """One load serves several scans, each with columns and conditions of its own."""

    def test_queries_of_one_load_do_not_affect_each_other(self, simple: DataFrame) -> None:
        assert [row["id"] for row in simple.where("id = 3").collect()] == [3]
        assert simple.count() == 40
        assert simple.where("id < 5").select("text").count() == 5
        assert simple.count() == 40

    def test_unions_and_self_joins_read_their_own_rows(self, simple: DataFrame) -> None:
        both = simple.where("id = 1").select("id").union(simple.where("id = 2").select("id"))
        assert sorted(row["id"] for row in both.collect()) == [1, 2]
        left, right = simple.where("id < 10").alias("l"), simple.where("id > 5").alias("r")
        joined = left.join(right, "id").selectExpr("l.text", "r.score")
        assert sorted(relations(joined)) == [["id", "score"], ["id", "text"]]
        assert joined.count() == 4

    def test_subqueries_and_views_read_their_own_rows(
        self, spark: SparkSession, simple: DataFrame
    ) -> None:
        simple.createOrReplaceTempView("simple_topic")
        found = spark.sql(
            "SELECT id FROM simple_topic WHERE score = (SELECT max(score) FROM simple_topic "
            "WHERE id < 7) OR id IN (SELECT id FROM simple_topic WHERE text = 'row 9')"
        )
        assert sorted(row["id"] for row in found.collect()) == [6, 9]
        spark.sql("CREATE OR REPLACE TEMP VIEW narrow_topic AS SELECT id FROM simple_topic")
        assert spark.sql("SELECT sum(id) FROM narrow_topic WHERE id < 3").first()[0] == 3

    def test_cached_frame_answers_all_queries(self, simple: DataFrame) -> None:
        cached = simple.select("id", "score").cache()
        try:
            assert cached.where("score > 5").count() == sum(r["score"] > 5 for r in rows(40))
            assert cached.select("id").count() == 40
            assert "InMemoryRelation" in optimized(cached.where("id = 1"))
        finally:
            cached.unpersist()

    def test_scans_of_one_load_read_the_same_rows_after_a_put(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(10))
        frame = load(spark, tmp_path)
        assert frame.where("id >= 0").count() == 10
        put(tmp_path, rows(10, 10))
        assert frame.count() == 10
        assert frame.select("text").where("id > 5").count() == 4
        assert load(spark, tmp_path).where("id >= 0").count() == 20

    def test_fields_that_are_added_between_two_queries_do_not_disturb_a_load(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(10))
        frame = load(spark, tmp_path)
        put(tmp_path, [{"id": 10, "text": "x", "extra": 1.5}])
        assert frame.where("score >= 0").count() == 10
        fresh = load(spark, tmp_path)
        assert [row["id"] for row in fresh.where("extra > 1").select("id").collect()] == [10]
        assert fresh.where("extra IS NULL").count() == 10
        put(tmp_path, [{"id": 11, "text": "x", "score": 2**60}])
        assert load(spark, tmp_path).where("score > 100").count() == 1

    def test_query_after_a_restore_raises_until_the_topic_is_loaded_again(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(rows(5))
            queue.flush()
            queue.tag("five")
            queue.put_batch(rows(5, 5))
            queue.flush()
            frame = load(spark, tmp_path)
            assert frame.where("id > 2").count() == 7
            queue.restore("five")
        with pytest.raises(Exception, match="load it again"):
            frame.select("text").where("id > 2").collect()
        assert load(spark, tmp_path).where("id > 2").count() == 2

    def test_filter_option_and_condition_are_both_applied(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(40))
        frame = read_topic(spark, tmp_path / "t", where="id < 20", includeMetadata=True)
        assert sorted(r["id"] for r in frame.where("id > 15").select("id").collect()) == [
            16,
            17,
            18,
            19,
        ]
        assert frame.where("_offset = 0").select("_bucket").count() == 2
        assert frame.count() == 20


class TestStreams:
    @pytest.fixture(params=[False, True], ids=["path", "name"])
    def stream(
        self, request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path
    ) -> Callable[[str], DataFrame]:
        """Open a stream of a topic, by its path or by its name."""

        def opened(topic: str) -> DataFrame:
            if request.param:
                return spark.readStream.table(f"{catalog_of(spark, tmp_path)}.{topic}")
            return spark.readStream.format("persisting").load(str(tmp_path / topic))

        return opened

    @staticmethod
    def read(df: DataFrame, checkpoint: Path) -> tuple[list[Any], list[str]]:
        """Run a stream to its end; return its rows and the columns that its scan of a topic has."""
        name = f"stream_{checkpoint.parent.name}"
        query = (
            df.writeStream.format("memory")
            .queryName(name)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        jobs.watch(query)
        leaves = query._jsq.streamingQuery().logicalPlan().collectLeaves()
        leaf = next(
            leaf
            for leaf in (leaves.apply(place) for place in range(leaves.size()))
            if leaf.getClass().getSimpleName() == "StreamingDataSourceV2ScanRelation"
        )
        columns = [str(name) for name in leaf.scan().readSchema().fieldNames()]
        shown = [str(leaf.output().apply(place).name()) for place in range(leaf.output().size())]
        assert shown == columns
        return sorted(tuple(row) for row in df.sparkSession.table(name).collect()), columns

    def test_stream_reads_only_the_columns_that_it_uses(
        self, stream: Callable[[str], DataFrame], tmp_path: Path
    ) -> None:
        put(tmp_path, rows(30), "raw")
        used = stream("raw").where("even").selectExpr("id", "id * 2 AS twice")
        found, columns = self.read(used, tmp_path / "checkpoint")
        assert found == [(n, 2 * n) for n in range(0, 30, 2)]
        assert columns == ["id", "even"]

    def test_stream_joined_with_a_table_reads_only_the_columns_that_it_uses(
        self, spark: SparkSession, stream: Callable[[str], DataFrame], tmp_path: Path
    ) -> None:
        put(tmp_path, rows(30), "raw")
        put(tmp_path, [{"id": n, "label": f"label {n}", "more": n} for n in range(0, 40, 10)], "by")
        labels = load(spark, tmp_path, "by").select("id", "label")
        joined = stream("raw").where("score >= 2").join(labels, "id").select("text", "label")
        found, columns = self.read(joined, tmp_path / "checkpoint")
        assert found == [("row 10", "label 10"), ("row 20", "label 20")]
        assert columns == ["id", "text", "score"]

    def test_stream_with_a_watermark_aggregates_only_the_columns_that_it_uses(
        self, stream: Callable[[str], DataFrame], tmp_path: Path
    ) -> None:
        noon = dt.datetime(2026, 1, 31, 12, tzinfo=dt.timezone.utc)
        put(
            tmp_path,
            [
                {"id": n, "at": noon + dt.timedelta(seconds=10 * n), "text": "x", "score": n / 2}
                for n in range(30)
            ],
            "raw",
        )
        counted = (
            stream("raw")
            .withWatermark("at", "0 seconds")
            .groupBy(functions.window("at", "1 minute"))
            .agg(functions.sum("id").alias("total"))
            .selectExpr("minute(window.start) AS minute", "total")
        )
        found, columns = self.read(counted, tmp_path / "checkpoint")
        # The last window is open: the watermark, the time of the last row, lies in it.
        assert found == [(n, sum(range(6 * n, 6 * n + 6))) for n in range(4)]
        assert columns == ["id", "at"]

    def test_stream_by_name_reads_metadata_with_the_columns_that_it_uses(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(6), "raw", buckets=1)
        raw = spark.readStream.table(f"{catalog_of(spark, tmp_path)}.raw")
        found, columns = self.read(raw.select("text", "_offset"), tmp_path / "checkpoint")
        assert found == [(f"row {n}", n) for n in range(6)]
        assert columns == ["text", "_offset"]

    def test_stream_keeps_columns_of_operators_that_use_all(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [{"id": n % 3, "text": f"{n % 2}"} for n in range(12)], "raw")
        stream = spark.readStream.format("persisting").load(str(tmp_path / "raw"))
        query = (
            stream.dropDuplicates()
            .select("id")
            .writeStream.format("memory")
            .queryName("distinct_stream")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        jobs.watch(query)
        assert sorted(row["id"] for row in spark.table("distinct_stream").collect()) == [
            0,
            0,
            1,
            1,
            2,
            2,
        ]


PUSHED: dict[str, Any] = {
    "flag": True,
    **dict.fromkeys(["i8", "i16", "i32", "i64", "u8", "u16", "u32", "at", "at utc", "day"], 7),
    "u64": "7",
    "f32": 0.5,
    "f64": 0.5,
    "text": "a",
    "bin": "AAE=",
    "span": 7,
    "clock": 7000,
    "uid": "00000000-0000-0000-0000-000000000005",
    "money": "1.50",
    "price": "-9999999999.999999999999999999",
    "st.a": 1,
    "st.c.d": 0.5,
}
"""By field, a value as Spark's Java encodes it."""


class TestTypes:
    @pytest.mark.parametrize("path", PUSHED)
    def test_conditions_on_every_type_reach_the_storage(self, folder: Path, path: str) -> None:
        options = ReadOptions(folder=folder)
        asked = _to_arrow(from_arrow_schema(read_schema(options)))
        for op in ("eq", "same", "in", *(("gt", "le") if path != "uid" else ())):
            condition = {"op": op, "field": path.split("."), "values": [PUSHED[path]]}
            assert pushed_hint(options, [condition], asked) is not None, op
            negated = {"op": "not", "parts": [condition]}
            assert pushed_hint(options, [negated], asked) is not None, op

    def test_condition_on_a_field_that_is_converted_stays_with_spark(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [{"id": n, "score": n / 10} for n in range(20)])
        reader = spark.read.format("persisting").schema("id BIGINT, score FLOAT")
        frame = reader.load(str(tmp_path / "t"))
        found = frame.where("score = CAST(0.1 AS FLOAT)").select("id").collect()
        assert [row["id"] for row in found] == [1]


class TestCompiledClasses:
    def test_compiled_classes_are_cached_by_the_versions_of_spark_and_of_their_sources(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sources, compiled = tmp_path / "jvm", []
        shutil.copytree(pruning._SOURCES, sources)
        monkeypatch.setattr(pruning, "_SOURCES", sources)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

        def compile_classes(loader: Any, files: list[Path], folder: Path) -> None:
            compiled.append([file.read_bytes() for file in files])
            (folder / "Some.class").touch()

        monkeypatch.setattr(pruning, "_compile", compile_classes)
        first = pruning._compiled(None)
        assert pruning._compiled(None) == first
        assert len(compiled) == 1
        with monkeypatch.context() as patch:
            patch.setattr("pyspark.__version__", "99.0.0")
            later = pruning._compiled(None)
            assert pruning._compiled(None) == later
        assert later.name.startswith("99.0.0-")
        source = min(sources.glob("*.java"))
        before = source.read_bytes()
        source.write_bytes(before + b"\n// changed")
        changed = pruning._compiled(None)
        assert pruning._compiled(None) == changed
        source.write_bytes(before)
        assert pruning._compiled(None) == first
        assert len(compiled) == len({first, later, changed}) == 3
        assert compiled[0] == compiled[1] != compiled[2]
        assert set(first.parent.iterdir()) == {first, later, changed}  # no drafts are left
        assert [file.name for file in first.iterdir()] == ["Some.class"]


class TestIndexes:
    @pytest.mark.parametrize(
        ("field", "condition"),
        [
            ("id", {"op": "eq", "values": [7]}),
            ("id", {"op": "in", "values": [7, 9]}),
            ("id", {"op": "ge", "values": [30]}),
            ("text", {"op": "starts_with", "values": ["row 1"]}),
            ("score", {"op": "gt", "values": [5.0]}),
            ("score", {"op": "le", "values": [1.0]}),
        ],
    )
    def test_pushed_condition_uses_a_scalar_index(
        self, tmp_path: Path, field: str, condition: dict[str, Any]
    ) -> None:
        put(tmp_path, rows(40), buckets=1)
        with writer(tmp_path) as queue:
            queue.create_index(field, kind="scalar")
        options = ReadOptions(folder=tmp_path / "t")
        hint = pushed_hint(options, [{"field": [field], **condition}], read_schema(options))
        assert hint is not None
        table = lance.dataset(str(tmp_path / "t" / "bucket_0" / "data.lance"))
        assert "ScalarIndexQuery" in table.scanner(filter=hint.where).explain_plan()

    @staticmethod
    def planned(folder: Path, key: Any, **options: Any) -> tuple[list[int], list[Any]]:
        """Return the buckets that tasks read of a scan for a key, and the rows that they find."""
        target = pa.schema([("id", pa.int64()), ("text", pa.string())])
        hints = ScanHints([{"op": "le" if options else "eq", "field": ["id"], "values": [key]}])
        reader = TopicReader(ReadOptions(folder=folder / "t"), target, None, hints)
        parts: Any = reader.partitions()
        sent = base64.b64encode(CPickleSerializer().dumps(parts[0])).decode()
        schema = StructType([StructField("id", LongType(), True, {HINTS: partitions(sent)})])
        seen = take_hints(schema)[1].slices("x")
        assert seen is not None
        assert [part.bucket for part in seen] == [0, 1, 2, 3]
        assert sum(part.end - part.start for part in seen) == 2000
        found = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
        assert all(row["id"] <= key for row in found)
        return [s.bucket for part in parts for s in part.slices], found

    def test_few_rows_that_an_index_finds_are_read_while_the_scan_is_planned(
        self, tmp_path: Path
    ) -> None:
        hostile = snapshot_text([Slice("x", 0, 0, 1)])
        records = [{"id": n, "text": hostile} for n in range(2000)]
        put(tmp_path, records, buckets=4)
        with writer(tmp_path) as queue:
            queue.create_index("id", kind="scalar")
        assert self.planned(tmp_path, 77) == ([], [{"id": 77, "text": hostile}])
        assert self.planned(tmp_path, -1) == ([], [])
        buckets, found = self.planned(tmp_path, 40, several=True)
        assert (buckets, sorted(row["id"] for row in found)) == ([], list(range(41)))

    def test_many_rows_and_buckets_without_an_index_are_left_to_tasks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(tmp_path, [{"id": n, "text": f"text {n}"} for n in range(2000)], buckets=4)
        assert self.planned(tmp_path, 77)[0] == [0, 1, 2, 3]
        with writer(tmp_path) as queue:
            queue.create_index("id", kind="scalar")
        monkeypatch.setattr(batch_reader, "_MOST_LOOKED_UP", 20)
        buckets, found = self.planned(tmp_path, 1999, several=True)
        assert buckets == [0, 1, 2, 3]
        assert len(found) == 2000
        monkeypatch.setattr(batch_reader, "_MOST_LOOKED_UP_BYTES", 10)
        assert self.planned(tmp_path, 77) == ([bucket_of(77, 4)], [{"id": 77, "text": "text 77"}])
        monkeypatch.setattr(scan, "_MOST_UNINDEXED", -1)
        assert self.planned(tmp_path, 77)[0] == [0, 1, 2, 3]


class Hostile:
    """Unpickling an object of this class makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def partitions(encoded: str) -> str:
    return json.dumps({"partitions": [encoded]})


def partition_text(content: str) -> str:
    return partitions(base64.b64encode(content.encode()).decode())


def aggregates_text(
    groups: list[str], values: list[list[str]], columns: str = StructType().add("id", "long").json()
) -> str:
    return json.dumps({"aggregates": {"groups": groups, "values": values, "columns": columns}})


class TestMetadataOfASchema:
    """Schemas come from files of others, so what their metadata says is not trusted."""

    @staticmethod
    def taken(text: str) -> ScanHints:
        field = StructField("id", LongType(), True, {"comment": "key", HINTS: text})
        schema, hints = take_hints(StructType([field]))
        assert schema["id"].metadata == {"comment": "key"}
        return hints

    def test_snapshot_of_a_pickled_partition_is_read_back(self) -> None:
        folder = f"/{_MARK}00000002[]"
        slices = [Slice(folder, 0, 3, 9, 1, None), Slice(folder, 1, 0, 5, 2, 7)]
        sent = CPickleSerializer().dumps(SlicePartition(tuple(slices), snapshot_text(slices)))
        hints = self.taken(json.dumps({"partitions": [base64.b64encode(sent).decode()]}))
        assert hints.slices(folder) == slices
        assert hints.conditions == []

    def test_pickled_objects_are_not_loaded(self, tmp_path: Path) -> None:
        made = tmp_path / "made"
        sent = base64.b64encode(pickle.dumps(Hostile(made))).decode()
        assert self.taken(json.dumps({"partitions": [sent]})) == ScanHints()
        assert not made.exists()

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            '{"conditions": 3}',
            '{"partitions": ["not base64"]}',
            aggregates_text([], [["median", "id"]]),
            aggregates_text([], [["sum", "other"]]),
            aggregates_text(["id"], [["count_all", "*"]]),
            aggregates_text([], [["count_all", "*"]], columns="{}"),
            partition_text(f"{_MARK}xx"),
            partition_text(f"{_MARK}00000009[[1]]"),
        ],
    )
    def test_unreadable_hints_are_refused_and_named(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match=r"field 'id' has metadata 'persisting\.hints'"):
            self.taken(text)


class TestFallback:
    def test_sources_that_do_not_compile_are_reported_once_at_debug_level(
        self,
        spark: SparkSession,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (tmp_path / "Broken.java").write_text("package persisting.spark; class Broken {")
        monkeypatch.setattr(pruning, "_SOURCES", tmp_path)
        monkeypatch.setattr(pruning, "_is_loaded", lambda loader: False)
        monkeypatch.setattr(pruning, "_reported", False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        with caplog.at_level(logging.DEBUG, "persisting.spark"):
            assert not install_pruning(spark)
            assert not pruning.load_classes()
        assert len(caplog.records) == 1
        assert "Spark reads all columns of topics" in caplog.text
        assert list((tmp_path / "cache" / "persisting" / "spark").iterdir()) == []


PLAIN_SESSION = """
import os
import sys
from pyspark.sql import SparkSession
from persisting.errors import InvalidArgument
from persisting.spark import install_pruning, pruning
from persisting.spark.settings import environment, java_variables

os.environ["PYSPARK_PYTHON"] = sys.executable
with environment(java_variables()):
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = builder.getOrCreate()
topic = spark.read.format("persisting").load(sys.argv[1])
query = lambda: topic.where("id < 5").select("text")
plan = lambda: query()._jdf.queryExecution().optimizedPlan().treeString()
before = plan()
installed = [install_pruning(spark), install_pruning(spark)]
folder = pruning._compiled(None)
pruning._compile = None  # the compiled classes are found again
assert pruning._compiled(None) == folder
names = {file.stem for file in folder.glob("persisting/spark/*.class")}
assert {source.stem for source in pruning._SOURCES.glob("*.java")} <= names
result = {"before": before, "after": plan(), "installed": installed, "rows": query().count()}
spark.stop()
"""


@pytest.mark.timeout(600)
def test_pruning_can_be_installed_into_a_running_session(tmp_path: Path) -> None:
    put(tmp_path, rows(20))
    with Run(tmp_path, PLAIN_SESSION, tmp_path / "t") as run:
        found = json.loads(json.dumps(run.finish().result))
    assert "score" in found["before"]
    assert "score" not in found["after"]
    assert found["installed"] == [True, True]
    assert found["rows"] == 5


class TestAggregates:
    def test_tasks_aggregate_what_they_read(self, simple: DataFrame) -> None:
        values = (functions.expr(text) for text in ("sum(id)", "max(text)", "count(*)"))
        query = simple.groupBy("even").agg(*values)
        assert relations(query) == [["id", "text", "even"]]
        assert "aggregated: [even, sum(id), max(text), count(*)]" in explained(query)
        expected = {
            even: (sum(ids), max(f"row {number}" for number in ids), len(ids))
            for even in (True, False)
            if (ids := [row["id"] for row in rows(40) if row["even"] == even])
        }
        assert {row[0]: (row[1], row[2], row[3]) for row in query.collect()} == expected

    def test_average_is_that_of_all_rows(self, simple: DataFrame) -> None:
        query = simple.selectExpr("avg(score)", "count(score)")
        assert "aggregated: [sum(score), count(score)]" in explained(query)
        scores = [row["score"] for row in rows(40)]
        assert query.collect() == [(pytest.approx(sum(scores) / 40), 40)]

    @pytest.mark.parametrize(
        "query",
        [
            "SELECT count(*) FROM {t} WHERE score > 5",
            "SELECT count(DISTINCT text) FROM {t}",
            "SELECT max(score) FROM {t}",  # NaN is the largest in Spark, not in Arrow
            "SELECT score, count(*) FROM {t} GROUP BY score",
            "SELECT sum(id + 1) FROM {t}",
            "SELECT count(*) FILTER (WHERE even) FROM {t}",
        ],
    )
    def test_other_aggregates_stay_with_spark(
        self, spark: SparkSession, simple: DataFrame, query: str
    ) -> None:
        simple.createOrReplaceTempView("simple")
        found = spark.sql(query.format(t="simple"))
        assert "aggregated" not in explained(found)
        with pruned(spark, False):
            expected = sorted(spark.sql(query.format(t="simple")).collect())
        assert sorted(found.collect()) == expected

    def test_empty_topic_has_a_count_of_zero(self, spark: SparkSession, tmp_path: Path) -> None:
        put(tmp_path, rows(3))
        empty = load(spark, tmp_path, startingOffsets="latest")
        assert "aggregated" in explained(empty.selectExpr("count(*)"))
        found = empty.selectExpr("count(*)", "count(id)", "sum(id)", "min(text)").collect()
        assert [tuple(row) for row in found] == [(0, 0, None, None)]
        assert empty.groupBy("even").count().collect() == []

    def test_sum_beyond_64_bits_fails_as_without_push_down(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [{"id": 2**62 + n} for n in range(4)])
        query = load(spark, tmp_path).selectExpr("sum(id)")
        assert "aggregated" in explained(query)
        with pytest.raises(Exception, match="ARITHMETIC_OVERFLOW"):
            query.collect()
        assert load(spark, tmp_path).selectExpr("max(id)").collect()[0][0] == 2**62 + 3

    def test_adaptive_plans_join_aggregates(self, simple: DataFrame) -> None:
        """Spark plans again after each stage, from the logical plan."""
        sums, counts = simple.groupBy("even").sum("id"), simple.groupBy("even").count()
        joined = sums.join(counts, "even").join(simple.selectExpr("max(id) AS top"))
        assert sorted(map(tuple, joined.collect())) == [(False, 400, 20, 39), (True, 380, 20, 39)]


class TestRandomQueries:
    def test_random_queries_return_the_rows_of_parquet(
        self, spark: SparkSession, views: tuple[str, str]
    ) -> None:
        assert random_queries.compare(spark, *views, seed=1, count=100) > 50

    def test_random_queries_on_names_return_the_rows_of_parquet(
        self, spark: SparkSession, folder: Path, views: tuple[str, str]
    ) -> None:
        name = f"{catalog_of(spark, folder.parent)}.{folder.name}"
        assert random_queries.compare(spark, name, views[1], seed=12, count=20) > 10

    @pytest.mark.nightly
    @pytest.mark.timeout(3600)
    def test_a_hundred_random_queries_on_names_return_the_rows_of_parquet(
        self, spark: SparkSession, folder: Path, views: tuple[str, str]
    ) -> None:
        name = f"{catalog_of(spark, folder.parent)}.{folder.name}"
        assert random_queries.compare(spark, name, views[1], seed=13, count=100) > 50

    @pytest.mark.nightly
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("seed", range(2, 12))
    def test_a_thousand_random_queries_return_the_rows_of_parquet(
        self, spark: SparkSession, views: tuple[str, str], seed: int
    ) -> None:
        assert random_queries.compare(spark, *views, seed=seed, count=100) > 50
