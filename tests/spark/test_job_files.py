"""Exports to folders that are not empty, and ingest of files of every kind."""

from __future__ import annotations

import datetime as dt
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.spark.topics import ids, put, rows, stored

from persisting.errors import InvalidArgument, SchemaError
from persisting.spark import jobs
from persisting.spark.jobs.export_targets import export_folder, part_targets
from persisting.spark.jobs.file_formats import folder_columns, lance_folders, layouts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def kinds(spark: SparkSession) -> DataFrame:
    """Return two rows of two kinds in one partition."""
    made = [(1, "001", "x"), (2, "2024-01-01", "y")]
    return spark.createDataFrame(made, "id long, kind string, side string").coalesce(1)


def by_id(folder: Path, topic: str = "t") -> list[dict[str, Any]]:
    return sorted(stored(folder, topic), key=lambda record: record["id"])


def lines(path: Path, *records: Any) -> Path:
    """Write a file of JSON lines; text is written unchanged."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


class TestOverwriting:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ([], ["kind"]),
            (["kind"], ["kind", "side"]),
            (["kind", "side"], ["side"]),
            (["kind"], []),
        ],
    )
    def test_overwriting_lance_with_other_partitions_leaves_only_the_new_ones(
        self, kinds: DataFrame, tmp_path: Path, before: list[str], after: list[str]
    ) -> None:
        place = tmp_path / "x.lance"
        jobs.export(kinds.limit(1), place, partition_by=before)
        done = jobs.export(kinds, place, partition_by=after, mode="overwrite")
        assert done["files"] == (2 if after else 1)
        assert layouts(place) == {("lance", tuple(after))}
        assert sum(pa_rows(folder) for folder in lance_folders(place)) == 2

    def test_overwrite_replaces_files_of_another_format(
        self, kinds: DataFrame, tmp_path: Path
    ) -> None:
        place = tmp_path / "x"
        for format in ("parquet", "lance", "jsonl"):
            jobs.export(kinds, place, format=format, mode="overwrite")
            assert layouts(place) == {(format, ())}

    def test_failed_overwrite_leaves_the_old_files(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        place, failing = tmp_path / "x", spark.range(1).selectExpr("assert_true(id > 5) as id")
        with pytest.raises(Exception, match="USER_RAISED_EXCEPTION"):
            jobs.export(failing, place, mode="overwrite")
        assert not place.exists()
        jobs.export(spark.range(3), place)
        with pytest.raises(Exception, match="USER_RAISED_EXCEPTION"):
            jobs.export(failing, place, mode="overwrite")
        assert pq.read_table(place).num_rows == 3
        assert layouts(place) == {("parquet", ())}

    def test_overwrite_may_read_the_files_that_it_replaces(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        jobs.export(spark.range(4), tmp_path / "x")
        old = spark.read.parquet(str(tmp_path / "x"))
        assert jobs.export(old.where("id > 0"), tmp_path / "x", mode="overwrite")["rows"] == 3
        assert pq.read_table(tmp_path / "x").num_rows == 3


def pa_rows(folder: Path) -> int:
    return int(lance.dataset(str(folder)).count_rows())


class TestAppending:
    @pytest.mark.parametrize("format", ["lance", "parquet"])
    def test_append_needs_the_same_partitions(
        self, kinds: DataFrame, tmp_path: Path, format: str
    ) -> None:
        jobs.export(kinds, tmp_path / "x", format=format, partition_by="kind")
        for by in ([], ["side"], ["kind", "side"]):
            with pytest.raises(InvalidArgument, match=r"with partition_by=\['kind'\]"):
                jobs.export(kinds, tmp_path / "x", format=format, partition_by=by, mode="append")
        jobs.export(kinds, tmp_path / "x", format=format, partition_by="kind", mode="append")
        assert layouts(tmp_path / "x") == {(format, ("kind",))}

    def test_append_needs_the_same_format(self, kinds: DataFrame, tmp_path: Path) -> None:
        lines(tmp_path / "x" / "one.jsonl", {"id": 1})
        for format in ("lance", "parquet"):
            with pytest.raises(InvalidArgument, match="holds files of the format jsonl with no"):
                jobs.export(kinds, tmp_path / "x", format=format, mode="append")


class TestTargets:
    @pytest.mark.parametrize("place", ["t", ".", "t/bucket_0/data.lance", "t/new"])
    @pytest.mark.parametrize("mode", ["overwrite", "append", "error"])
    def test_export_into_a_topic_is_refused(
        self, kinds: DataFrame, tmp_path: Path, place: str, mode: str
    ) -> None:
        put(tmp_path, rows(4))
        with pytest.raises(InvalidArgument, match="is a topic"):
            jobs.export(kinds, tmp_path / place, mode=mode)
        assert len(stored(tmp_path)) == 4

    def test_targets_of_a_split_are_all_checked_first(self, tmp_path: Path) -> None:
        put(tmp_path, rows(4), topic="test")
        with pytest.raises(InvalidArgument, match="is a topic"):
            part_targets(tmp_path, ["train", "test"], None, "overwrite")
        with pytest.raises(InvalidArgument, match="begins with a dot"):
            part_targets(tmp_path / "parts", ["../train"], None, "overwrite")
        lines(tmp_path / "parts" / "b" / "one.jsonl", {"id": 1})
        with pytest.raises(InvalidArgument, match="already exists"):
            part_targets(tmp_path / "parts", ["a", "b"], None, "error")
        with pytest.raises(InvalidArgument, match="format jsonl"):
            part_targets(tmp_path / "parts", ["a", "b"], None, "append")
        found = part_targets(tmp_path / "parts", ["a", "b"], None, "overwrite")
        assert found == {name: tmp_path / "parts" / name for name in ("a", "b")}

    def test_export_target_must_be_a_local_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(InvalidArgument, match="file is a file"):
                export_folder(path)
        with pytest.raises(InvalidArgument, match="s3"):
            export_folder("s3://bucket/x")
        assert export_folder(f"file://{tmp_path}/x") == tmp_path / "x"

    def test_export_without_columns_is_refused(self, spark: SparkSession, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="nothing to export"):
            jobs.export(spark.range(1).drop("id"), tmp_path / "x")


class TestPartitions:
    @pytest.mark.parametrize("format", ["parquet", "jsonl", "lance"])
    def test_partition_values_stay_text(
        self, spark: SparkSession, kinds: DataFrame, tmp_path: Path, format: str
    ) -> None:
        jobs.export(kinds.drop("side"), tmp_path / "x", format=format, partition_by="kind")
        jobs.ingest(spark, tmp_path / "x", tmp_path / "t", num_buckets=1)
        assert by_id(tmp_path) == [{"id": 1, "kind": "001"}, {"id": 2, "kind": "2024-01-01"}]

    def test_partition_values_have_the_types_of_the_topic_or_schema(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        day = dt.date(2024, 1, 2)
        put(tmp_path, [{"id": 1, "on": True, "day": day}], buckets=1)
        made = spark.createDataFrame([(2, False, day)], "id long, on boolean, day date")
        jobs.export(made, tmp_path / "x", format="jsonl", partition_by=["on", "day"])
        jobs.ingest(spark, tmp_path / "x", tmp_path / "t", schema="id long")
        assert by_id(tmp_path)[1] == {"id": 2, "on": False, "day": day}
        jobs.ingest(spark, tmp_path / "x", tmp_path / "other", schema="id long, day date")
        assert stored(tmp_path, "other") == [{"id": 2, "on": "false", "day": day}]

    @pytest.mark.parametrize("value", ["", "__HIVE_DEFAULT_PARTITION__"])
    def test_partition_values_that_mean_null_are_refused(
        self, spark: SparkSession, tmp_path: Path, value: str
    ) -> None:
        made = spark.createDataFrame([(1, value)], "id long, kind string")
        with pytest.raises(InvalidArgument, match="'kind', which holds an empty text"):
            jobs.export(made, tmp_path / "x", partition_by="kind")
        assert not (tmp_path / "x").exists()

    def test_partitions_by_bytes_are_refused(self, spark: SparkSession, tmp_path: Path) -> None:
        made = spark.createDataFrame([(1, b"\xff")], "id long, raw binary")
        with pytest.raises(InvalidArgument, match="'raw', whose bytes"):
            jobs.export(made, tmp_path / "x", partition_by="raw")

    def test_partitions_below_a_pattern_are_read(
        self, spark: SparkSession, kinds: DataFrame, tmp_path: Path
    ) -> None:
        jobs.export(kinds, tmp_path / "x", partition_by="kind")
        jobs.ingest(spark, tmp_path / "x" / "kind=*", tmp_path / "t", format="parquet")
        assert [record["kind"] for record in by_id(tmp_path)] == ["001", "2024-01-01"]

    def test_partition_folders_next_to_files_without_partitions_are_refused(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        lines(tmp_path / "x" / "kind=a" / "one.jsonl", {"id": 1})
        lines(tmp_path / "x" / "two.jsonl", {"id": 2})
        with pytest.raises(InvalidArgument, match="different columns"):
            jobs.ingest(spark, tmp_path / "x", tmp_path / "t")
        assert not (tmp_path / "t").exists()

    def test_partition_columns_are_parsed_from_folders(self) -> None:
        assert folder_columns(Path("plain/a%2Fb=1/c=")) == ("a/b", "c")


class TestJsonLines:
    @pytest.mark.parametrize("schema", [None, "id long, x long"])
    def test_json_line_that_is_not_an_object_is_named(
        self, spark: SparkSession, tmp_path: Path, schema: str | None
    ) -> None:
        lines(tmp_path / "in" / "good.jsonl", {"id": 0, "x": 0})
        lines(tmp_path / "in" / "bad.jsonl", {"id": 1, "x": 1}, '{"id": 2, "x":', {"id": 3})
        with pytest.raises(InvalidArgument, match=r"bad\.jsonl, line 2 is not a JSON object"):
            jobs.ingest(spark, tmp_path / "in", tmp_path / "t", schema=schema)
        assert not (tmp_path / "t").exists()

    @pytest.mark.parametrize("x", ["three", 2**64])
    def test_json_line_that_does_not_fit_the_schema_is_named(
        self, spark: SparkSession, tmp_path: Path, x: Any
    ) -> None:
        with gzip.open(tmp_path / "in.jsonl.gz", "wt") as file:
            file.write('{"id": 1, "x": 1}\n' + json.dumps({"id": 2, "x": x}) + "\n")
        with pytest.raises(SchemaError, match=r"gz, line 2: .* does not fit .*x:bigint"):
            jobs.ingest(spark, tmp_path / "in.jsonl.gz", tmp_path / "t", schema="id long, x long")
        assert stored(tmp_path) == []

    def test_json_line_must_be_one_complete_object(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        for text in ('[\n {"id": 1}\n]', "5", '{"id": 1}{"id": 2}', '{"id": 1} rest'):
            lines(tmp_path / "in.json", text)
            with pytest.raises(InvalidArgument, match=r"in\.json, line 1 is not a JSON object"):
                jobs.ingest(spark, tmp_path / "in.json", tmp_path / "t")

    @pytest.mark.parametrize(
        ("one", "other", "split"),
        [
            (1, "a", False),
            (1, "a", True),
            (True, {"a": 1}, False),
            (2**53 + 1, 0.5, True),
            ([1], ["a"], False),
        ],
    )
    def test_json_line_that_contradicts_another_is_named(
        self, spark: SparkSession, tmp_path: Path, one: Any, other: Any, split: bool
    ) -> None:
        lines(tmp_path / "in" / "a.jsonl", {"id": 1}, {"id": 2, "x": one})
        if split:
            lines(tmp_path / "in" / "b.jsonl", {"id": 3, "x": other})
        else:
            lines(tmp_path / "in" / "a.jsonl", {"id": 1}, {"x": one}, {"x": other})
        with pytest.raises(SchemaError, match=r"[ab]\.jsonl, line \d: field 'x"):
            jobs.ingest(spark, tmp_path / "in", tmp_path / "t")
        assert not (tmp_path / "t").exists()

    def test_json_nulls_leave_the_type_open(self, spark: SparkSession, tmp_path: Path) -> None:
        nothing = {"id": 1, "x": None, "list": [], "inner": {"a": None}, "text": "a"}
        something = {"id": 2, "x": 5, "list": [1.5], "inner": {"a": True}, "text": "b"}
        for number, one in enumerate([nothing, something, {**nothing, "id": 3}]):
            place = lines(tmp_path / f"{number}.jsonl", one)
            jobs.ingest(spark, place, tmp_path / "t", num_buckets=1)
        assert by_id(tmp_path) == [nothing, something, {**nothing, "id": 3}]

    def test_json_lines_keep_microseconds(self, spark: SparkSession, tmp_path: Path) -> None:
        made = spark.sql(
            "select 1 id, timestamp'1900-01-02 03:04:05.123456Z' at, "
            "timestamp_ntz'2024-01-02 03:04:05.000001' here, time'01:02:03.000004' time"
        )
        jobs.export(made, tmp_path / "x", format="jsonl")
        (text,) = (file.read_text() for file in (tmp_path / "x").glob("*.json"))
        assert json.loads(text) == {
            "id": 1,
            "at": "1900-01-02T03:04:05.123456Z",
            "here": "2024-01-02T03:04:05.000001",
            "time": "01:02:03.000004",
        }
        schema = "id int, at timestamp, here timestamp_ntz, time time"
        jobs.ingest(spark, tmp_path / "x", tmp_path / "t", schema=schema)
        (found,) = stored(tmp_path)
        assert found["at"].microsecond == 123456
        assert (found["here"].microsecond, found["time"].microsecond) == (1, 4)


class TestParquet:
    def test_fields_of_all_parquet_files_are_read(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        (tmp_path / "in" / "below").mkdir(parents=True)
        narrow = {"id": [1], "a": [1], "n": pa.array([1], pa.int32()), "l": [[1]]}
        wide = {"id": [2], "b": ["x"], "n": pa.array([2**40]), "l": [[2]]}
        pq.write_table(pa.table(narrow), tmp_path / "in" / "a.parquet")
        pq.write_table(pa.table(wide), tmp_path / "in" / "below" / "b.parquet")
        jobs.ingest(spark, tmp_path / "in", tmp_path / "t", num_buckets=1)
        assert by_id(tmp_path) == [
            {"id": 1, "a": 1, "n": 1, "l": [1], "b": None},
            {"id": 2, "a": None, "n": 2**40, "l": [2], "b": "x"},
        ]

    @pytest.mark.parametrize(
        ("one", "other", "words"),
        [
            (pa.array([1]), pa.array(["x"]), r"\.parquet: field 'x' is \w+, got \w+ as in"),
            (
                pa.array([2**60]),
                pa.array([0.5]),
                r"'x' is bigint, which Spark cannot read as double",
            ),
        ],
    )
    def test_parquet_types_that_would_lose_values_are_refused(
        self, spark: SparkSession, tmp_path: Path, one: pa.Array, other: pa.Array, words: str
    ) -> None:
        (tmp_path / "in").mkdir()
        for name, array in (("a", one), ("b", other)):
            table = pa.table({"id": [1], "x": array})
            pq.write_table(table, tmp_path / "in" / f"{name}.parquet")
        with pytest.raises(InvalidArgument, match=words):
            jobs.ingest(spark, tmp_path / "in", tmp_path / "t")
        assert not (tmp_path / "t").exists()

    def test_parquet_with_nanoseconds_is_refused_by_name(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        table = pa.table({"id": [1], "at": pa.array([1], pa.timestamp("ns"))})
        pq.write_table(table, tmp_path / "in.parquet")
        with pytest.raises(InvalidArgument, match=r"in\.parquet: field 'at' is timestamp\[ns\]"):
            jobs.ingest(spark, tmp_path / "in.parquet", tmp_path / "t")


class TestFolders:
    def test_folder_is_read_with_everything_below_it(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        lines(tmp_path / "in" / "a.jsonl", {"id": 1})
        lines(tmp_path / "in" / "x" / "b.jsonl", {"id": 2})
        assert jobs.ingest(spark, tmp_path / "in", tmp_path / "t")["rows"] == 2
        assert ids(tmp_path) == [1, 2]

    def test_relative_paths_start_at_the_folder_of_python(
        self, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines(tmp_path / "in.jsonl", {"id": 1})
        lance.write_dataset(pa.table({"id": [2]}), tmp_path / "in.lance")
        monkeypatch.chdir(tmp_path)
        for source in ("in.jsonl", "in.lance"):
            assert jobs.ingest(spark, source, "t")["topic"] == str(tmp_path / "t")
        assert ids(tmp_path) == [1, 2]

    def test_file_names_that_look_like_patterns_are_literal(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        lines(tmp_path / "a1.jsonl", {"id": 1})
        lines(tmp_path / "a[1].jsonl", {"id": 2})
        jobs.ingest(spark, tmp_path / "a[1].jsonl", tmp_path / "t")
        assert ids(tmp_path) == [2]

    def test_folder_without_files_is_refused(self, spark: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        with pytest.raises(InvalidArgument, match="there are no files at"):
            jobs.ingest(spark, tmp_path / "in", tmp_path / "t", format="parquet")

    def test_files_in_metadata_partitions_are_counted(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        made = spark.range(2).selectExpr("id", "0 as _bucket")
        assert jobs.export(made, tmp_path / "x", partition_by="_bucket")["files"] > 0

    def test_fields_that_differ_in_case_are_kept(self, spark: SparkSession, tmp_path: Path) -> None:
        record = {"id": 1, "a": 1, "A": 2}
        spark.conf.set("spark.sql.caseSensitive", "true")
        try:
            jobs.ingest(spark, lines(tmp_path / "in.jsonl", record), tmp_path / "t")
        finally:
            spark.conf.unset("spark.sql.caseSensitive")
        assert stored(tmp_path) == [record]


def test_times_of_day_need_a_setting(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = spark.sql("select 1 id, array(time'01:02:03') times")
    spark.conf.set("spark.sql.timeType.enabled", "false")
    try:
        for work in (lambda: jobs.export(made, tmp_path / "x"), lambda: jobs.profile(made)):
            with pytest.raises(InvalidArgument, match="field 'times' holds times of day"):
                work()
    finally:
        spark.conf.set("spark.sql.timeType.enabled", "true")
    assert jobs.export(made, tmp_path / "x")["rows"] == 1
