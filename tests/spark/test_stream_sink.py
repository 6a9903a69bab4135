"""Micro-batches are stored once each, whatever happens between the tasks, the commits of the
buckets and Spark's own note that a batch is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filled import (
    content,
    ids,
    is_sound,
    load,
    put,
    reader,
    refused,
    rows,
    save,
    stored,
    texts,
    unreferenced,
    writer,
)
from gates import Gate

from persisting.topic.routing import bucket_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


class Pipe:
    """A stream from the topic ``in`` to the topic ``out``, with its checkpoint."""

    def __init__(self, spark: SparkSession, folder: Path, name: str = "pipe") -> None:
        self.spark, self.folder = spark, folder
        self.checkpoint = folder / f"{name}.checkpoint"

    def run(
        self,
        change: Callable[[DataFrame], DataFrame] | None = None,
        source: dict[str, Any] | None = None,
        **sink: Any,
    ) -> StreamingQuery:
        """Bring over what is there and was not yet; what fails raises."""
        df = self.spark.readStream.format("persisting").options(**texts(source or {}))
        stream = df.load(str(self.folder / "in"))
        query = (
            (stream if change is None else change(stream))
            .writeStream.format("persisting")
            .option("checkpointLocation", str(self.checkpoint))
            .options(**texts(sink))
            .trigger(availableNow=True)
            .start(str(self.folder / "out"))
        )
        try:
            query.awaitTermination()
        finally:
            query.stop()
        return query

    def forget_last_commit(self) -> None:
        """As if the driver had died after our commit, before Spark noted that the batch is done."""
        done = [f for f in (self.checkpoint / "commits").iterdir() if f.name.isdigit()]
        last = max(done, key=lambda file: int(file.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


@pytest.fixture
def pipe(spark: SparkSession, tmp_path: Path) -> Pipe:
    put(tmp_path, rows(30), "in", buckets=3)
    return Pipe(spark, tmp_path)


def out(pipe: Pipe) -> list[int]:
    return ids(pipe.folder, "out")


class TestAPipe:
    def test_brings_every_row_over_once_into_its_bucket(self, pipe: Pipe) -> None:
        pipe.run(source={"maxOffsetsPerTrigger": 12}, numBuckets=2, compression="zstd")
        put(pipe.folder, rows(5, 30), "in")
        pipe.run()
        pipe.run()
        found = content(pipe.folder, "out")
        assert sorted((r for some in found.values() for r in some), key=lambda r: r["id"]) == rows(
            35
        )
        assert all(bucket_of(r["id"], 2) == b for b, some in found.items() for r in some)
        assert unreferenced(pipe.folder, "out") == []
        assert is_sound(pipe.folder, "out")

    def test_feeds_groups_searches_and_further_streams(self, pipe: Pipe) -> None:
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

    def test_follows_new_fields(self, pipe: Pipe) -> None:
        pipe.run()
        put(pipe.folder, [{"id": 30, "new": "n", "score": 1}], "in")
        pipe.run()
        (found,) = [r for r in stored(pipe.folder, "out") if r["id"] == 30]
        assert found == {"id": 30, "text": None, "score": 1.0, "even": None, "new": "n"}

    def test_goes_on_behind_what_a_queue_put_in_between(self, pipe: Pipe) -> None:
        pipe.run()
        put(pipe.folder, rows(3, 100), "out")
        put(pipe.folder, rows(3, 30), "in")
        pipe.run()
        assert out(pipe) == [*range(33), 100, 101, 102]

    def test_needs_the_bucket_column(self, pipe: Pipe) -> None:
        with refused("InvalidArgument", "no column 'id'.*bucketColumn"):
            pipe.run(lambda df: df.select("text"))
        assert not (pipe.folder / "out").exists()

    def test_takes_no_complete_results(self, pipe: Pipe) -> None:
        counted = pipe.spark.readStream.format("persisting").load(str(pipe.folder / "in"))
        query = (
            counted.groupBy("even")
            .count()
            .withColumnRenamed("even", "id")
            .writeStream.format("persisting")
            .outputMode("complete")
            .option("checkpointLocation", str(pipe.checkpoint))
            .trigger(availableNow=True)
            .start(str(pipe.folder / "out"))
        )
        with refused("InvalidArgument", "complete.*append"):
            query.awaitTermination()


class TestABatchThatIsRepeated:
    def test_is_stored_once(self, pipe: Pipe) -> None:
        for _ in range(2):
            pipe.run()
            pipe.forget_last_commit()
        pipe.run()
        assert out(pipe) == list(range(30))
        assert unreferenced(pipe.folder, "out") == []
        put(pipe.folder, rows(5, 30), "in")
        pipe.run()
        assert out(pipe) == list(range(35))

    def test_is_stored_once_through_compaction_retention_and_the_cleaning_of_versions(
        self, pipe: Pipe
    ) -> None:
        save(load(pipe.spark, pipe.folder, "in").limit(0), pipe.folder, "out", numBuckets=1)
        pipe.run()
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

    def test_is_completed_where_only_some_buckets_had_it(self, pipe: Pipe) -> None:
        """A live owner takes the second bucket while the tasks run: the first one's part of the
        batch is stored, and the restarted query adds the rest."""
        folder = pipe.folder
        save(load(pipe.spark, folder, "in").limit(0), folder, "out", numBuckets=2)
        gate = Gate(folder / "gate")
        first = {i for i in range(30) if bucket_of(i, 2) == 0}

        def run() -> None:
            with refused("BucketLocked", "bucket_1 is open for writing.*close it"):
                pipe.run(gate.hold)

        with gate.holding(pipe.spark, run) as running, writer(folder, "out") as queue:
            queue.put({"id": next(i for i in range(100, 199) if bucket_of(i, 2) == 1)})
            gate.let_go()
            running.join()
        assert {i for i in out(pipe) if i < 100} == first
        assert is_sound(folder, "out")
        pipe.run(gate.hold)
        assert [i for i in out(pipe) if i < 100] == list(range(30))
        assert unreferenced(folder, "out") == []
        assert is_sound(folder, "out")

    def test_of_another_query_is_another_batch(self, pipe: Pipe) -> None:
        pipe.run()
        Pipe(pipe.spark, pipe.folder, "other").run()
        assert out(pipe) == sorted([*range(30)] * 2)

    def test_of_another_query_with_the_same_write_id_is_the_same(self, pipe: Pipe) -> None:
        pipe.run(writeId="nightly")
        Pipe(pipe.spark, pipe.folder, "other").run(writeId="nightly")
        assert out(pipe) == list(range(30))


class TestTheTopicChangesMeanwhile:
    def test_a_live_owner_is_an_error_and_the_restart_goes_on(self, pipe: Pipe) -> None:
        pipe.run()
        put(pipe.folder, rows(5, 30), "in")
        with writer(pipe.folder, "out") as queue:
            queue.put_batch(rows(9, 100))
            with refused("BucketLocked", "close it there, or put through its queue"):
                pipe.run()
        pipe.run()
        assert [i for i in out(pipe) if i < 100] == list(range(35))

    def test_a_field_that_is_widened_between_tasks_and_commit_loses_no_value(
        self, pipe: Pipe
    ) -> None:
        folder = pipe.folder
        put(folder, [{"id": i, "x": 1} for i in range(100, 110)], "out")
        gate = Gate(folder / "gate")

        def changed(df: DataFrame) -> DataFrame:
            return gate.hold(df.selectExpr("id", "id * 2 AS x"))

        def run() -> None:
            with refused("StorageError", "'x'.*changed.*again"):
                pipe.run(changed)

        with gate.holding(pipe.spark, run):
            put(folder, [{"id": i, "x": 0.5} for i in range(110, 120)], "out")
        pipe.run(changed)
        found = {r["id"]: r["x"] for r in stored(folder, "out")}
        assert {i: found[i] for i in range(30)} == {i: i * 2.0 for i in range(30)}
        assert len(found) == 50
        assert unreferenced(folder, "out") == []

    def test_versions_that_are_cleaned_away_between_plan_and_tasks_do_no_harm(
        self, pipe: Pipe
    ) -> None:
        folder = pipe.folder
        put(folder, rows(4, 100), "out", keep_versions=0.001, compaction=False)
        gate = Gate(folder / "gate")
        with gate.holding(pipe.spark, lambda: pipe.run(gate.hold)), writer(folder, "out") as queue:
            for first in (110, 120, 130):
                queue.put_batch(rows(4, first))
                queue.flush()
            queue.compact()
            queue.close()
        assert [i for i in out(pipe) if i < 100] == list(range(30))
        assert is_sound(folder, "out")

    def test_a_restore_takes_back_rows_and_their_marks_together(self, pipe: Pipe) -> None:
        """What was taken back with its mark comes again if Spark repeats the batch."""
        save(load(pipe.spark, pipe.folder, "in").limit(0), pipe.folder, "out")
        with writer(pipe.folder, "out") as queue:
            queue.tag("empty")
        pipe.run()
        with writer(pipe.folder, "out") as queue:
            queue.restore("empty")
        pipe.forget_last_commit()
        pipe.run()
        assert out(pipe) == list(range(30))


class TestFailures:
    def test_of_a_task_store_nothing_and_the_restart_brings_all(self, pipe: Pipe) -> None:
        from pyspark.errors import PySparkException

        with pytest.raises(PySparkException, match="no"):
            pipe.run(lambda df: df.selectExpr("if(id = 7, raise_error('no'), id) AS id"))
        assert out(pipe) == []
        pipe.run(lambda df: df.selectExpr("id"))
        assert out(pipe) == list(range(30))
