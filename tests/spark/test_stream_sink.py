"""Streaming writes: each micro-batch is stored once, whatever happens between the tasks, the
commits of the buckets and Spark's own note that the batch is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spark.processes import Run
from support.spark.topics import (
    content,
    ids,
    is_sound,
    put,
    reader,
    refused,
    rows,
    stored,
    unreferenced,
    writer,
)
from support.spark.writes import DirectPipe, SparkPipe

from persisting.lock import BucketLock
from persisting.topic.routing import bucket_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Pipe = DirectPipe | SparkPipe
Again = Callable[[str], Pipe]


@pytest.fixture(params=["direct", pytest.param("spark", marks=pytest.mark.nightly)])
def another(request: pytest.FixtureRequest, tmp_path: Path) -> Again:
    """Make pipes by name: with Spark's calls; nightly also with Spark itself."""
    if request.param == "direct":
        return lambda name: DirectPipe(tmp_path, name)
    return lambda name: SparkPipe(request.getfixturevalue("spark"), tmp_path, name)


@pytest.fixture
def pipe(another: Again, tmp_path: Path) -> Pipe:
    put(tmp_path, rows(30), "in", buckets=3)
    return another("pipe")


@pytest.fixture
def by_spark(spark: SparkSession, tmp_path: Path) -> SparkPipe:
    put(tmp_path, rows(30), "in", buckets=3)
    return SparkPipe(spark, tmp_path)


def out(pipe: Pipe) -> list[int]:
    return ids(pipe.folder, "out")


class TestPipe:
    def test_stream_stores_every_row_once_in_its_bucket(self, by_spark: SparkPipe) -> None:
        folder = by_spark.folder
        by_spark.run({"maxOffsetsPerTrigger": 18}, numBuckets=2, compression="zstd")
        put(folder, [*rows(4, 30), {"id": 34, "new": "n", "score": 1}], "in")
        by_spark.run()
        by_spark.forget_last_commit()
        by_spark.run()
        found = content(folder, "out")
        records = sorted((r for some in found.values() for r in some), key=lambda r: r["id"])
        assert [{k: v for k, v in r.items() if k != "new"} for r in records[:34]] == rows(34)
        assert records[34]["new"] == "n"
        assert len(records) == 35
        assert all(bucket_of(r["id"], 2) == b for b, some in found.items() for r in some)
        assert unreferenced(folder, "out") == []
        assert is_sound(folder, "out")

    def test_rows_of_a_stream_are_seen_by_groups_and_queries(self, pipe: Pipe) -> None:
        pipe.run()
        with reader(pipe.folder, "out", group="g") as group:
            assert len(group.get(20)) == 20
            group.commit()
        put(pipe.folder, rows(5, 30), "in")
        pipe.run()
        with reader(pipe.folder, "out", group="g") as group:
            assert len(group.get(None)) == 15
        with writer(pipe.folder, "out") as queue:
            assert [r["id"] for r in queue.query("id = 33")] == [33]

    def test_sink_takes_new_fields_of_its_source(self, pipe: Pipe) -> None:
        pipe.run()
        put(pipe.folder, [{"id": 30, "new": "n", "score": 1}], "in")
        pipe.run()
        (found,) = [r for r in stored(pipe.folder, "out") if r["id"] == 30]
        assert found == {"id": 30, "text": None, "score": 1.0, "even": None, "new": "n"}

    def test_stream_appends_after_rows_that_a_queue_put(self, pipe: Pipe) -> None:
        pipe.run()
        put(pipe.folder, rows(3, 100), "out")
        put(pipe.folder, rows(3, 30), "in")
        pipe.run()
        assert out(pipe) == [*range(33), 100, 101, 102]

    def test_stream_without_the_bucket_column_is_refused(self, pipe: Pipe) -> None:
        with refused("InvalidArgument", "no column 'id'.*bucketColumn"):
            pipe.run({"columns": "text"})
        assert not (pipe.folder / "out").exists()

    def test_output_mode_complete_is_refused(self, by_spark: SparkPipe) -> None:
        counted = by_spark.spark.readStream.format("persisting").load(str(by_spark.folder / "in"))
        made = (
            counted.groupBy("even")
            .count()
            .withColumnRenamed("even", "id")
            .writeStream.format("persisting")
            .outputMode("complete")
            .option("checkpointLocation", str(by_spark.folder / "checkpoint"))
            .trigger(availableNow=True)
        )
        with refused("InvalidArgument", "complete"):
            made.start(str(by_spark.folder / "out")).awaitTermination()


class TestRepeatedBatch:
    def test_repeated_batch_is_stored_once(self, pipe: Pipe) -> None:
        for _ in range(3):
            pipe.run()
            pipe.forget_last_commit()
        pipe.run()
        assert out(pipe) == list(range(30))
        assert unreferenced(pipe.folder, "out") == []
        put(pipe.folder, rows(5, 30), "in")
        pipe.run()
        assert out(pipe) == list(range(35))

    def test_repeated_batch_is_stored_once_after_compaction_and_retention(self, pipe: Pipe) -> None:
        pipe.run(numBuckets=1)
        with writer(pipe.folder, "out", keep_versions=0.001, compaction=False) as queue:
            for first in (100, 110, 120):
                queue.put_batch(rows(10, first))
                queue.flush()
            queue.compact()
            queue.put_batch(rows(10, 130))
            queue.flush()
            queue.retain(rows=10)
            queue.compact()
        pipe.forget_last_commit()
        pipe.run()
        assert out(pipe) == list(range(130, 140))

    def test_repeated_batch_is_stored_once_after_many_other_writers(self, pipe: Pipe) -> None:
        """A bucket remembers a thousand producers; puts without a producer id do not count."""
        pipe.run(numBuckets=1)
        with writer(pipe.folder, "out") as queue:
            for number in range(1100):
                queue.put({"id": 1000 + number})
        pipe.forget_last_commit()
        pipe.run()
        assert out(pipe)[:31] == [*range(30), 1000]

    @pytest.mark.parametrize("kind", ["direct", "spark"])
    def test_batch_that_an_owner_did_not_answer_is_stored_on_restart(
        self, request: pytest.FixtureRequest, tmp_path: Path, kind: str
    ) -> None:
        """An owner takes the second bucket while the tasks run, and hangs: nothing is stored, and
        the restarted query stores the batch."""
        pipe: Pipe = DirectPipe(tmp_path)
        if kind == "spark":
            pipe = SparkPipe(request.getfixturevalue("spark"), tmp_path)
        put(tmp_path, rows(30), "in", buckets=3)
        put(tmp_path, [], "out", buckets=2)
        locks: list[BucketLock] = []

        def hang() -> None:
            locks.append(BucketLock(tmp_path / "out" / "bucket_1", bucket=1))

        with refused("BucketLocked", "bucket_1 is open for writing.*nothing was changed"):
            pipe.run(meanwhile=hang, ownerTimeout=0.5)
        locks[0].release(clean=False)
        assert out(pipe) == []
        assert is_sound(tmp_path, "out")
        assert unreferenced(tmp_path, "out") == []
        pipe.run()
        assert [i for i in out(pipe) if i < 100] == list(range(30))
        assert unreferenced(tmp_path, "out") == []
        assert is_sound(tmp_path, "out")

    def test_batches_of_different_queries_are_both_stored(self, pipe: Pipe, another: Again) -> None:
        pipe.run()
        another("other").run()
        assert out(pipe) == sorted([*range(30)] * 2)

    def test_batches_of_queries_with_one_write_id_are_stored_once(
        self, pipe: Pipe, another: Again
    ) -> None:
        pipe.run(writeId="nightly")
        another("other").run(writeId="nightly")
        assert out(pipe) == list(range(30))


class TestConcurrentChanges:
    def test_stream_writes_beside_a_queue(self, pipe: Pipe) -> None:
        pipe.run()
        put(pipe.folder, rows(5, 30), "in")
        with writer(pipe.folder, "out") as queue:
            queue.put_batch(rows(9, 100))
            pipe.run()
            queue.put_batch(rows(9, 200))
            pipe.forget_last_commit()
            pipe.run()  # the repeated batch is not stored again
        assert out(pipe) == [*range(35), *range(100, 109), *range(200, 209)]

    @pytest.mark.parametrize("kind", ["direct", "spark"])
    def test_field_widened_between_tasks_and_commit_loses_no_value(
        self, request: pytest.FixtureRequest, tmp_path: Path, kind: str
    ) -> None:
        pipe: Pipe = DirectPipe(tmp_path)
        if kind == "spark":
            pipe = SparkPipe(request.getfixturevalue("spark"), tmp_path)
        put(tmp_path, [{"id": i, "x": i * 2} for i in range(30)], "in")
        put(tmp_path, [{"id": i, "x": 1} for i in range(100, 110)], "out")
        late = [{"id": i, "x": 0.5} for i in range(110, 120)]
        with refused("StorageError", "'x'.*changed.*again"):
            pipe.run(meanwhile=lambda: put(tmp_path, late, "out"))
        pipe.run()
        found = {r["id"]: r["x"] for r in stored(tmp_path, "out")}
        assert {i: found[i] for i in range(30)} == {i: i * 2.0 for i in range(30)}
        assert len(found) == 50
        assert unreferenced(tmp_path, "out") == []

    def test_versions_removed_between_plan_and_tasks_do_no_harm(self, pipe: Pipe) -> None:
        put(pipe.folder, rows(4, 100), "out", keep_versions=0.001)

        def clean() -> None:
            with writer(pipe.folder, "out") as queue:
                for first in (110, 120, 130):
                    queue.put_batch(rows(4, first))
                    queue.flush()
                queue.compact()

        pipe.run(meanwhile=clean)
        assert [i for i in out(pipe) if i < 100] == list(range(30))
        assert is_sound(pipe.folder, "out")

    def test_restore_removes_rows_together_with_their_producer_sequences(self, pipe: Pipe) -> None:
        """Rows that a restore removed are stored again if Spark repeats the batch."""
        put(pipe.folder, rows(1, 100), "out")
        with writer(pipe.folder, "out") as queue:
            queue.tag("before")
        pipe.run()
        with writer(pipe.folder, "out") as queue:
            queue.restore("before")
        pipe.forget_last_commit()
        pipe.run()
        assert out(pipe) == [*range(30), 100]


REFUSED = """
import sys
from pathlib import Path

from pyspark.errors import StreamingQueryException

from persisting.errors import InvalidArgument
from persisting.queue import write_queue
from persisting.spark import jobs, session

folder = Path(sys.argv[1])
spark = session(master="local[1]")


def start(**options):
    source = spark.readStream.format("persisting").load(str(folder / "in"))
    sink = source.writeStream.format("persisting").options(**options)
    sink = sink.option("checkpointLocation", str(folder / str(len(result))))
    return sink.trigger(availableNow=True).start(str(folder / "out"))


result = {}
try:
    start(ownerTimeout=1).awaitTermination()
except StreamingQueryException as exc:
    result["locked"] = str(exc)
try:
    jobs.watch(start(numBucket=3))
except InvalidArgument as exc:
    result["unknown option"] = str(exc)
try:
    jobs.watch(start(numBuckets=3))
except InvalidArgument as exc:
    result["other buckets"] = str(exc)
"""


@pytest.mark.timeout(300)
def test_a_refused_stream_prints_one_line_and_no_traceback(tmp_path: Path) -> None:
    put(tmp_path, rows(5), "in", buckets=1)
    put(tmp_path, rows(5), "out", buckets=1)
    lock = BucketLock(tmp_path / "out" / "bucket_0", bucket=0)
    (tmp_path / "process").mkdir()
    with Run(tmp_path / "process", REFUSED, tmp_path) as run:
        run.finish()
    lock.release(clean=False)
    assert "BucketLocked: bucket" in run.result["locked"]
    assert "did you mean numBuckets?" in run.result["unknown option"]
    assert "num_buckets=1, not 3" in run.result["other buckets"]
    assert run.stdout == ""
    lines = run.stderr.splitlines()
    assert all("MicroBatchExecution: Query" in line for line in lines[::2]), run.stderr
    assert [line.split(":")[0] for line in lines[1::2]] == [
        "BucketLocked",
        "InvalidArgument",
        "InvalidArgument",
    ]


class TestFailures:
    def test_failed_task_stores_nothing_and_a_restart_stores_all(self, by_spark: SparkPipe) -> None:
        from pyspark.errors import PySparkException

        with pytest.raises(PySparkException, match="no"):
            by_spark.run(change=lambda df: df.selectExpr("if(id = 7, raise_error('no'), id) AS id"))
        assert out(by_spark) == []
        by_spark.run(change=lambda df: df.selectExpr("id"))
        assert out(by_spark) == list(range(30))
