"""Jobs other than compaction and deduplication: export, ingest, profiles, splits, indexes."""

from __future__ import annotations

import datetime as dt
import decimal
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.spark.topics import content, ids, put, reader, rows, stored, writer

from persisting.errors import BucketLocked, InvalidArgument, StorageError
from persisting.spark import jobs, read_topic
from persisting.spark.jobs.distribute import run_on_executors
from persisting.spark.jobs.file_formats import detect_format, named_format

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UTC = dt.timezone.utc
EVERY_TYPE = (
    "id long, flag boolean, small short, whole int, real double, narrow float, text string, "
    "raw binary, day date, moment timestamp, price decimal(12,3), tags array<string>, "
    "vector array<float>, inner struct<a:int,b:array<double>>"
)


def one(number: int) -> tuple[Any, ...]:
    """Return a row of every type; some rows have only nulls."""
    if number % 7 == 3:
        return (number, *[None] * 13)
    return (
        number,
        number % 2 == 0,
        number % 100,
        number * 1000,
        number / 7,
        number / 4,
        f"text {number}\n",
        bytes([number % 256, 0]),
        dt.date(2020, 1, 1) + dt.timedelta(days=number),
        dt.datetime(2020, 1, 1, tzinfo=UTC) + dt.timedelta(seconds=number, microseconds=number),
        decimal.Decimal(number) / 8,
        [f"tag{number}"] * (number % 3),
        [number / 2, 1.0, -1.0],
        (number, [number / 3]),
    )


@pytest.fixture(scope="module")
def everything(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([one(number) for number in range(40)], EVERY_TYPE)


def same(left: DataFrame, right: DataFrame) -> bool:
    def plain(df: DataFrame) -> list[str]:
        return sorted(repr(row.asDict(recursive=True)) for row in df.select(names).collect())

    names = sorted(left.columns)
    return sorted(right.columns) == names and plain(left) == plain(right)


class TestFiles:
    @pytest.mark.parametrize("format", ["parquet", "lance"])
    def test_every_type_survives_export_and_ingest(
        self, spark: SparkSession, everything: DataFrame, tmp_path: Path, format: str
    ) -> None:
        place = tmp_path / f"files.{format}"
        done = jobs.export(everything, place)
        assert (done["path"], done["format"], done["rows"]) == (str(place), format, 40)
        assert done["files"] > 0
        assert done["bytes"] > 0
        came = jobs.ingest(spark, place, tmp_path, "t", num_buckets=2)
        assert came == {"topic": str(tmp_path / "t"), "format": format, "rows": 40}
        assert same(read_topic(spark, tmp_path, "t"), everything)
        assert ids(tmp_path) == list(range(40))

    def test_json_export_keeps_what_json_can_hold(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        made = spark.createDataFrame(
            [(1, "a", [1.5], None), (2, None, [], {"k": True})],
            "id long, text string, list array<double>, inner struct<k:boolean>",
        )
        place = tmp_path / "lines"
        assert jobs.export(made, place, format="jsonl")["rows"] == 2
        lines = [json.loads(s) for f in place.glob("*.json") for s in f.read_text().splitlines()]
        assert {"id": 1, "text": "a", "list": [1.5], "inner": None} in lines
        assert jobs.ingest(spark, place, tmp_path / "t")["format"] == "jsonl"
        assert same(read_topic(spark, tmp_path / "t"), made)

    def test_json_ingest_uses_the_given_schema(self, spark: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text('{"id": 1, "at": "2020-01-01T00:00:00Z"}\n')
        jobs.ingest(spark, tmp_path / "in.jsonl", tmp_path / "t", schema="id int, at timestamp")
        (found,) = stored(tmp_path)
        assert found == {"id": 1, "at": dt.datetime(2020, 1, 1, tzinfo=UTC)}

    @pytest.mark.parametrize("format", ["parquet", "lance", "jsonl"])
    def test_export_divides_rows_into_partition_folders(
        self, spark: SparkSession, tmp_path: Path, format: str
    ) -> None:
        made = spark.createDataFrame(
            [(i, f"a/b={i % 3}" if i % 4 else None) for i in range(24)], "id int, kind string"
        )
        place = tmp_path / "files"
        assert jobs.export(made, place, format=format, partition_by="kind")["rows"] == 24
        folders = {path.name for path in place.iterdir() if path.is_dir()}
        assert len(folders) == 4
        assert "kind=__HIVE_DEFAULT_PARTITION__" in folders
        assert all(name.startswith("kind=") for name in folders)
        assert jobs.ingest(spark, place, tmp_path / "t")["rows"] == 24
        assert same(read_topic(spark, tmp_path / "t"), made)

    @pytest.mark.parametrize("format", ["parquet", "lance"])
    @pytest.mark.parametrize("by", [(), ("half",)])
    def test_export_mode_decides_about_existing_files(
        self, spark: SparkSession, tmp_path: Path, format: str, by: tuple[str, ...]
    ) -> None:
        place = tmp_path / "files"

        def made(low: int, high: int) -> DataFrame:
            return spark.range(low, high).selectExpr("id", "id < 5 as half")

        def there() -> list[int]:
            topic = tmp_path / str(len(list(tmp_path.iterdir())))
            jobs.ingest(spark, place, topic, num_buckets=1)
            return ids(tmp_path, topic.name)

        jobs.export(made(0, 8), place, format=format, partition_by=by)
        with pytest.raises(InvalidArgument, match="already exists"):
            jobs.export(made(0, 8), place, format=format, partition_by=by)
        jobs.export(made(8, 10), place, format=format, partition_by=by, mode="append")
        assert there() == list(range(10))
        jobs.export(made(7, 9), place, format=format, partition_by=by, mode="overwrite")
        assert there() == [7, 8]

    def test_export_and_ingest_of_no_rows_work(self, spark: SparkSession, tmp_path: Path) -> None:
        nothing = spark.range(0)
        for format in ("parquet", "lance"):
            place = tmp_path / format
            assert jobs.export(nothing, place, format=format)["rows"] == 0
            assert jobs.ingest(spark, place, tmp_path / f"t-{format}", format=format)["rows"] == 0
            assert stored(tmp_path, f"t-{format}") == []

    def test_lance_export_keeps_vectors(self, spark: SparkSession, tmp_path: Path) -> None:
        made = spark.createDataFrame(
            [(i, [i / 1, 1.0]) for i in range(9)], "id int, v array<float>"
        )
        jobs.export(made, tmp_path / "v.lance", vectors={"v": 2})
        assert lance.dataset(tmp_path / "v.lance").schema.field("v").type == pa.list_(
            pa.float32(), 2
        )
        jobs.ingest(spark, tmp_path / "v.lance", tmp_path / "t")
        with reader(tmp_path) as queue:
            assert [hit["id"] for hit in queue.search(vector=[5.2, 1.0], k=2)] == [5, 6]

    def test_lance_datasets_of_other_writers_are_ingested(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        table = pa.table(
            {
                "id": pa.array([1, 2], pa.uint16()),
                "text": pa.array(["a", None], pa.large_string()),
                "kind": pa.array(["x", "x"]).dictionary_encode(),
                "at": pa.array([0, 1], pa.timestamp("ms")),
            }
        )
        lance.write_dataset(table, tmp_path / "other.lance", max_rows_per_file=1)
        assert jobs.ingest(spark, tmp_path / "other.lance", tmp_path / "t")["rows"] == 2
        found = sorted(stored(tmp_path), key=lambda row: row["id"])
        assert [(r["id"], r["text"], r["kind"]) for r in found] == [(1, "a", "x"), (2, None, "x")]
        assert found[1]["at"].microsecond == 1000

    def test_repeated_ingest_with_a_write_id_stores_rows_once(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        pq.write_table(pa.table({"id": range(10)}), tmp_path / "in.parquet")
        for _ in range(2):
            jobs.ingest(spark, tmp_path / "in.parquet", tmp_path / "t", write_id="first-load")
        assert ids(tmp_path) == list(range(10))
        jobs.ingest(spark, tmp_path / "in.parquet", tmp_path / "t", mode="overwrite")
        assert ids(tmp_path) == list(range(10))

    def test_export_and_ingest_refuse_wrong_arguments_by_name(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        made = spark.range(3)
        with pytest.raises(InvalidArgument, match="format must be one of parquet, lance, jsonl"):
            jobs.export(made, tmp_path / "x", format="csv")
        with pytest.raises(InvalidArgument, match="mode must be one of"):
            jobs.export(made, tmp_path / "x", mode="ignore")
        with pytest.raises(InvalidArgument, match="partition_by names 'nope'"):
            jobs.export(made, tmp_path / "x", partition_by="nope")
        with pytest.raises(InvalidArgument, match="vectors are for the format lance"):
            jobs.export(made, tmp_path / "x", vectors={"id": 2})
        with pytest.raises(InvalidArgument, match="not an array of floats"):
            jobs.export(made, tmp_path / "x.lance", vectors={"id": 2})
        with pytest.raises(InvalidArgument, match="cannot tell the format"):
            jobs.ingest(spark, tmp_path, tmp_path / "t")
        with pytest.raises(InvalidArgument, match="no Lance dataset"):
            jobs.ingest(spark, tmp_path, tmp_path / "t", format="lance")
        with pytest.raises(InvalidArgument, match="mode must be append or overwrite"):
            jobs.ingest(spark, tmp_path, tmp_path / "t", mode="error")
        assert not (tmp_path / "x").exists()


class TestFormats:
    @pytest.mark.parametrize(
        ("name", "format"),
        [
            ("a.parquet", "parquet"),
            ("a.lance/", "lance"),
            ("a.jsonl.gz", "jsonl"),
            ("a.JSON", "jsonl"),
            ("a.ndjson", "jsonl"),
            ("a", None),
            ("a.gz", None),
        ],
    )
    def test_format_is_detected_by_name(self, name: str, format: str | None) -> None:
        assert named_format(None, name) == format

    def test_format_is_detected_by_content(self, tmp_path: Path) -> None:
        (tmp_path / "x=1").mkdir()
        (tmp_path / "x=1" / "part-0.snappy.parquet").touch()
        assert detect_format(None, tmp_path) == "parquet"
        assert detect_format("json", tmp_path) == "jsonl"


class TestProfile:
    def test_profile_describes_every_column(self, everything: DataFrame) -> None:
        found = {row["column"]: row.asDict() for row in jobs.profile(everything).collect()}
        made = [one(number) for number in range(40)]
        nulls = sum(row[1] is None for row in made)
        assert list(found) == everything.columns
        assert {row["rows"] for row in found.values()} == {40}
        assert {name: row["nulls"] for name, row in found.items()} == {
            name: 0 if name == "id" else nulls for name in everything.columns
        }
        assert found["id"]["type"] == "bigint"
        assert (found["id"]["min"], found["id"]["max"], found["id"]["mean"]) == ("0", "39", 19.5)
        assert abs(found["id"]["distinct"] - 40) <= 4
        assert found["flag"]["distinct"] == 2
        assert found["text"]["min_length"] == len("text 0\n")
        assert found["text"]["max_length"] == len("text 39\n")
        assert (found["tags"]["min_length"], found["tags"]["max_length"]) == (0, 2)
        assert found["vector"]["mean_length"] == 3.0
        assert found["raw"]["max_length"] == 2
        assert (found["real"]["nans"], found["text"]["nans"]) == (0, None)
        assert found["day"]["max"] == "2020-02-09"
        assert found["inner"]["min"] is None

    def test_profile_has_rows_for_each_bucket_and_for_all(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(50))
        by_bucket = content(tmp_path)
        found = jobs.profile(read_topic(spark, tmp_path / "t", includeMetadata=True)).collect()
        ids_ = {row["bucket"]: row for row in found if row["column"] == "id"}
        assert ids_[None]["rows"] == 50
        for bucket, part in by_bucket.items():
            assert ids_[bucket]["rows"] == len(part)
            assert ids_[bucket]["max"] == str(max(row["id"] for row in part))
        assert [row["bucket"] for row in found][:: len(found) // 3] == [None, 0, 1]
        offsets = {r["bucket"]: (r["min"], r["max"]) for r in found if r["column"] == "_offset"}
        assert offsets[1] == ("0", str(len(by_bucket[1]) - 1))

    def test_profile_counts_nans_and_nulls(self, spark: SparkSession) -> None:
        made = spark.createDataFrame([(float("nan"),), (1.0,), (None,)], "x double")
        (found,) = jobs.profile(made).collect()
        assert (found["rows"], found["nulls"], found["nans"]) == (3, 1, 1)

    def test_profile_truncates_long_texts(self, spark: SparkSession) -> None:
        (found,) = jobs.profile(spark.createDataFrame([("é" * 500,)], "x string")).collect()
        assert found["min"] == found["max"] == "é" * 64
        assert found["max_length"] == 500

    def test_profile_of_no_columns_is_empty(self, spark: SparkSession) -> None:
        whole = jobs.profile(spark.range(1))
        for made in (spark.range(1).drop("id"), spark.range(1).selectExpr("1 as _bucket")):
            found = jobs.profile(made)
            assert found.dtypes == whole.dtypes
            assert found.collect() == []

    def test_profile_has_the_mean_of_large_decimals(self, spark: SparkSession) -> None:
        made = spark.range(30).selectExpr("cast('99999999999999999999' as decimal(38,18)) as d")
        (found,) = jobs.profile(made).collect()
        assert found["mean"] == pytest.approx(1e20)

    def test_profile_takes_maps_and_names_with_dots(self, spark: SparkSession) -> None:
        made = spark.createDataFrame([({"a": 1}, 1)], "`a map` map<string,int>, `x.y` int")
        found = {row["column"]: row for row in jobs.profile(made).collect()}
        assert (found["a map"]["max_length"], found["a map"]["distinct"]) == (1, None)
        assert found["x.y"]["max"] == "1"


class TestSplit:
    SHARES: ClassVar = {"train": 0.7, "validation": 0.2, "test": 0.1}

    def part_of(self, key: Any, salt: str = "") -> str:
        """Return the part of a key by the documented rule."""
        digest = hashlib.md5(f"{salt}\x00{'' if key is None else key}".encode()).hexdigest()
        point = int(digest[:13], 16) / 16**13
        return "train" if point < 0.7 else "validation" if point < 0.9 else "test"

    @pytest.mark.parametrize("salt", ["", "another"])
    def test_split_follows_the_documented_rule(self, spark: SparkSession, salt: str) -> None:
        keys: list[Any] = [*map(str, range(500)), "schlüssel", "", None]
        made = spark.createDataFrame([(key,) for key in keys], "key string").repartition(3)
        parts = jobs.split(made, "key", self.SHARES, salt=salt)
        assert list(parts) == list(self.SHARES)
        found = {name: Counter(r["key"] for r in part.collect()) for name, part in parts.items()}
        assert found == {
            name: Counter(k for k in keys if self.part_of(k, salt) == name) for name in self.SHARES
        }
        assert 300 < sum(found["train"].values()) < 400

    def test_split_takes_several_keys_of_any_type(self, spark: SparkSession) -> None:
        made = spark.range(200).selectExpr("id", "id % 3 as b")
        parts = jobs.split(made, ["id", "b"], self.SHARES)
        for name, part in parts.items():
            for row in part.collect():
                assert self.part_of(f"{row['id']}\x00{row['b']}") == name

    def test_split_does_not_depend_on_the_time_zone(self, spark: SparkSession) -> None:
        moments = "timestamp_seconds(1704067200 + 3600 * id) as at"
        made = spark.range(60).selectExpr("id", moments).selectExpr("id", "at", "array(at) as all")
        found: dict[str, list[list[int]]] = {}
        zone = spark.conf.get("spark.sql.session.timeZone")
        try:
            for name in ("UTC", "America/New_York"):
                spark.conf.set("spark.sql.session.timeZone", name)
                found[name] = [
                    sorted(row["id"] for row in jobs.split(made, key)["train"].collect())
                    for key in ("at", "all")
                ]
        finally:
            spark.conf.set("spark.sql.session.timeZone", zone)
        assert found["UTC"] == found["America/New_York"]

    def test_split_does_not_depend_on_the_width_of_numbers(self, spark: SparkSession) -> None:
        made = spark.range(-50, 50).selectExpr("id", "cast(id as double) d", "cast(id as float) f")
        ints, *others = (jobs.assign_splits(made, key).collect() for key in ("id", "d", "f"))
        assert others == [ints, ints]
        odd = spark.createDataFrame([(float("nan"),), (1e300,), (0.5,), (-0.0,)], "x double")
        assert len(jobs.assign_splits(odd, "x").collect()) == 4

    def test_assigned_splits_equal_the_split(self, spark: SparkSession) -> None:
        made = spark.range(100)
        named = jobs.assign_splits(made, "id", self.SHARES)
        assert all(row["split"] == self.part_of(row["id"]) for row in named.collect())
        with pytest.raises(InvalidArgument, match="already have a column 'split'"):
            jobs.assign_splits(named, "id")

    @pytest.mark.parametrize(
        "shares",
        [{}, {"a": 0.5}, {"a": 1.5}, {"a": 1.0, "b": 0.0}, {"a": 0.5, "b": 0.6}, {"a": "1"}],
    )
    def test_split_refuses_shares_that_do_not_sum_to_one(
        self, spark: SparkSession, shares: dict[str, float]
    ) -> None:
        with pytest.raises(InvalidArgument, match="shares must"):
            jobs.split(spark.range(1), "id", shares)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"shares": {"a": 0.5}}, "shares must sum to 1"),
            ({"key": "nope"}, "key names 'nope'"),
            ({"key": []}, "key names no field"),
            ({"columns": ["text", "nope"]}, "columns names 'nope'"),
            ({"where": "nope > 1"}, "nope"),
        ],
    )
    def test_split_of_a_topic_creates_no_tag_if_refused(
        self, spark: SparkSession, tmp_path: Path, given: dict[str, Any], words: str
    ) -> None:
        put(tmp_path, rows(5))
        with pytest.raises(InvalidArgument, match=words):
            jobs.split_topic(spark, tmp_path / "t", tag="one", **{"key": "id", **given})
        with reader(tmp_path) as queue:
            assert queue.tags() == []

    def test_split_of_a_topic_stays_the_same_while_it_grows(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(100))

        def found(tag: str) -> dict[str, list[int]]:
            parts = jobs.split_topic(
                spark, tmp_path, "t", key="id", tag=tag, shares=self.SHARES, columns=["text"]
            )
            assert all(part.columns == ["text"] for part in parts.values())
            return {
                name: sorted(int(row["text"].split()[1]) for row in part.collect())
                for name, part in parts.items()
            }

        first = found("one")
        assert sorted(n for part in first.values() for n in part) == list(range(100))
        put(tmp_path, rows(50, 100))
        assert found("one") == first
        second = found("two")
        assert sorted(n for part in second.values() for n in part) == list(range(150))
        assert all(set(first[name]) <= set(second[name]) for name in first)

    def test_split_of_an_open_topic_tags_it_through_its_queue(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path) as queue:
            queue.put_batch(rows(40))
            parts = jobs.split_topic(spark, tmp_path / "t", key="id", tag="live", where="id < 30")
            assert sum(part.count() for part in parts.values()) == 30
            assert [tag["name"] for tag in queue.tags()] == ["live"]


class TestBuildIndex:
    def test_index_built_by_spark_is_used_by_the_queue(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(60))
        found = jobs.build_index(spark, tmp_path, "t", column="text")
        assert {k: found[k] for k in ("column", "kind", "rows", "behind")} == {
            "column": "text",
            "kind": "text",
            "rows": 60,
            "behind": 0,
        }
        assert sum(part["rows"] for part in found["buckets"].values()) == 60
        with reader(tmp_path) as queue:
            assert [(one["column"], one["kind"]) for one in queue.indexes()] == [("text", "text")]
            assert [hit["id"] for hit in queue.search(text="33")] == [33]
            assert queue.verify()["unchecked"] == []
        again = jobs.build_index(spark, tmp_path, "t", column="id", kind="bitmap")
        assert (again["family"], again["kind"]) == ("scalar", "bitmap")

    def test_wrong_index_is_refused_before_any_task(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(5))
        with pytest.raises(InvalidArgument, match="no field 'nope'"):
            jobs.build_index(spark, tmp_path, "t", column="nope")
        with pytest.raises(InvalidArgument, match="takes no vector index"):
            jobs.build_index(spark, tmp_path, "t", column="text", kind="vector")

    def test_index_of_an_open_topic_is_refused_with_its_owner(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(5))
        with writer(tmp_path) as queue:
            queue.put_batch(rows(5, 5))
            with pytest.raises(BucketLocked, match=r"create_index\(\) on its queue") as caught:
                jobs.build_index(spark, tmp_path, "t", column="id")
        assert caught.value.owner["pid"] == os.getpid()


class TestRunOnExecutors:
    def test_results_come_in_order_from_other_processes(self, spark: SparkSession) -> None:
        found = run_on_executors(spark, list("abcde"), lambda letter: [letter * 2, os.getpid()])
        assert [letters for letters, _ in found] == ["aa", "bb", "cc", "dd", "ee"]
        assert os.getpid() not in {process for _, process in found}
        assert run_on_executors(spark, [], str) == []

    def test_error_of_a_task_is_raised(self, spark: SparkSession) -> None:
        def fail(number: int) -> None:
            raise StorageError(f"number {number} is wrong")

        with pytest.raises(StorageError, match="number 3 is wrong") as caught:
            run_on_executors(spark, [3, 4], fail)
        assert type(caught.value) is StorageError


def test_importing_the_jobs_loads_no_spark() -> None:
    code = (
        "import sys; from persisting.spark import jobs; assert 'export' in jobs.__all__;"
        "print([m for m in ('pyspark', 'lance', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_spark_job_is_listed_and_says_what_it_does() -> None:
    import persisting.spark

    assert persisting.spark.jobs is jobs
    assert "jobs" in persisting.spark.__all__
    assert sorted(jobs.__all__) == jobs.__all__
    for name in jobs.__all__:
        found = getattr(jobs, name)
        assert found.__doc__
        assert getattr(jobs, name) is found
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = jobs.nothing_of_the_kind
