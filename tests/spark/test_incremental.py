"""Incremental copies of a topic: every run takes the new rows, and no row twice."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spark.processes import Run
from support.spark.topics import ids, put, rows, stored, writer

from persisting.errors import InvalidArgument, NoSuchTopic, StorageError
from persisting.spark import jobs
from persisting.spark.query_errors import SparkTrace
from persisting.topic.topic_files import TopicFolder
from persisting.ui.pipelines import pipelines_into

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def evens(df: DataFrame) -> DataFrame:
    return df.where("even").selectExpr("id", "upper(text) as text")


def test_a_source_without_records_is_not_an_error(spark: SparkSession, tmp_path: Path) -> None:
    with writer(tmp_path, "raw"):
        pass
    done = jobs.incremental(spark, tmp_path / "raw", tmp_path / "all")
    assert (done.rows, done.batches, done.lag) == (0, 0, {"0": 0, "1": 0})
    put(tmp_path, rows(5), "raw")
    assert jobs.incremental(spark, tmp_path / "raw", tmp_path / "all").rows == 5
    assert ids(tmp_path, "all") == list(range(5))


def test_the_console_shows_how_far_a_pipeline_is(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, rows(5), "raw")
    jobs.incremental(spark, tmp_path / "raw", tmp_path / "all")
    put(tmp_path, rows(3, 5), "raw")
    (pipeline,) = pipelines_into(TopicFolder.open(tmp_path / "all"))
    assert (pipeline.name, pipeline.source, pipeline.problem) == ("raw", "raw", None)
    assert (pipeline.batches, pipeline.rows, pipeline.lag) == (1, 5, 3)
    assert pipeline.last_run is not None


def test_a_recreated_source_is_refused_whether_it_is_shorter_or_longer(
    spark: SparkSession, tmp_path: Path
) -> None:
    put(tmp_path, rows(20), "raw")
    assert jobs.incremental(spark, tmp_path / "raw", tmp_path / "all").rows == 20
    for count in (3, 60):
        shutil.rmtree(tmp_path / "raw")
        put(tmp_path, rows(count, 100), "raw")
        with pytest.raises(StorageError, match="was recreated"):
            jobs.incremental(spark, tmp_path / "raw", tmp_path / "all")
    done = jobs.incremental(spark, tmp_path / "raw", tmp_path / "all", name="again")
    assert done.rows == 60


def test_a_checkpoint_without_a_topic_id_is_accepted_and_completed(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Checkpoints written before topics had an id name only the path of the source."""
    put(tmp_path, rows(20), "raw")
    jobs.incremental(spark, tmp_path / "raw", tmp_path / "all")
    file = tmp_path / "all" / "checkpoints" / "raw" / "source.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps({"source": known["source"]}))
    put(tmp_path, rows(5, 20), "raw")
    assert jobs.incremental(spark, tmp_path / "raw", tmp_path / "all").rows == 5
    assert json.loads(file.read_text()) == known
    assert ids(tmp_path, "all") == list(range(25))


def test_a_source_that_was_moved_alone_is_refused_until_its_new_path_is_stored(
    spark: SparkSession, tmp_path: Path
) -> None:
    put(tmp_path, rows(10), "raw")
    jobs.incremental(spark, tmp_path / "raw", tmp_path / "all")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "raw", tmp_path / "elsewhere" / "raw")
    put(tmp_path / "elsewhere", rows(5, 10), "raw")
    file = tmp_path / "all" / "checkpoints" / "raw" / "source.json"
    with pytest.raises(InvalidArgument, match=f"edit the path in {file}"):
        jobs.incremental(spark, tmp_path / "elsewhere" / "raw", tmp_path / "all")
    known = json.loads(file.read_text())
    file.write_text(json.dumps({**known, "source": "../../../elsewhere/raw"}))
    assert jobs.incremental(spark, tmp_path / "elsewhere" / "raw", tmp_path / "all").rows == 5
    assert ids(tmp_path, "all") == list(range(15))


def test_each_run_takes_only_new_rows(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, rows(100), "raw")

    def step() -> jobs.Summary:
        return jobs.incremental(
            spark,
            tmp_path / "raw",
            tmp_path / "even",
            evens,
            num_buckets=2,
            max_rows_per_batch=60,
        )

    first = step()
    assert (first.rows, first.written, first.batches) == (100, 50, 2)
    assert first.lag == {"0": 0, "1": 0}
    assert first.seconds > 0
    assert ids(tmp_path, "even") == list(range(0, 100, 2))
    assert stored(tmp_path, "even")[0].keys() == {"id", "text"}

    nothing = step()
    assert (nothing.rows, nothing.written, nothing.batches) == (0, 0, 0)
    assert nothing.lag == {"0": 0, "1": 0}

    put(tmp_path, rows(30, 100), "raw")
    jobs.compact(spark, tmp_path / "raw")
    more = step()
    assert (more.rows, more.written) == (30, 15)
    assert ids(tmp_path, "even") == list(range(0, 130, 2))

    place = tmp_path / "even" / "checkpoints" / "raw"
    assert json.loads((place / "source.json").read_text())["source"] == "../../../raw"
    assert (place / "spark" / "offsets" / "2").exists()


def test_failed_run_is_repeated_by_the_next_one(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, rows(50), "raw")

    def fails(df: DataFrame) -> DataFrame:
        return df.selectExpr("id", "if(id = 33, raise_error('bad row'), text) as text")

    with pytest.raises(Exception, match="bad row"):
        jobs.incremental(spark, tmp_path / "raw", tmp_path / "copy", fails, num_buckets=2)
    assert ids(tmp_path, "copy") == []
    done = jobs.incremental(spark, tmp_path / "raw", tmp_path / "copy")
    assert done.rows == 50
    assert ids(tmp_path, "copy") == list(range(50))


def test_failed_run_raises_one_line_and_keeps_the_trace_of_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    put(tmp_path, rows(50), "raw")

    def fails(df: DataFrame) -> DataFrame:
        return df.selectExpr("id", "if(id = 33, raise_error('bad row'), text) as text")

    with pytest.raises(StorageError, match="bad row") as caught:
        jobs.incremental(spark, tmp_path / "raw", tmp_path / "copy", fails)
    assert "\n" not in str(caught.value)
    cause = caught.value.__cause__
    assert isinstance(cause, SparkTrace)
    assert "\n" not in str(cause)
    assert "STREAM_FAILED" in cause.trace
    with pytest.raises(InvalidArgument, match="UNRESOLVED_COLUMN") as caught_here:
        jobs.incremental(
            spark, tmp_path / "raw", tmp_path / "copy", lambda df: df.selectExpr("nope")
        )
    assert "\n" not in str(caught_here.value)


def test_refused_run_names_the_argument_and_leaves_nothing_behind(
    spark: SparkSession, tmp_path: Path
) -> None:
    put(tmp_path, rows(5), "raw")

    def without_id(df: DataFrame) -> DataFrame:
        return df.selectExpr("id as key", "text")

    with pytest.raises(InvalidArgument, match=r"no column 'id'.* with bucket_column=$"):
        jobs.incremental(spark, tmp_path / "raw", tmp_path / "copy", without_id)
    with pytest.raises(InvalidArgument, match=r"^num_buckets='0' must be a whole number"):
        jobs.incremental(spark, tmp_path / "raw", tmp_path / "copy", num_buckets=0)
    with pytest.raises(InvalidArgument, match=r"^vectors= names 'text', which is string"):
        jobs.incremental(spark, tmp_path / "raw", tmp_path / "copy", vectors={"text": 3})
    assert not (tmp_path / "copy").exists()
    done = jobs.incremental(
        spark, tmp_path / "raw", tmp_path / "copy", without_id, bucket_column="key"
    )
    assert (done.rows, done.lag) == (5, {"0": 0, "1": 0})


def test_several_sources_feed_a_target_under_different_names(
    spark: SparkSession, tmp_path: Path
) -> None:
    put(tmp_path / "a", rows(10), "raw")
    put(tmp_path / "b", rows(10, 10), "raw")
    target = tmp_path / "target"
    jobs.incremental(spark, tmp_path / "a" / "raw", target, num_buckets=1)
    with pytest.raises(
        InvalidArgument, match=r"belongs to the source .*a/raw, not to .*b/raw.*name="
    ):
        jobs.incremental(spark, tmp_path / "b" / "raw", target)
    options = {"columns": "id,text", "filter": "id < 15"}
    done = jobs.incremental(spark, tmp_path / "b" / "raw", target, name="b", read=options)
    assert done.written == 5
    assert ids(tmp_path, "target") == list(range(15))
    assert sorted(path.name for path in (target / "checkpoints").iterdir()) == ["b", "raw"]


def test_missing_and_equal_topics_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, rows(5), "raw")
    with pytest.raises(NoSuchTopic, match="nothing"):
        jobs.incremental(spark, tmp_path / "nothing", tmp_path / "copy")
    with pytest.raises(InvalidArgument, match="the same topic"):
        jobs.incremental(spark, tmp_path / "raw", tmp_path / "raw")
    assert not (tmp_path / "nothing").exists()


def test_target_that_a_queue_has_open_gets_the_rows(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, rows(5), "raw")
    put(tmp_path, rows(5, 100), "copy")
    with writer(tmp_path, "copy") as queue:
        queue.put_batch(rows(5, 105))
        for _ in range(2):
            jobs.incremental(spark, tmp_path / "raw", tmp_path / "copy")
        queue.put_batch(rows(5, 110))
    assert ids(tmp_path, "copy") == [*range(5), *range(100, 115)]


def test_new_fields_of_the_source_are_copied(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, rows(4), "raw")
    jobs.incremental(spark, tmp_path / "raw", tmp_path / "copy", num_buckets=1)
    put(tmp_path, [{"id": 4, "text": "x", "score": 1.0, "even": True, "extra": [1.5]}], "raw")
    jobs.incremental(spark, tmp_path / "raw", tmp_path / "copy")
    found = {row["id"]: row.get("extra") for row in stored(tmp_path, "copy")}
    assert found == {0: None, 1: None, 2: None, 3: None, 4: [1.5]}


def test_topics_that_were_moved_together_continue(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path / "old", rows(10), "raw")
    jobs.incremental(spark, tmp_path / "old" / "raw", tmp_path / "old" / "copy", num_buckets=1)
    shutil.move(tmp_path / "old", tmp_path / "new")
    put(tmp_path / "new", rows(5, 10), "raw")
    done = jobs.incremental(spark, tmp_path / "new" / "raw", tmp_path / "new" / "copy")
    assert done.rows == 5
    assert ids(tmp_path / "new", "copy") == list(range(15))


def test_concurrent_runs_wait_for_each_other(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, rows(40), "raw")

    def step(_: int) -> int:
        return jobs.incremental(
            spark, tmp_path / "raw", tmp_path / "copy", num_buckets=1, max_rows_per_batch=10
        ).rows

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(step, range(2))) == [0, 40]
    assert ids(tmp_path, "copy") == list(range(40))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_runs_lose_no_rows_and_store_none_twice(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "topics"
    put(folder, rows(3000), "raw")
    (folder / "copy").mkdir()
    for number, delay in enumerate((0.0, 0.3, 0.6, 1.0, 1.5, 2.0)):
        home = tmp_path / str(number)
        home.mkdir()
        with Run(home, STEPS, folder / "raw", folder / "copy") as run:
            checkpoint = folder / "copy" / "checkpoints" / "raw" / "spark" / "offsets"
            before = set(checkpoint.glob("*"))
            while run.process.poll() is None and set(checkpoint.glob("*")) == before:
                time.sleep(0.01)
            time.sleep(delay)
            run.process.kill()
        put(folder, rows(100, 3000 + 100 * number), "raw")
    jobs.incremental(spark, folder / "raw", folder / "copy")
    assert ids(folder, "copy") == list(range(3600))


STEPS = """
import sys
from persisting.spark import jobs, session

spark = session(master="local[2]")
done = jobs.incremental(
    spark, sys.argv[1], sys.argv[2], num_buckets=2, max_rows_per_batch=300
)
result = {"rows": done.rows}
"""
