"""Batch reads: a DataFrame has the rows of ``read_queue``, or the part that the options select."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support.children import python
from support.spark.topics import (
    content,
    crashed_owner,
    load,
    put,
    put_in_flushes,
    records,
    refused,
    rows,
    stored,
    writer,
)

from persisting.errors import InvalidArgument, NoSuchTopic, OffsetOutOfRange, StorageError
from persisting.spark import read_topic
from persisting.spark.query_errors import SparkTrace
from persisting.spark.topic_scan import read_slice
from persisting.topic.scan import Slice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UTC = dt.timezone.utc
BUCKETS = 3
FLUSHES = 4
ROWS = 40


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a topic of three buckets, whose tables have four fragments each."""
    folder = tmp_path_factory.mktemp("home")
    with writer(folder, buckets=BUCKETS) as queue:
        for flush in range(FLUSHES):
            queue.put_batch(rows(ROWS // FLUSHES, flush * ROWS // FLUSHES))
            queue.flush()
    return folder


def by_bucket(df: DataFrame) -> dict[int, list[dict[str, Any]]]:
    """Return the records of a DataFrame with metadata, by bucket and in order of offsets."""
    found: dict[int, list[dict[str, Any]]] = {}
    for record in sorted(records(df), key=lambda r: (r["_bucket"], r["_offset"])):
        del record["_time"], record["_offset"]
        found.setdefault(record.pop("_bucket"), []).append(record)
    return found


def offsets(df: DataFrame) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for record in records(df.select("_bucket", "_offset")):
        found.setdefault(record["_bucket"], []).append(record["_offset"])
    return {bucket: sorted(some) for bucket, some in sorted(found.items())}


class TestTopic:
    def test_dataframe_has_the_records_that_read_queue_has(
        self, spark: SparkSession, home: Path
    ) -> None:
        assert by_bucket(load(spark, home, includeMetadata=True)) == content(home)

    def test_topic_is_given_by_its_folder_or_by_path_and_topic(
        self, spark: SparkSession, home: Path
    ) -> None:
        by_options = spark.read.format("persisting").option("topic", "t").load(str(home))
        by_words = read_topic(spark, home, "t")
        by_url = spark.read.format("persisting").load(f"file://{home}/t")
        assert by_options.count() == by_words.count() == by_url.count() == ROWS

    def test_topic_can_be_a_view_in_sql(self, spark: SparkSession, home: Path) -> None:
        spark.sql(
            f"CREATE TEMPORARY VIEW as_table USING persisting OPTIONS (path '{home}', topic 't')"
        )
        try:
            found = spark.sql("SELECT count(*) AS n, sum(id) AS s FROM as_table WHERE even")
            assert records(found) == [{"n": ROWS // 2, "s": sum(range(0, ROWS, 2))}]
        finally:
            spark.catalog.dropTempView("as_table")

    def test_topic_is_converted_to_a_given_schema(self, spark: SparkSession, home: Path) -> None:
        asked = spark.read.format("persisting").schema("score double, id string, not_there int")
        found = records(asked.load(str(home / "t")).orderBy("score").limit(1))
        assert found == [{"score": 0.0, "id": "0", "not_there": None}]

    @pytest.mark.parametrize("backend", ["lance", "persisting"])
    def test_topics_of_both_backends_can_be_read(
        self, spark: SparkSession, tmp_path: Path, backend: str
    ) -> None:
        put(tmp_path, rows(3), backend=backend)
        assert sorted(r.id for r in load(spark, tmp_path).collect()) == [0, 1, 2]

    def test_topic_without_records_has_no_columns(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [])
        found = load(spark, tmp_path)
        assert (found.columns, found.count()) == ([], 0)

    def test_records_removed_by_retention_are_not_read(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(4), buckets=1)
        with writer(tmp_path) as queue:
            queue.put({"id": 4})
            queue.flush()
            queue.retain(rows=1)
        found = load(spark, tmp_path, includeMetadata=True)
        assert [(r["id"], r["_offset"]) for r in records(found)] == [(4, 4)]

    def test_fields_of_all_buckets_are_read(self, spark: SparkSession, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=BUCKETS) as queue:
            for record in ({"id": 0}, {"id": 1, "x": 1}, {"id": 2, "y": {"a": 1}}):
                queue.put(record)
                queue.flush()
            queue.put({"id": 3, "x": 1.5, "y": {"b": None}, "z": None})
        found = sorted(records(load(spark, tmp_path)), key=lambda r: r["id"])
        assert found == sorted(stored(tmp_path), key=lambda r: r["id"])
        assert found[1] == {"id": 1, "x": 1.0, "y": None, "z": None}

    def test_schema_defaults_are_read_as_read_queue_reads_them(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, schema_defaults={"k": 7}) as queue:
            queue.put_batch([{"id": i} for i in range(6)])
            queue.flush()
            queue.put({"id": 0, "k": 1})
        assert by_bucket(load(spark, tmp_path, includeMetadata=True)) == content(tmp_path)

    def test_wide_vectors_are_read_in_small_batches(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """A batch of the usual 65,536 rows would take half a GiB; 64 MiB are fine for Spark."""
        wide = pa.array([[0.5] * 1024] * 4000, pa.list_(pa.float64(), 1024))
        put(tmp_path, pa.table({"id": range(4000), "v": wide}), buckets=1)
        part = Slice(str(tmp_path / "t"), 0, 0, 4000)
        target = pa.schema([("v", pa.list_(pa.field("element", pa.float64())))])
        sizes = [batch.nbytes for batch in read_slice(part, target, None, metadata=False)]
        assert sum(sizes) >= 4000 * 8192
        assert max(sizes) <= 20 * 2**20


class TestOwners:
    def test_rows_of_a_live_owner_are_read_once_flushed(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, enable_wal=True) as queue:
            queue.put_batch(rows(5))
            assert load(spark, tmp_path).count() == 0
            queue.flush()
            first = load(spark, tmp_path)
            assert first.count() == 5
            queue.put_batch(rows(5, 5))
            assert load(spark, tmp_path).count() == 5
            queue.flush()
            assert load(spark, tmp_path).count() == 10
        assert content(tmp_path) == by_bucket(load(spark, tmp_path, includeMetadata=True))

    def test_log_of_a_crashed_owner_is_recovered_before_the_read(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        crashed_owner(tmp_path)
        found = load(spark, tmp_path, includeMetadata=True)
        assert sorted(r["id"] for r in records(found)) == list(range(50))
        assert by_bucket(found) == content(tmp_path)

    def test_read_does_not_lock_the_topic(self, spark: SparkSession, tmp_path: Path) -> None:
        put(tmp_path, rows(5))
        found = load(spark, tmp_path)
        found.count()
        put(tmp_path, rows(5, 5))
        assert load(spark, tmp_path).count() == 10


class TestColumns:
    def test_columns_are_read_in_the_given_order(self, spark: SparkSession, home: Path) -> None:
        found = load(spark, home, columns="score, id")
        assert found.columns == ["score", "id"]
        assert sorted(r.id for r in found.collect()) == list(range(ROWS))

    def test_only_the_given_columns_are_read(self, spark: SparkSession, tmp_path: Path) -> None:
        folder = put(tmp_path, [{"id": i, "text": f"{i}" * 50} for i in range(50)], buckets=1)
        part = Slice(str(folder), 0, 0, 50)
        target = pa.schema([("id", pa.int64())])
        (batch,) = read_slice(part, target, None, metadata=False)
        assert batch.column_names == ["id"]
        assert batch.num_rows == 50

    def test_columns_may_have_any_name(self, spark: SparkSession, tmp_path: Path) -> None:
        names = ["a,b", " x ", "ü", "a'b", "SELECT", "_x", "[1]", '"q"']
        put(tmp_path, [{"id": 1, **{name: i for i, name in enumerate(names)}}])
        found = read_topic(spark, tmp_path, "t", columns=names)
        assert records(found) == [{name: i for i, name in enumerate(names)}]

    def test_unknown_column_is_refused_with_a_list_of_fields(
        self, spark: SparkSession, home: Path
    ) -> None:
        with refused("InvalidArgument", "option columns names 'ID'.*'id', 'text', 'score'"):
            load(spark, home, columns="id,ID")


class TestMetadata:
    def test_metadata_has_bucket_and_offset(self, spark: SparkSession, home: Path) -> None:
        found = load(spark, home, includeMetadata=True)
        assert found.columns[-3:] == ["_bucket", "_offset", "_time"]
        sizes = {bucket: len(some) for bucket, some in content(home).items()}
        assert offsets(found) == {bucket: list(range(size)) for bucket, size in sizes.items()}

    def test_metadata_has_the_time_of_each_put(self, spark: SparkSession, tmp_path: Path) -> None:
        before = dt.datetime.now(UTC)
        put(tmp_path, rows(3))
        between = dt.datetime.now(UTC)
        put(tmp_path, rows(3, 3))
        found = {r["id"]: r["_time"] for r in records(load(spark, tmp_path, includeMetadata=True))}
        assert all(before <= found[i] <= between for i in range(3))
        assert all(between <= found[i] <= dt.datetime.now(UTC) for i in range(3, 6))

    def test_metadata_works_with_columns_filter_and_partitions(
        self, spark: SparkSession, home: Path
    ) -> None:
        found = load(
            spark, home, includeMetadata=True, columns="text", rowsPerPartition=3, filter="id > 9"
        )
        assert found.columns == ["text", "_bucket", "_offset", "_time"]
        expected = {
            (bucket, offset, record["text"])
            for bucket, some in content(home).items()
            for offset, record in enumerate(some)
            if record["id"] > 9
        }
        assert {(r._bucket, r._offset, r.text) for r in found.collect()} == expected

    def test_metadata_is_refused_if_a_field_has_one_of_its_names(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [{"id": 1, "_offset": 5}])
        assert records(load(spark, tmp_path)) == [{"id": 1, "_offset": 5}]
        with refused("InvalidArgument", "field '_offset'.*includeMetadata"):
            load(spark, tmp_path, includeMetadata=True)


class TestPartitions:
    @pytest.mark.parametrize("step", [1, 3, 7, ROWS])
    def test_partitions_of_any_size_read_every_row_once(
        self, spark: SparkSession, home: Path, step: int
    ) -> None:
        found = load(spark, home, rowsPerPartition=step)
        assert found.rdd.getNumPartitions() == -(-ROWS // step)
        if step > 1:
            assert sorted(r.id for r in found.collect()) == list(range(ROWS))

    def test_partitions_keep_the_order_of_their_bucket(
        self, spark: SparkSession, home: Path
    ) -> None:
        parts = load(spark, home, rowsPerPartition=5).rdd.glom().collect()
        for some in content(home).values():
            expected = [r["id"] for r in some]
            got = [r.id for part in parts for r in part if r.id in set(expected)]
            assert got == expected


class TestPositions:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({"startingOffsets": "earliest"}, (0, None)),
            ({"startingOffsets": "latest"}, (None, None)),
            ({"endingOffsets": "earliest"}, (None, None)),
            ({"endingOffsets": "latest"}, (0, None)),
            ({"startingOffsets": '{"0": 3, "1": 3, "2": 3}'}, (3, None)),
            ({"endingOffsets": '{"0": 3, "1": 3, "2": 3}'}, (0, 3)),
        ],
    )
    def test_positions_bound_every_bucket(
        self, spark: SparkSession, home: Path, given: dict[str, str], expected: Any
    ) -> None:
        found = offsets(load(spark, home, includeMetadata=True, **given))
        start, end = expected
        sizes = {bucket: len(some) for bucket, some in content(home).items()}
        want = {b: list(range(n))[start:end] for b, n in sizes.items() if start is not None}
        assert found == want

    def test_positions_of_some_buckets_leave_other_buckets_whole(
        self, spark: SparkSession, home: Path
    ) -> None:
        given = {"startingOffsets": '{"1": 2}', "endingOffsets": '{"0": 1, "1": 999}'}
        found = offsets(load(spark, home, includeMetadata=True, **given))
        sizes = {bucket: len(some) for bucket, some in content(home).items()}
        assert found == {0: [0], 1: list(range(2, sizes[1])), 2: list(range(sizes[2]))}

    def test_start_position_after_the_end_position_reads_nothing(
        self, spark: SparkSession, home: Path
    ) -> None:
        given = {"startingOffsets": '{"0": 5}', "endingOffsets": '{"0": 2, "1": 0, "2": 0}'}
        assert load(spark, home, **given).count() == 0

    def test_positions_of_unknown_buckets_are_refused(
        self, spark: SparkSession, home: Path
    ) -> None:
        with refused("InvalidArgument", "startingOffsets names bucket 3.*0 to 2"):
            load(spark, home, startingOffsets='{"3": 0}').count()

    def test_positions_may_be_timestamps_of_arrival(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(6))
        between = dt.datetime.now(UTC)
        put(tmp_path, rows(6, 6))
        after = dt.datetime.now(UTC).isoformat()

        def found(**given: Any) -> list[int]:
            return sorted(r.id for r in load(spark, tmp_path, **given).collect())

        milliseconds = -(-between.timestamp() * 1000 // 1)
        assert found(startingTimestamp=between.isoformat()) == list(range(6, 12))
        assert found(endingTimestamp=between.isoformat()) == list(range(6))
        assert found(endingTimestamp=int(milliseconds)) == list(range(6))
        assert found(startingTimestamp="1970-01-01", endingTimestamp=after) == list(range(12))
        assert found(startingTimestamp=after) == []

    def test_positions_removed_by_retention_raise_or_move_forward(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, buckets=1) as queue:
            put_in_flushes(queue, 12, 4)
            queue.retain(rows=4)
        asked = {"startingOffsets": '{"0": 5}'}
        with refused("OffsetOutOfRange", "offset 5 of bucket 0.*8.*failOnDataLoss"):
            load(spark, tmp_path, **asked).count()
        assert load(spark, tmp_path, **asked, failOnDataLoss=False).count() == 4
        assert load(spark, tmp_path, startingOffsets='{"0": 0}').count() == 4
        left = load(spark, tmp_path, startingOffsets='{"0": 9}', includeMetadata=True)
        assert offsets(left) == {0: [9, 10, 11]}


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Make a topic with four states: empty, four rows (tag "one"), eight rows with another field
    (tag "two"), and ten rows in which integers have become floats."""
    folder = tmp_path_factory.mktemp("past")
    before = dt.datetime.now(UTC)
    put(folder, [{"id": i, "x": i} for i in range(4)], buckets=1)
    with writer(folder) as queue:
        queue.tag("one")
        first = queue.versions()[-1]["version"]
    after_one = dt.datetime.now(UTC)
    put(folder, [{"id": i, "x": i, "new": "n"} for i in range(4, 8)])
    with writer(folder) as queue:
        queue.tag("two")
    put(folder, [{"id": i, "x": 0.5, "new": "m"} for i in range(8, 10)])
    return {"folder": folder, "before": before, "after_one": after_one, "first": first}


class TestTimeTravel:
    def test_topic_is_read_at_a_tag(self, spark: SparkSession, past: dict[str, Any]) -> None:
        assert load(spark, past["folder"], tag="one").count() == 4
        assert load(spark, past["folder"], tag="two").count() == 8
        assert load(spark, past["folder"]).count() == 10

    def test_topic_is_read_at_a_version(self, spark: SparkSession, past: dict[str, Any]) -> None:
        assert load(spark, past["folder"], version=past["first"]).count() == 4

    def test_topic_is_read_at_a_timestamp(self, spark: SparkSession, past: dict[str, Any]) -> None:
        folder = past["folder"]
        assert load(spark, folder, timestamp=past["before"].isoformat()).count() == 0
        assert load(spark, folder, timestamp=past["after_one"].isoformat()).count() == 4
        assert load(spark, folder, timestamp=dt.datetime.now(UTC).isoformat()).count() == 10

    def test_read_at_a_tag_has_the_fields_and_types_of_that_time(
        self, spark: SparkSession, past: dict[str, Any]
    ) -> None:
        found = load(spark, past["folder"], tag="one")
        assert found.dtypes == [("id", "bigint"), ("x", "bigint")]
        assert records(found.orderBy("id").limit(2)) == [{"id": 0, "x": 0}, {"id": 1, "x": 1}]
        assert load(spark, past["folder"]).dtypes[1:] == [("x", "double"), ("new", "string")]

    def test_time_travel_works_with_all_other_options(
        self, spark: SparkSession, past: dict[str, Any]
    ) -> None:
        found = load(
            spark,
            past["folder"],
            tag="two",
            startingOffsets='{"0": 2}',
            endingOffsets='{"0": 7}',
            filter="id <> 5",
            columns="id",
            includeMetadata=True,
            rowsPerPartition=2,
        )
        assert offsets(found) == {0: [2, 3, 4, 6]}

    def test_timestamps_work_with_a_tag_after_retention(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(rows(10))
            queue.tag("ten")
            queue.flush()
            after = dt.datetime.now(UTC) + dt.timedelta(milliseconds=1)
            queue.put_batch(rows(3, 10))
            queue.flush()
            queue.retain(rows=1)

        def count(**given: str) -> int:
            return load(spark, tmp_path, tag="ten", **given).count()

        assert count(startingTimestamp="1970-01-01T00:00:00Z") == 10
        assert count(endingTimestamp="2099-01-01T00:00:00Z") == 10
        assert count(endingTimestamp=after.isoformat()) == 10
        assert count(startingTimestamp=after.isoformat()) == 0

    def test_read_at_a_tag_is_partitioned_by_the_size_of_that_version(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(rows(300))
            queue.tag("many")
            queue.tag("many-too")
            queue.restore(0)
        found = load(spark, tmp_path, tag="many")
        assert (found.count(), found.rdd.getNumPartitions()) == (300, 1)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"tag": "three"}, "'three'.*'one', 'two'"),
            ({"version": 999}, "version 999"),
        ],
    )
    def test_unknown_tag_or_version_is_refused(
        self, spark: SparkSession, past: dict[str, Any], given: dict[str, Any], words: str
    ) -> None:
        with refused("InvalidArgument", words):
            load(spark, past["folder"], **given).count()

    def test_version_number_needs_a_topic_of_one_bucket(
        self, spark: SparkSession, home: Path
    ) -> None:
        with refused("InvalidArgument", "version=1.*3 buckets.*tag or timestamp"):
            load(spark, home, version=1).count()

    def test_tag_stays_readable_after_retention_restore_and_cleaning(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, keep_versions=0.001) as queue:
            queue.put_batch(rows(10))
            queue.tag("kept")
            expected = content(tmp_path)
            for first in range(10, 40, 10):
                queue.put_batch(rows(10, first))
                queue.flush()
            queue.compact()
            queue.retain(rows=1)
            queue.restore("kept")
            queue.put_batch([{"id": 99, "other": b"x"}])
        found = load(spark, tmp_path, tag="kept", includeMetadata=True)
        assert by_bucket(found) == expected


class TestOldDataFrame:
    def test_old_dataframe_works_after_compaction_and_removal_of_versions(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, keep_versions=0.001) as queue:
            put_in_flushes(queue, 40, 10)
            kept = load(spark, tmp_path)
            assert kept.count() == 40
            queue.compact()
            queue.put({"id": 40})
            queue.flush()
            queue.compact()
            assert Counter(r.id for r in kept.collect()).most_common(1)[0][1] == 1
            assert {r.id for r in kept.collect()} >= set(range(40))

    def test_old_read_of_rows_removed_by_retention_raises(self, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=1) as queue:
            put_in_flushes(queue, 8, 4)
            part = Slice(str(tmp_path / "t"), 0, 2, 8)
            queue.retain(rows=4)
        with pytest.raises(OffsetOutOfRange, match=r"2 to 4 of bucket 0.*retention"):
            list(read_slice(part, pa.schema([("id", pa.int64())]), None, metadata=False))

    def test_old_read_of_rows_removed_by_a_restore_raises(self, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(rows(4))
            queue.tag("four")
            queue.put_batch(rows(4, 4))
            queue.flush()
            part = Slice(str(tmp_path / "t"), 0, 0, 8, epoch=0)
            queue.restore("four")
        with pytest.raises(StorageError, match=r"bucket 0.*restored.*load it again"):
            list(read_slice(part, pa.schema([("id", pa.int64())]), None, metadata=False))


class TestRefusedReads:
    def test_folder_without_a_topic_is_refused(self, spark: SparkSession, tmp_path: Path) -> None:
        with refused("NoSuchTopic", f"there is no topic 'nothing' in {tmp_path}"):
            load(spark, tmp_path, "nothing")

    def test_read_topic_raises_our_own_error_in_one_line(
        self, spark: SparkSession, home: Path
    ) -> None:
        for error, words, topic, given in (
            (NoSuchTopic, "there is no topic 'nothing' in .*there are: 't'", "nothing", {}),
            (InvalidArgument, "option columns names 'nope'", "t", {"columns": ["nope"]}),
            (InvalidArgument, "unknown option 'colums'; did you mean columns", "t", {"colums": 1}),
        ):
            with pytest.raises(error, match=words) as raised:
                read_topic(spark, home, topic, **given)
            assert "\n" not in str(raised.value)
            assert isinstance(raised.value.__cause__, SparkTrace)
            assert "Traceback" in raised.value.__cause__.trace

    def test_folder_of_several_topics_is_refused(self, spark: SparkSession, home: Path) -> None:
        with refused("NoSuchTopic", "it is a folder of topics. Name one of them: t"):
            spark.read.format("persisting").load(str(home))

    def test_topic_of_a_custom_backend_is_refused(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        (tmp_path / "t").mkdir()
        (tmp_path / "t" / "topic.json").write_text(
            '{"topic": "t", "num_buckets": 1, "bucket_column": "id", "backend": "mine"}'
        )
        with refused("InvalidArgument", "'mine'.*'lance' and 'persisting'"):
            load(spark, tmp_path)

    def test_wrong_option_is_refused_by_load(self, spark: SparkSession, home: Path) -> None:
        with refused("InvalidArgument", "unknown option 'colums'; did you mean columns"):
            load(spark, home, colums="id")
        with refused("InvalidArgument", "includeMetadata='maybe' must be true or false"):
            load(spark, home, includeMetadata="maybe")
        with refused("InvalidArgument", "startingOffsets='x'.*earliest, latest"):
            load(spark, home, startingOffsets="x")


class TestGivenSchema:
    @pytest.mark.parametrize(
        ("schema", "named"), [("ID long", "'ID'"), ("id long, _offset long", "'_offset'")]
    )
    def test_given_schema_may_not_misspell_a_field(
        self, spark: SparkSession, home: Path, schema: str, named: str
    ) -> None:
        reader = spark.read.format("persisting").schema(schema)
        with refused("InvalidArgument", f"the schema names {named}.*'id'"):
            reader.load(str(home / "t")).collect()

    def test_given_schema_may_not_contradict_the_values(
        self, spark: SparkSession, home: Path
    ) -> None:
        reader = spark.read.format("persisting").schema("id struct<a: int>")
        with refused("StorageError", "field 'id' is int64.*you gave the schema"):
            reader.load(str(home / "t")).collect()


class TestRegistration:
    def test_plain_spark_finds_the_format_without_registration(self, home: Path) -> None:
        """A Spark session that was not created by persisting."""
        with python(PLAIN, home) as child:
            out, err = child.communicate(timeout=280)
        assert out.split() == [str(ROWS), str(ROWS // 2)], err

    def test_registering_the_source_twice_does_no_harm(
        self, spark: SparkSession, home: Path
    ) -> None:
        from persisting.spark.source import PersistingSource

        spark.dataSource.register(PersistingSource)
        assert load(spark, home).count() == ROWS


PLAIN = """
import os, sys
from persisting.spark.java import java_home

os.environ["JAVA_HOME"] = str(java_home())
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"

from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    .getOrCreate()
)
print(spark.read.format("persisting").load(sys.argv[1] + "/t").count())
spark.sql(f"CREATE TEMPORARY VIEW t USING persisting OPTIONS (path '{sys.argv[1]}/t')")
print(spark.sql("SELECT id FROM t WHERE even").count())
spark.stop()
"""
