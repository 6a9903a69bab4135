"""Batch writes: rows are stored once, in order, in the buckets that a queue would use."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support.handover import files_of_handovers
from support.spark.gates import BackgroundWork, Gate
from support.spark.topics import (
    content,
    crashed_owner,
    ids,
    is_sound,
    load,
    put,
    reader,
    records,
    refused,
    rows,
    save,
    stored,
    unreferenced,
    writer,
)
from support.spark.writes import DirectStore, SparkStore, Store
from support.waiting import until_true

from persisting.bucket.handover_notes import LEFT_SECONDS
from persisting.bucket.producer_sequences import ANONYMOUS, WRITERS, ProducerSequences
from persisting.lock import BucketLock
from persisting.spark.write_task import _FRAGMENT_ROWS
from persisting.topic.routing import bucket_of
from persisting.topic.synchronous import SyncQueue
from persisting.topic.topic_files import TopicFolder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = pa.schema(
    [("id", pa.int64()), ("text", pa.string()), ("score", pa.float64()), ("even", pa.bool_())]
)


@pytest.fixture(params=["direct", pytest.param("spark", marks=pytest.mark.nightly)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Write to topics of the test's folder: with Spark's calls; nightly also with Spark itself."""
    if request.param == "direct":
        return DirectStore(tmp_path)
    return SparkStore(request.getfixturevalue("spark"), tmp_path)


def table(count: int, first: int = 0) -> pa.Table:
    """Return the records of :func:`support.spark.topics.rows` as a table."""
    return pa.Table.from_pylist(rows(count, first), SCHEMA)


def one(**columns: Any) -> pa.Table:
    """Return a table with one row; a column is a value, or a value and its type."""
    arrays = {
        name: pa.array([value[0]], value[1]) if isinstance(value, tuple) else pa.array([value])
        for name, value in columns.items()
    }
    return pa.table(arrays)


def frame(spark: SparkSession, count: int, first: int = 0, parts: int = 1) -> DataFrame:
    """Return the records of :func:`support.spark.topics.rows` as a DataFrame."""
    made = spark.range(first, first + count, numPartitions=parts)
    return made.selectExpr("id", "concat('row ', id) text", "id / 4 score", "id % 2 = 0 even")


def in_bucket(bucket: int, buckets: int, first: int = 100) -> int:
    """Return an id that is routed to a bucket."""
    return next(i for i in range(first, first + 999) if bucket_of(i, buckets) == bucket)


class TestNewTopic:
    def test_new_topic_has_four_buckets_by_id(self, spark: SparkSession, tmp_path: Path) -> None:
        save(frame(spark, 20, parts=3), tmp_path)
        with writer(tmp_path) as queue:
            stats = queue.stats()
        assert {one["backend"] for one in stats["buckets"]} == {"PersistingBackend"}
        found = content(tmp_path)
        assert len(found) == 4
        assert all(bucket_of(r["id"], 4) == b for b, some in found.items() for r in some)
        assert sorted(stored(tmp_path), key=lambda r: r["id"]) == rows(20)
        assert is_sound(tmp_path)

    def test_new_topic_is_created_with_the_given_options(
        self, store: Store, tmp_path: Path
    ) -> None:
        given = {"numBuckets": 3, "bucketColumn": "text", "compression": "zstd"}
        store.save(table(20), **given)
        found = content(tmp_path)
        assert list(found) == [0, 1, 2]
        assert all(bucket_of(r["text"], 3) == b for b, some in found.items() for r in some)
        with writer(tmp_path) as queue:
            assert queue.stats()["buckets"][0]["compression"] == "zstd"
        store.save(table(20, 20), **given)
        assert ids(tmp_path) == list(range(40))

    def test_new_topic_without_rows_has_the_fields(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        save(frame(spark, 0), tmp_path)
        assert load(spark, tmp_path).columns == ["id", "text", "score", "even"]
        put(tmp_path, [{"id": 1, "score": 0.5}])
        assert stored(tmp_path) == [{"id": 1, "text": None, "score": 0.5, "even": None}]

    def test_queue_can_write_to_buckets_that_spark_left_empty(
        self, store: Store, tmp_path: Path
    ) -> None:
        store.save(table(1))
        put(tmp_path, [{"id": i, "score": 1} for i in range(1, 9)])
        put(tmp_path, [{"id": i, "even": None, "more": 1.5} for i in range(9, 20)])
        assert ids(tmp_path) == list(range(20))

    @pytest.mark.parametrize(
        ("made", "given", "error", "words"),
        [
            (one(x=1), {}, "InvalidArgument", "no column 'id'.*bucketColumn"),
            (one(**{"id": 1, "a.b": 2}), {}, "SchemaError", "'a.b'.*rename"),
            (one(**{"id": 1, "_persisting_x": 2}), {}, "SchemaError", "reserved"),
            (
                one(id=1, m=([("a", 1)], pa.map_(pa.string(), pa.int64()))),
                {},
                "SchemaError",
                "'m'.*map",
            ),
            (one(id=1), {"compression": "zip"}, "InvalidArgument", "compression.*'zstd'"),
            (one(id=1), {"vectors": "v:3"}, "InvalidArgument", "vectors names 'v'"),
            (one(id=1, v=2), {"vectors": "v:3"}, "InvalidArgument", "'v'.*array of floats"),
            (one(id=1, v=[1]), {"vectors": "v:1"}, "InvalidArgument", "'v'.*array of floats"),
            (one(id=1), {"numBuckets": 70000}, "InvalidArgument", "65536"),
            (one(id=1), {"writeID": ""}, "InvalidArgument", "writeI[dD] is empty"),
            (one(id=1), {"mode": "append", "startingOffsets": "x"}, "InvalidArgument", "unknown"),
        ],
        ids=lambda value: "" if isinstance(value, pa.Table) else str(value),
    )
    def test_refused_write_creates_no_topic(
        self,
        store: Store,
        tmp_path: Path,
        made: pa.Table,
        given: dict[str, Any],
        error: str,
        words: str,
    ) -> None:
        with refused(error, words):
            store.save(made, **given)
        assert not (tmp_path / "t").exists()

    def test_two_columns_of_one_name_are_refused(self, spark: SparkSession, tmp_path: Path) -> None:
        with refused("SchemaError", "two columns of one name"):
            save(spark.sql("SELECT 1 AS id, 2 AS a, 3 AS a"), tmp_path)
        assert not (tmp_path / "t").exists()

    def test_unsupported_save_modes_are_refused(self, spark: SparkSession, tmp_path: Path) -> None:
        from pyspark.errors import AnalysisException

        for mode in ("error", "ignore"):
            with pytest.raises(AnalysisException, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
                save(frame(spark, 1), tmp_path, mode=mode)


IDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "long": (pa.int64(), [0, 1, -1, 2**63 - 1, -(2**63), None, 12, 1200]),
    "text": (pa.string(), ["", "a", "ä漢🎉", " ", "1", "1.0", None, "x" * 300]),
    "int": (pa.int32(), [0, -5, 7, None, 2**31 - 1]),
    "flag": (pa.bool_(), [True, False, None]),
    "float": (pa.float64(), [1.5, -0.0, 0.0, 1e16, 1e-7, 3.0, float("inf"), float("nan"), None]),
    "day": (pa.date32(), [dt.date(2024, 1, day) for day in range(1, 20)]),
    "naive": (pa.timestamp("us"), [dt.datetime(2024, 1, 1, h, 0, 0, h % 2) for h in range(20)]),
}


class TestRouting:
    @pytest.mark.parametrize("kind", IDS)
    def test_rows_are_routed_as_a_queue_routes_them(
        self, store: Store, tmp_path: Path, kind: str
    ) -> None:
        dtype, values = IDS[kind]
        put(tmp_path, [{"id": v, "n": n} for n, v in enumerate(values)], "queue", buckets=7)
        numbered = pa.table({"id": pa.array(values, dtype), "n": range(len(values))})
        store.save(numbered, "spark", numBuckets=7)
        by_queue, by_spark = (
            {b: [r["n"] for r in some] for b, some in content(tmp_path, topic).items()}
            for topic in ("queue", "spark")
        )
        assert by_spark == by_queue

    def test_rows_are_routed_by_their_own_type_after_widening(
        self, store: Store, tmp_path: Path
    ) -> None:
        put(tmp_path, [{"id": 1.5}], buckets=5)
        store.save(pa.table({"id": range(100, 120)}))
        put(tmp_path, [{"id": i} for i in range(100, 120)])
        for some in content(tmp_path).values():
            numbers = [r["id"] for r in some if r["id"] >= 100]
            assert sorted(numbers) == sorted([*set(numbers)] * 2)


class TestOrder:
    def test_rows_of_a_bucket_keep_the_order_of_partitions(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        save(frame(spark, 3000, parts=6), tmp_path, numBuckets=2)
        save(frame(spark, 1000, 3000, parts=3), tmp_path)
        for some in content(tmp_path).values():
            numbers = [r["id"] for r in some]
            assert numbers == sorted(numbers)
        assert ids(tmp_path) == list(range(4000))

    def test_empty_partitions_do_not_change_the_order(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        df = spark.range(0, 100, numPartitions=10).filter("id BETWEEN 30 AND 34 OR id = 99")
        save(df, tmp_path, numBuckets=1)
        assert [r["id"] for r in stored(tmp_path)] == [30, 31, 32, 33, 34, 99]

    def test_times_of_arrival_never_decrease(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, rows(5), buckets=1)
        store.save(table(10, 5), parts=3)
        put(tmp_path, rows(5, 15))
        view = TopicFolder.open(tmp_path / "t").view(0)
        times = [view.arrival(offset) for offset in range(20)]
        assert [r["id"] for r in stored(tmp_path)] == list(range(20))
        assert times == sorted(times)
        assert times[4] < times[5] == times[14] < times[15]


class TestAppending:
    def test_append_is_ordered_between_puts_of_a_queue(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, rows(10), buckets=2, enable_wal=True)
        store.save(table(10, 10), parts=2)
        put(tmp_path, rows(10, 20))
        assert ids(tmp_path) == list(range(30))
        for some in content(tmp_path).values():
            assert [r["id"] for r in some] == sorted(r["id"] for r in some)
        assert is_sound(tmp_path)

    def test_append_of_no_rows_changes_nothing(self, spark: SparkSession, tmp_path: Path) -> None:
        put(tmp_path, rows(10))
        save(frame(spark, 0), tmp_path)
        save(frame(spark, 10, parts=3).filter("id < 0"), tmp_path)
        assert ids(tmp_path) == list(range(10))

    def test_append_recovers_the_log_of_a_crashed_owner_first(
        self, store: Store, tmp_path: Path
    ) -> None:
        crashed_owner(tmp_path)
        store.save(pa.table({"id": range(50, 60)}))
        for some in content(tmp_path).values():
            assert [r["id"] for r in some] == sorted(r["id"] for r in some)
        assert ids(tmp_path) == list(range(60))

    def test_append_with_other_bucket_options_is_refused(
        self, store: Store, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(3))
        with refused("InvalidArgument", "num_buckets=2, not 3"):
            store.save(table(3), numBuckets=3)
        with refused("InvalidArgument", "bucket_column='id', not 'text'"):
            store.save(table(3), bucketColumn="text")
        assert len(stored(tmp_path)) == 3

    def test_append_to_a_lance_topic_needs_exactly_its_fields(
        self, store: Store, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(3), backend="lance")
        store.save(table(3, 3))
        with refused("SchemaError", "'more' is not in the schema"):
            store.save(table(3, 6).append_column("more", pa.array([1, 2, 3])))
        with refused("SchemaError", "'text' is missing"):
            store.save(table(3, 6).drop_columns(["text"]))
        put(tmp_path, rows(3, 6))
        assert ids(tmp_path) == list(range(9))

    def test_append_may_read_the_same_topic(self, spark: SparkSession, tmp_path: Path) -> None:
        put(tmp_path, rows(10))
        save(load(spark, tmp_path).selectExpr("id + 10 AS id", "text"), tmp_path)
        assert ids(tmp_path) == list(range(20))

    def test_append_without_the_bucket_column_is_refused_and_changes_nothing(
        self, store: Store, tmp_path: Path
    ) -> None:
        for buckets in (1, 2):
            topic = f"t{buckets}"
            store.save(table(2), topic, numBuckets=buckets)
            before = TopicFolder.open(tmp_path / topic).schema()
            with refused("InvalidArgument", "no column 'id'"):
                store.save(pa.table({"ID": [1], "text": ["x"]}), topic)
            assert TopicFolder.open(tmp_path / topic).schema() == before
            assert ids(tmp_path, topic) == [0, 1]

    def test_number_that_its_field_cannot_hold_is_refused_by_name(
        self, store: Store, tmp_path: Path
    ) -> None:
        store.save(pa.table({"id": [1], "x": [0.5]}), numBuckets=1)
        with refused("SchemaError", "field 'x' is float.*9007199254740993"):
            store.save(pa.table({"id": [2], "x": [2**53 + 1]}))
        assert ids(tmp_path) == [1]

    def test_vectors_of_another_length_are_refused(self, store: Store, tmp_path: Path) -> None:
        store.save(pa.table({"id": [1], "v": [[0.5, 1.5]]}), numBuckets=1, vectors="v:2")
        with refused("InvalidArgument", "v:3.*vectors of 2"):
            store.save(pa.table({"id": [2], "v": [[0.5, 1.5, 2.5]]}), vectors="v:3")
        store.save(pa.table({"id": [3], "v": [[0.5, 1.5]]}), vectors="v:2")
        assert ids(tmp_path) == [1, 3]

    def test_variant_types_are_refused(self, spark: SparkSession, tmp_path: Path) -> None:
        for value in ("parse_json('1')", "array(struct(parse_json('1')))"):
            with refused("InvalidArgument", "column 'v' holds the type variant.*to_json"):
                save(spark.sql(f"select 1L id, {value} v"), tmp_path)
        save(spark.sql("select 1L id, struct(1 variant) v"), tmp_path)
        assert stored(tmp_path) == [{"id": 1, "v": {"variant": 1}}]

    def test_append_of_only_void_columns_is_refused(self, store: Store, tmp_path: Path) -> None:
        with refused("InvalidArgument", r"\(id, x\) are void.*CAST"):
            store.save(pa.table({"id": pa.nulls(3), "x": pa.nulls(3)}))
        store.save(table(1), numBuckets=1)
        store.save(pa.table({"id": pa.nulls(3)}))
        assert len(stored(tmp_path)) == 4


class TestEvolution:
    def test_new_columns_become_new_fields(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, rows(2), buckets=1)
        store.save(one(id=2, new="x", s={"a": 1}))
        put(tmp_path, [{"id": 3, "s": {"a": 5, "b": "z"}}])
        found = stored(tmp_path)
        assert list(found[0]) == ["id", "text", "score", "even", "new", "s"]
        assert [r["new"] for r in found] == [None, None, "x", None]
        assert [r["s"] for r in found[2:]] == [{"a": 1, "b": None}, {"a": 5, "b": "z"}]

    def test_whole_numbers_become_floats(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, [{"id": 1, "x": 3}], buckets=1)
        store.save(one(id=2, x=0.5))
        store.save(one(id=3, x=7))
        assert [r["x"] for r in stored(tmp_path)] == [3.0, 0.5, 7.0]

    def test_narrow_numbers_become_wide(self, store: Store, tmp_path: Path) -> None:
        store.save(one(id=(1, pa.int32()), x=(5, pa.int8()), y=(1.5, pa.float32())), numBuckets=1)
        store.save(one(id=2, x=(300, pa.int16()), y=0.1))
        put(tmp_path, [{"id": 2**40, "x": 2**40, "y": 0.2}])
        assert [(r["id"], r["x"]) for r in stored(tmp_path)] == [(1, 5), (2, 300), (2**40, 2**40)]
        assert [r["y"] for r in stored(tmp_path)] == [1.5, 0.1, 0.2]

    @pytest.mark.parametrize(
        ("column", "words"),
        [
            ({"text": 5}, "'text' is str, got int"),
            ({"score": "a"}, "'score' is float, got str"),
            ({"even": 1}, "'even' is bool, got int"),
            ({"text": [1]}, "'text' is str, got list"),
        ],
    )
    def test_conflicting_types_are_refused_and_change_nothing(
        self, store: Store, tmp_path: Path, column: dict[str, Any], words: str
    ) -> None:
        put(tmp_path, rows(2))
        with refused("SchemaError", words):
            store.save(one(id=9, new=1, **column))
        assert sorted(stored(tmp_path), key=lambda r: r["id"]) == rows(2)
        assert TopicFolder.open(tmp_path / "t").schema().names == ["id", "text", "score", "even"]

    def test_whole_numbers_that_no_float_holds_stay_whole(
        self, store: Store, tmp_path: Path
    ) -> None:
        put(tmp_path, [{"id": 1, "x": 2**60}])
        with refused("SchemaError", r"'x' cannot change from int to float.*2\*\*53"):
            store.save(one(id=2, x=0.5))
        store.save(one(id=2, y=2**60 + 1))
        with pytest.raises(ValueError, match="'y' cannot change from int to float"):
            put(tmp_path, [{"id": 3, "y": 0.5}])

    def test_missing_columns_get_their_defaults(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, [{"id": 1}], buckets=1, schema_defaults={"k": 7})
        put(tmp_path, [{"id": 2, "k": 1}])
        store.save(pa.table({"id": [3, 4]}))
        put(tmp_path, [{"id": 5}])
        assert [r["k"] for r in stored(tmp_path)] == [7, 1, 7, 7, 7]


class TestVectors:
    def test_arrays_become_vectors_where_the_topic_has_them(
        self, store: Store, tmp_path: Path
    ) -> None:
        put(tmp_path, [{"id": 1, "v": [1.0, 0.0]}], buckets=2)
        floats, singles = pa.list_(pa.float64()), pa.list_(pa.float32())
        store.save(pa.table({"id": [2, 3], "v": pa.array([[0.0, 1.0], None], floats)}))
        store.save(one(id=4, v=(None, floats)))
        store.save(one(id=5, v=([2.0, 2.0], singles)))
        with writer(tmp_path) as queue:
            found = queue.search(vector=[0.0, 1.1], k=2)
        assert [r["id"] for r in found] == [2, 1]
        assert ids(tmp_path) == [1, 2, 3, 4, 5]

    def test_arrays_become_vectors_by_option(self, spark: SparkSession, tmp_path: Path) -> None:
        save(spark.sql("SELECT 1 AS id, array(1F, 2F, 3F) AS v"), tmp_path, vectors="v:3")
        put(tmp_path, [{"id": 2, "v": [0.0, 0.0, 0.0]}])
        with writer(tmp_path) as queue:
            assert [r["id"] for r in queue.search(vector=[1.0, 2.0, 2.5], k=1)] == [1]

    @pytest.mark.parametrize("array", [[1.0], [1.0, 2.0, 3.0], [1.0, None], []])
    def test_arrays_that_do_not_fit_the_vectors_are_refused_by_name(
        self, store: Store, tmp_path: Path, array: list[Any]
    ) -> None:
        put(tmp_path, [{"id": 1, "v": [1.0, 0.0]}])
        with refused("SchemaError", "'v'.*2"):
            store.save(one(id=2, v=(array, pa.list_(pa.float64()))))
        assert ids(tmp_path) == [1]
        assert unreferenced(tmp_path) == []


class TestOverwriting:
    def test_overwrite_replaces_the_rows_and_keeps_the_topic(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(10), buckets=2)
        save(frame(spark, 5, 100), tmp_path, mode="overwrite")
        assert ids(tmp_path) == list(range(100, 105))
        found = records(load(spark, tmp_path, includeMetadata=True).orderBy("_bucket", "_offset"))
        for bucket, some in content(tmp_path).items():
            mine = [(r["_offset"], r["id"]) for r in found if r["_bucket"] == bucket]
            assert mine == list(enumerate(r["id"] for r in some))
        put(tmp_path, rows(1, 200))
        assert ids(tmp_path)[-1] == 200
        assert is_sound(tmp_path)

    def test_overwrite_creates_a_new_topic(self, store: Store, tmp_path: Path) -> None:
        store.save(table(3), mode="overwrite")
        assert ids(tmp_path) == [0, 1, 2]
        store.save(table(2))
        assert ids(tmp_path) == [0, 0, 1, 1, 2]
        assert is_sound(tmp_path)

    def test_overwrite_with_no_rows_empties_the_topic(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, rows(10))
        store.save(table(0), mode="overwrite")
        assert stored(tmp_path) == []
        put(tmp_path, rows(3))
        assert ids(tmp_path) == [0, 1, 2]

    def test_topic_can_be_overwritten_with_a_part_of_itself(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(10))
        save(load(spark, tmp_path).filter("id > 6"), tmp_path, mode="overwrite")
        assert ids(tmp_path) == [7, 8, 9]

    def test_overwrite_with_a_repeated_write_id_happens_once(
        self, store: Store, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(10))
        store.save(table(3), mode="overwrite", writeId="o")
        put(tmp_path, rows(3, 3))
        store.save(table(3), mode="overwrite", writeId="o")
        assert ids(tmp_path) == list(range(6))

    def test_groups_read_from_the_start_after_an_overwrite(
        self, store: Store, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(10))
        with reader(tmp_path, group="g") as group:
            assert len(group.get(None)) == 10
            group.commit()
        store.save(table(4, 100), mode="overwrite")
        with reader(tmp_path, group="g") as group:
            assert sorted(r["id"] for r in group.get(None)) == list(range(100, 104))

    def test_overwrite_can_be_undone_by_restoring_a_tag(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, rows(10))
        with writer(tmp_path) as queue:
            queue.tag("before")
        store.save(table(3, 100), mode="overwrite")
        with reader(tmp_path) as queue:
            assert len(queue.get_arrow(version="before")) == 10
        with writer(tmp_path) as queue:
            queue.restore("before")
        assert ids(tmp_path) == list(range(10))

    def test_repeated_overwrite_keeps_rows_that_others_put_since(
        self, store: Store, tmp_path: Path
    ) -> None:
        for _ in range(2):
            store.save(table(1), mode="overwrite", writeId="o", numBuckets=4)
            if len(ids(tmp_path)) == 1:
                store.save(table(29, 1))
        assert ids(tmp_path) == list(range(30))
        assert is_sound(tmp_path)


@contextmanager
def owner_without_ears(bucket: Path) -> Iterator[None]:
    """Own a bucket as a process that hangs does: it holds the lock, and handles no notes."""
    lock = BucketLock(bucket, bucket=1)
    try:
        yield
    finally:
        lock.release(clean=False)


def alone(folder: Path) -> SyncQueue:
    """Return a queue that opens no bucket but those that it puts to."""
    return writer(folder, local_socket=False)


class TestLiveOwner:
    def test_write_to_an_open_topic_adds_the_rows_and_the_queue_continues(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path) as queue:
            queue.put_batch(rows(10))
            save(spark.sql("SELECT 10 AS id, 'a' AS new"), tmp_path)
            queue.put({"id": 11, "new": "b"})
        assert ids(tmp_path) == list(range(12))
        assert {r["id"]: r["new"] for r in stored(tmp_path) if r["id"] > 9} == {10: "a", 11: "b"}

    def test_write_works_if_one_bucket_has_an_owner(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, rows(10), buckets=2)
        with alone(tmp_path) as queue:
            queue.put({"id": in_bucket(1, 2)})
            store.save(table(10, 10))
        assert [i for i in ids(tmp_path) if i < 100] == list(range(20))

    def test_owner_that_comes_during_a_write_gets_the_rows(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(10), buckets=2)
        gate = Gate(tmp_path / "gate")
        held = gate.hold(frame(spark, 20, 10))
        with (
            gate.holding(spark, lambda: save(held, tmp_path, writeId="w")) as writing,
            alone(tmp_path) as queue,
        ):
            queue.put({"id": in_bucket(1, 2)})
            gate.let_go()
            writing.join()
        assert [i for i in ids(tmp_path) if i < 100] == list(range(30))

    def test_write_beside_an_owner_that_does_not_answer_stores_nothing(
        self, store: Store, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(10), buckets=2)
        words = "bucket_1 is open for writing by process .*did not answer within 0.3 s; nothing was"
        with owner_without_ears(tmp_path / "t" / "bucket_1"), refused("BucketLocked", words):
            store.save(
                pa.table({"id": [1], "new": ["a"]}), ownerTimeout=0.3
            )  # no field is added either
        assert ids(tmp_path) == list(range(10))
        assert "new" not in stored(tmp_path)[0]

    def test_owner_that_comes_during_a_direct_write_and_does_not_answer_loses_nothing(
        self, tmp_path: Path
    ) -> None:
        """No bucket gets rows; repeating the write with the same id adds them to all."""
        put(tmp_path, rows(10), buckets=2)
        store = DirectStore(tmp_path)
        with ExitStack() as later, refused("BucketLocked", "bucket_1 .*nothing was changed"):
            store.save(
                table(20, 10),
                writeId="w",
                ownerTimeout=0.3,
                meanwhile=lambda: later.enter_context(
                    owner_without_ears(tmp_path / "t" / "bucket_1")
                ),
            )
        self.check_completion(store, tmp_path)

    def check_completion(self, store: Store, folder: Path) -> None:
        assert ids(folder) == list(range(10))
        assert is_sound(folder)
        assert unreferenced(folder) == []
        assert files_of_handovers(folder / "t") == []
        for _ in range(2):
            store.save(table(20, 10), writeId="w")
        assert [i for i in ids(folder) if i < 100] == list(range(30))
        assert is_sound(folder)
        assert unreferenced(folder) == []

    def test_field_widened_during_a_write_is_noticed(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, [{"id": i, "x": 1} for i in range(10)])
        late = [{"id": i, "x": 0.5} for i in range(20, 30)]
        with refused("StorageError", "'x'.*changed.*again"):
            store.save(one(id=10, x=5), meanwhile=lambda: put(tmp_path, late))
        assert ids(tmp_path) == [*range(10), *range(20, 30)]
        assert unreferenced(tmp_path) == []
        store.save(one(id=10, x=5))
        assert ids(tmp_path) == [*range(11), *range(20, 30)]

    def test_field_added_during_a_write_does_no_harm(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, [{"id": i, "x": 1} for i in range(10)])
        late = [{"id": 11, "x": 6, "y": "a"}]
        store.save(one(id=10, x=5), meanwhile=lambda: put(tmp_path, late))
        found = {r["id"]: r for r in stored(tmp_path)}
        assert found[10] == {"id": 10, "x": 5, "y": None}
        assert found[11] == {"id": 11, "x": 6, "y": "a"}
        assert is_sound(tmp_path)

    def test_versions_removed_during_a_write_do_no_harm(self, store: Store, tmp_path: Path) -> None:
        put(tmp_path, rows(4), keep_versions=0.001)

        def clean() -> None:
            with writer(tmp_path) as queue:
                for first in (10, 20, 30):
                    queue.put_batch(rows(4, first))
                    queue.flush()
                queue.compact()

        store.save(table(4, 4), meanwhile=clean)
        assert ids(tmp_path) == [*range(8), *range(10, 14), *range(20, 24), *range(30, 34)]
        assert is_sound(tmp_path)


@pytest.mark.nightly
def test_files_of_a_write_that_spark_aborts_have_no_rows_and_are_swept_when_they_are_old(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Java evaluates the rows: the task in Python has written files when the last row fails."""
    put(tmp_path, rows(10), buckets=1)
    count = 2 * _FRAGMENT_ROWS + 100_000  # more than the sockets hold, after two whole files
    text = f"if(id = {count - 1}, raise_error('no luck'), concat('row ', id)) text"
    with pytest.raises(Exception, match="no luck"):
        save(spark.range(0, count, numPartitions=1).selectExpr("id", text), tmp_path)
    assert ids(tmp_path) == list(range(10))
    assert load(spark, tmp_path).count() == 10

    def is_swept(age: float) -> bool:
        for path in (tmp_path / "t").glob("bucket_*/data.lance/data/*"):
            os.utime(path, (time.time() - age,) * 2)
        with writer(tmp_path, local_socket=False) as queue:
            queue.put_batch([])
            queue.compact()
        return not unreferenced(tmp_path)

    assert not is_swept(LEFT_SECONDS - 3600)
    # The task may still write its last file.
    until_true(lambda: is_swept(LEFT_SECONDS + 60), tries=300)
    assert ids(tmp_path) == list(range(10))
    assert is_sound(tmp_path)


class TestWriteIds:
    def test_repeated_write_id_is_stored_once(self, spark: SparkSession, tmp_path: Path) -> None:
        for _ in range(2):
            save(frame(spark, 100, parts=3), tmp_path, writeId="monday")
        assert ids(tmp_path) == list(range(100))
        assert unreferenced(tmp_path) == []
        save(frame(spark, 100, 100), tmp_path, writeId="tuesday")
        save(frame(spark, 100), tmp_path, writeId="monday")
        assert ids(tmp_path) == list(range(200))

    def test_writes_without_an_id_are_all_stored(self, store: Store, tmp_path: Path) -> None:
        for _ in range(2):
            store.save(table(5))
        assert ids(tmp_path) == sorted([*range(5)] * 2)

    def test_write_ids_survive_retention_compaction_and_other_writers(
        self, store: Store, tmp_path: Path
    ) -> None:
        store.save(table(20), writeId="one", numBuckets=1)
        with writer(tmp_path, keep_versions=0.001, compaction=False) as queue:
            queue.put_batch(rows(10, 20))
            queue.flush()
            queue.compact()
            queue.put_batch(rows(10, 30))
            queue.flush()
            queue.compact()
        store.save(table(20), writeId="one")
        assert ids(tmp_path) == list(range(40))
        store.save(table(5, 40))
        with writer(tmp_path) as queue:
            queue.retain(rows=5)
        store.save(table(20), writeId="one")
        assert ids(tmp_path) == list(range(40, 45))

    def test_writes_without_an_id_do_not_evict_write_ids(
        self, store: Store, tmp_path: Path
    ) -> None:
        """A write that cannot be repeated leaves no lasting producer sequence."""
        store.save(table(2), writeId="one", numBuckets=1)
        for _ in range(2):
            store.save(table(2))
        marks = ProducerSequences(TopicFolder.open(tmp_path / "t").table(0).properties[WRITERS])
        assert [name for name in marks._last if not name.startswith(ANONYMOUS)] == ["spark:one"]

    def test_write_ids_differ_from_writer_ids_of_a_queue(
        self, store: Store, tmp_path: Path
    ) -> None:
        with writer(tmp_path, writer_id="one", enable_wal=True, buckets=1) as queue:
            queue.put({"id": 0}, sequence=0)
        store.save(pa.table({"id": [1]}), writeId="one")
        with writer(tmp_path, writer_id="one") as queue:
            queue.put({"id": 0}, sequence=0)
            queue.put({"id": 2}, sequence=1)
        store.save(pa.table({"id": [1]}), writeId="one")
        assert ids(tmp_path) == [0, 1, 2]


class TestFailingTasks:
    def test_failed_task_stores_nothing_and_leaves_no_files(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """The last row does not fit, after the task has written a first file of each bucket."""
        from pyspark.errors import PySparkException

        put(tmp_path, [{"id": 0, "v": [0.5, 1.5]}], buckets=2)
        bad = spark.range(1, 600_001, numPartitions=1).selectExpr(
            "id", "if(id = 600000, array(1D), array(1D, 2D)) AS v"
        )
        with pytest.raises(PySparkException, match="field 'v' holds vectors of 2"):
            save(bad, tmp_path)
        assert ids(tmp_path) == [0]
        assert unreferenced(tmp_path) == []
        save(spark.range(1, 3), tmp_path)
        assert ids(tmp_path) == [0, 1, 2]

    def test_failed_write_removes_files_of_finished_tasks(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        from pyspark.errors import PySparkException

        put(tmp_path, [{"id": 0}], buckets=2)
        gate = Gate(tmp_path / "gate")
        opened = gate.opened

        def fail_on_request(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import os
            import time

            from pyspark import TaskContext

            yield from batches
            context = TaskContext.get()
            while context is not None and context.partitionId() == 1:
                if os.path.exists(opened):
                    raise ValueError("asked to fail")
                time.sleep(0.02)

        df = spark.range(1, 101, numPartitions=2).mapInArrow(fail_on_request, "id long")
        status = spark.sparkContext.statusTracker()

        def done() -> bool:
            jobs = [status.getJobInfo(job) for job in status.getJobIdsForGroup("failing")]
            stages = [status.getStageInfo(s) for job in jobs if job for s in job.stageIds]
            return any(stage and stage.numCompletedTasks for stage in stages)

        def write() -> None:
            spark.sparkContext.setJobGroup("failing", "")
            with pytest.raises(PySparkException, match="asked to fail"):
                save(df, tmp_path)

        writing = BackgroundWork(spark, write)
        try:
            writing.until(done)
        finally:
            gate.let_go()
            writing.join()
        assert ids(tmp_path) == [0]
        assert unreferenced(tmp_path) == []


class TestConcurrentWrites:
    def test_two_concurrent_writes_are_both_stored(self, store: Store, tmp_path: Path) -> None:
        store.save(table(0))
        other = DirectStore(tmp_path)
        store.save(table(50), meanwhile=lambda: other.save(table(50, 50)))
        assert ids(tmp_path) == list(range(100))
        assert is_sound(tmp_path)

    @pytest.mark.nightly
    def test_many_concurrent_writes_are_all_stored(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """The writers compete for locks, which each holds for a short time."""
        save(frame(spark, 0), tmp_path)

        def write(first: int) -> None:
            for start in range(first, first + 50, 10):
                save(frame(spark, 10, start), tmp_path)

        for writing in [
            BackgroundWork(spark, partial(write, first)) for first in range(0, 200, 50)
        ]:
            writing.join()
        assert ids(tmp_path) == list(range(200))


class TestWrittenTopic:
    def test_written_rows_are_consumed_by_groups(self, store: Store, tmp_path: Path) -> None:
        store.save(table(30), parts=2)
        with reader(tmp_path, group="g") as group:
            first = group.get(10)
            group.commit()
        store.save(table(10, 30))
        with reader(tmp_path, group="g") as group:
            rest = group.get(None)
        assert sorted(r["id"] for r in first + rest) == list(range(40))

    def test_written_rows_are_found_by_search_and_lookup(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        df = spark.range(300).selectExpr(
            "id", "concat('word', id) AS text", "array(cast(id AS double), 1D) AS v"
        )
        save(df, tmp_path, vectors="v:2")
        with writer(tmp_path) as queue:
            queue.create_index("text")
            queue.create_index("id")
            assert [r["id"] for r in queue.search(text="word123", k=3)] == [123]
            assert [r["id"] for r in queue.search(vector=[77.2, 1.0], k=1)] == [77]
            assert [r["text"] for r in queue.lookup("id", 250)] == ["word250"]
        save(df.selectExpr("id + 300 AS id", "text", "v"), tmp_path)
        with writer(tmp_path) as queue:
            assert {r["id"] for r in queue.search(text="word123", k=3)} == {123, 423}
            assert [r["text"] for r in queue.lookup("id", 550)] == ["word250"]

    def test_written_topic_is_compacted_retained_and_verified(
        self, store: Store, tmp_path: Path
    ) -> None:
        for first in range(0, 100, 20):
            store.save(table(20, first), parts=2, numBuckets=1)
        with writer(tmp_path) as queue:
            before = queue.stats()["buckets"][0]["fragments"]
            queue.compact()
            assert queue.stats()["buckets"][0]["fragments"] < before
            assert queue.verify()["ok"]
            queue.put({"id": 100})
            queue.flush()
            queue.retain(rows=1)
            assert queue.stats()["buckets"][0]["start_offset"] == 100
        assert ids(tmp_path) == [100]
        assert is_sound(tmp_path)

    def test_written_topic_is_read_at_its_versions(self, store: Store, tmp_path: Path) -> None:
        store.save(table(5), numBuckets=1)
        with writer(tmp_path) as queue:
            version = queue.versions()[-1]["version"]
        store.save(table(5, 5))
        with reader(tmp_path) as queue:
            assert len(queue.get_arrow(version=version)) == 5

    def test_damage_of_a_written_file_is_noticed(self, store: Store, tmp_path: Path) -> None:
        store.save(table(50), numBuckets=1)
        data = tmp_path / "t" / "bucket_0" / "data.lance" / "data"
        # The smaller file has the times of arrival, without which the table cannot be opened.
        file = max(data.iterdir(), key=lambda one: one.stat().st_size)
        damaged = bytearray(file.read_bytes())
        damaged[0] ^= 1
        file.write_bytes(damaged)
        with writer(tmp_path) as queue:
            found = queue.verify()
        assert not found["ok"]
        assert len(found["damaged"]) == 1

    def test_decimals_are_stored_whatever_their_alignment(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        df = spark.range(20).selectExpr(
            "id",
            "CAST(id / 8 AS DECIMAL(38, 18)) AS d",
            "array(CAST(id AS DECIMAL(10, 2))) AS ds",
            "struct(concat('x', id) AS t, CAST(id AS DECIMAL(20, 0)) AS d) AS s",
        )
        save(df, tmp_path, numBuckets=1)
        for i, record in enumerate(stored(tmp_path)):
            assert record["d"] == Decimal(i) / 8
            assert record["ds"] == [Decimal(i)]
            assert record["s"] == {"t": f"x{i}", "d": Decimal(i)}
