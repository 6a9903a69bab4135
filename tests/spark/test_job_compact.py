"""Compaction on executors: fragments become larger, and every row keeps its offset."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from support.spark.processes import Run
from support.spark.topics import content, put, reader, rows, writer

from persisting import fs
from persisting.errors import BucketLocked, InvalidArgument, NoSuchTopic, TableError
from persisting.spark import jobs, read_topic
from persisting.table import compaction
from persisting.table.compaction import Limit
from persisting.table.table import Table
from persisting.table.view import TableView

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL: dict[str, Any] = {"retention_rows": 8192}
"""With this retention, 1024 rows are a full fragment."""

DATA = "bucket_*/data.lance/data/*"


def flushed(folder: Path, flushes: int, each: int, **options: Any) -> Path:
    """Make a topic of two buckets with many small fragments."""
    with writer(folder, **SMALL, **options) as queue:
        for number in range(flushes):
            queue.put_batch(rows(each, number * each))
            queue.flush()
    return folder / "t"


def located(spark: SparkSession, topic: Path) -> list[tuple[Any, ...]]:
    """Return every row with its offset and time."""
    found = read_topic(spark, topic, includeMetadata=True).collect()
    return sorted(tuple(row) for row in found)


def fragments(folder: Path) -> int:
    with reader(folder) as queue:
        return sum(one["fragments"] for one in queue.stats()["buckets"])


@pytest.fixture(scope="module")
def done(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compact a topic; return the result with the rows before and after."""
    folder = tmp_path_factory.mktemp("compact")
    topic = flushed(folder, 25, 200)
    with reader(folder) as queue:
        queue.tag("before")
    before = located(spark, topic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "execute", not_here)
        result = jobs.compact(spark, topic)
    after = located(spark, topic)
    return {"folder": folder, "result": result, "before": before, "after": after}


class TestCompact:
    def test_compaction_leaves_every_row_at_its_offset(self, done: dict[str, Any]) -> None:
        assert len(done["before"]) == 5000
        assert done["after"] == done["before"]

    def test_compaction_writes_each_full_fragment_in_one_task(self, done: dict[str, Any]) -> None:
        result = done["result"]
        assert result["fragments_before"] == 50
        assert result["tasks"] == result["fragments_after"] == 6
        assert result["rows"] == 5000
        assert set(result["buckets"]) == {0, 1}
        for one in result["buckets"].values():
            assert one["tasks"] == 3

    def test_compaction_is_one_commit_per_bucket(self, done: dict[str, Any]) -> None:
        for bucket in done["folder"].glob("t/bucket_*"):
            newest = lance.dataset(bucket / "data.lance")
            counts = [
                len(newest.checkout_version(one["version"]).get_fragments())
                for one in newest.versions()
            ]
            assert set(counts[counts.index(25) :]) == {25, 3}

    def test_compaction_records_checksums_of_all_files(self, done: dict[str, Any]) -> None:
        with reader(done["folder"]) as queue:
            report = queue.verify()
        assert report["ok"]
        assert report["unchecked"] == []

    def test_tags_stay_readable_after_compaction(
        self, spark: SparkSession, done: dict[str, Any]
    ) -> None:
        tagged = read_topic(spark, done["folder"] / "t", tag="before", includeMetadata=True)
        assert sorted(tuple(row) for row in tagged.collect()) == done["before"]

    def test_second_compaction_finds_nothing_to_do(
        self, spark: SparkSession, done: dict[str, Any]
    ) -> None:
        again = jobs.compact(spark, done["folder"], "t")
        assert (again["tasks"], again["rows"]) == (0, 0)
        assert again["fragments_before"] == again["fragments_after"] == 6

    def test_queue_continues_after_compaction(self, done: dict[str, Any]) -> None:
        put(done["folder"], rows(10, 5000))
        found = content(done["folder"])
        assert sorted(r["id"] for part in found.values() for r in part) == list(range(5010))


def not_here(*_: Any) -> None:
    raise AssertionError("the driver executes a task")


def test_indexed_rows_are_found_after_compaction(spark: SparkSession, tmp_path: Path) -> None:
    topic = flushed(tmp_path, 6, 50)
    with reader(tmp_path) as queue:
        queue.create_index("id")
        queue.create_index("text")
    with writer(tmp_path) as queue:
        for number in range(6, 10):
            queue.put_batch(rows(50, number * 50))
            queue.flush()
    before = content(tmp_path)
    result = jobs.compact(spark, topic)
    assert result["fragments_after"] == 2
    assert content(tmp_path) == before
    with reader(tmp_path) as queue:
        assert [r["text"] for r in queue.lookup("id", 7)] == ["row 7"]
        assert [r["id"] for r in queue.search(text="444", column="text")] == [444]
        assert {one["behind"] for one in queue.indexes()} == {0}


def test_compaction_of_some_buckets_leaves_the_others(spark: SparkSession, tmp_path: Path) -> None:
    topic = flushed(tmp_path, 4, 20)
    result = jobs.compact(spark, topic, buckets=[1])
    assert list(result["buckets"]) == [1]
    with reader(tmp_path) as queue:
        assert [one["fragments"] for one in queue.stats()["buckets"]] == [4, 1]
    with pytest.raises(InvalidArgument, match="bucket 2 does not exist"):
        jobs.compact(spark, topic, buckets=[2])


def test_compaction_of_an_open_topic_names_its_owner(spark: SparkSession, tmp_path: Path) -> None:
    topic = flushed(tmp_path, 3, 20)
    with writer(tmp_path) as queue:
        queue.put_batch(rows(20, 60))
        with pytest.raises(BucketLocked, match=rf"process {os.getpid()}.*compact\(\) on its queue"):
            jobs.compact(spark, topic)
    assert fragments(tmp_path) == 8


def test_compaction_of_a_missing_topic_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NoSuchTopic, match="nothing"):
        jobs.compact(spark, tmp_path, "nothing")


def test_compaction_that_fails_in_a_task_changes_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    topic = flushed(tmp_path, 4, 20)
    whole = {path: path.read_bytes() for path in topic.glob(DATA)}
    first = lance.dataset(topic / "bucket_1" / "data.lance").get_fragments()[0].metadata.files[0]
    damaged = topic / "bucket_1" / "data.lance" / "data" / first.path
    damaged.write_bytes(whole[damaged][:-8] + bytes(8))
    with pytest.raises(TableError, match="cannot compact"):
        jobs.compact(spark, topic)
    damaged.write_bytes(whole[damaged])
    assert set(topic.glob("bucket_1/data.lance/data/*")) == {
        p for p in whole if "bucket_1" in p.parts
    }
    assert sorted(r["id"] for part in content(tmp_path).values() for r in part) == list(range(80))
    assert jobs.compact(spark, topic)["fragments_after"] == 2


class TestTasks:
    """The tasks of a compaction, without Spark."""

    @pytest.fixture
    def table(self, tmp_path: Path) -> Table:
        table = Table(tmp_path, fs.current())
        schema = pa.schema([("n", pa.int64())])
        for sequence in range(6):
            batch = pa.record_batch([pa.array(range(sequence * 10, sequence * 10 + 10))], schema)
            times = pa.array([sequence] * 10, pa.timestamp("us", tz="UTC"))
            table.append([(batch, times)], schema, sequence)
        return table

    def numbers(self, view: TableView) -> list[int]:
        return [n for batch in view.batches(0, view.rows) for n in batch.column(0).to_pylist()]

    def test_compaction_tasks_may_run_in_any_order(self, table: Table) -> None:
        view = table.view

        def work(dataset: Any) -> None:
            tasks = compaction.plan(dataset, view, 6, Limit(20, 2**40))
            assert [len(json.loads(task)["task"]["fragments"]) for task in tasks] == [2, 2, 2]
            done = [compaction.execute(dataset, t, table.root, fs.current()) for t in tasks[::-1]]
            compaction.commit(dataset, view, 6, done)

        table.committer.change("compact", work, several=True)
        assert len(table.view.sizes) == 3
        assert self.numbers(table.view) == list(range(60))

    @pytest.mark.parametrize("wrong", ["missing", "twice"])
    def test_compaction_tasks_must_each_run_once(self, table: Table, wrong: str) -> None:
        view = table.view

        def run(tasks: list[str]) -> list[dict[str, Any]]:
            dataset = table.view.dataset
            done = [compaction.execute(dataset, t, table.root, fs.current()) for t in tasks]
            return done[1:] if wrong == "missing" else [*done, done[0]]

        def work(dataset: Any) -> None:
            compaction.rewrite(dataset, view, 6, Limit(20, 2**40), table.root, fs.current(), run)

        with pytest.raises(TableError, match="was planned for fragments"):
            table.committer.change("compact", work, several=True)
        assert table.view.version == view.version
        assert self.numbers(table.view) == list(range(60))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_compaction_works_on_separate_executors(tmp_path: Path) -> None:
    flushed(tmp_path, 25, 200)
    before = content(tmp_path)
    home = tmp_path / "run"
    home.mkdir()
    with Run(home, COMPACTS, tmp_path / "t", "local-cluster[2,1,1024]") as run:
        run.finish()
    assert run.result["fragments_after"] == run.result["tasks"] == 6
    assert content(tmp_path) == before


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_killed_compaction_loses_nothing(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "topics"
    flushed(folder, 40, 200)
    before = content(folder)
    versions = tmp_path.glob("topics/t/bucket_*/data.lance/_versions/*.manifest")
    there = len(list(versions))
    assert there
    for delay in (0.0, 0.1, 0.2, 0.4, 0.8):
        home = tmp_path / f"run{delay}"
        home.mkdir()
        with Run(home, COMPACTS, folder / "t", "local[2]") as run:
            changing = [folder / "t" / f"bucket_{b}" / "changing" for b in (0, 1)]
            while run.process.poll() is None and not any(p.exists() for p in changing):
                time.sleep(0.005)
            time.sleep(delay)
            os.kill(run.process.pid, signal.SIGKILL)
        assert content(folder) == before
    assert jobs.compact(spark, folder / "t")["fragments_after"] == 8
    assert content(folder) == before


COMPACTS = """
import sys
from persisting.spark import jobs, session

spark = session(master=sys.argv[2])
result = jobs.compact(spark, sys.argv[1])
"""
