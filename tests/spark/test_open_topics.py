"""Topics stay open where Spark plans, and every query sees their newest version."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.spark.topics import load, put, rows, writer

from persisting.spark import open_topics
from persisting.spark.open_topics import open_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process keep topics open."""
    monkeypatch.setattr(open_topics, "is_planner", lambda: True)
    monkeypatch.setattr(open_topics, "_kept", type(open_topics._kept)())


def count(folder: Path) -> int:
    """Return how many rows a topic has, as the next query sees it."""
    topic = open_topic(folder)
    return sum(topic.view(bucket).rows for bucket in topic.buckets)


def indexed(home: Path, records: list[dict[str, Any]]) -> Path:
    with writer(home) as queue:
        queue.put_batch(records)
        queue.flush()
        queue.create_index("id", kind="scalar")
    return home / "t"


def found(spark: SparkSession, home: Path, number: int) -> list[dict[str, Any]]:
    return [row.asDict() for row in load(spark, home).where(f"id = {number}").collect()]


@pytest.mark.usefixtures("planner")
class TestKept:
    def test_tables_stay_open_from_one_query_to_the_next(self, tmp_path: Path) -> None:
        folder = put(tmp_path, rows(10))
        opened = open_topic(folder)
        datasets = [opened.view(bucket).dataset for bucket in opened.buckets]
        again = open_topic(folder)
        assert [again.view(bucket).dataset for bucket in again.buckets] == datasets

    def test_later_rows_and_fields_are_seen(self, tmp_path: Path) -> None:
        folder = put(tmp_path, rows(10))
        assert count(folder) == 10
        put(tmp_path, [{"id": 10, "later": 1}])
        assert count(folder) == 11
        assert "later" in open_topic(folder).schema().names

    def test_recreated_topic_is_opened_again(self, tmp_path: Path) -> None:
        folder = put(tmp_path, rows(10))
        assert count(folder) == 10
        shutil.rmtree(folder)
        put(tmp_path, rows(3), buckets=1)
        assert count(folder) == 3

    def test_topic_replaced_by_an_older_copy_is_opened_again(self, tmp_path: Path) -> None:
        folder = put(tmp_path, rows(10))
        shutil.copytree(folder, tmp_path / "copy")
        put(tmp_path, rows(5, 10))
        assert count(folder) == 15
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "copy", folder)
        assert count(folder) == 10

    def test_removed_tables_are_noticed(self, tmp_path: Path) -> None:
        folder = put(tmp_path, rows(10))
        assert count(folder) == 10
        for table in folder.glob("bucket_*"):
            shutil.rmtree(table)
        assert count(folder) == 0

    def test_number_of_tables_kept_open_is_limited(self, tmp_path: Path) -> None:
        folders = [put(tmp_path, rows(2), f"t{number}", buckets=7) for number in range(3)]
        kept = [open_topic(folder) for folder in folders]
        assert open_topic(folders[2]) is kept[2]
        assert open_topic(folders[0]) is not kept[0]
        many = put(tmp_path, rows(2), "many", buckets=17)
        assert open_topic(many) is not open_topic(many)

    @pytest.mark.parametrize("limit", [0, 1_000_000])
    def test_memory_of_a_kept_table_is_limited(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
    ) -> None:
        monkeypatch.setattr(open_topics, "_CACHE_BYTES", limit)
        dataset: Any = open_topic(indexed(tmp_path, rows(10))).view(0).dataset
        assert dataset.count_rows("id IN (3, 4, 5, 6)")
        assert (dataset.session().size_bytes() > 1000) == (limit > 0)


def test_processes_that_do_not_plan_queries_keep_no_topics_open(tmp_path: Path) -> None:
    folder = put(tmp_path, rows(10))
    assert open_topic(folder) is not open_topic(folder)


class TestQueries:
    def test_look_ups_see_what_was_written_between_them(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        indexed(tmp_path, rows(10))
        assert found(spark, tmp_path, 10) == []
        put(tmp_path, rows(5, 10))
        assert [row["text"] for row in found(spark, tmp_path, 10)] == ["row 10"]
        put(tmp_path, [{"id": 10, "later": "x"}])
        assert sorted(str(row["later"]) for row in found(spark, tmp_path, 10)) == ["None", "x"]

    def test_look_ups_see_a_restored_version(self, spark: SparkSession, tmp_path: Path) -> None:
        with writer(tmp_path) as queue:
            queue.put_batch(rows(10))
            queue.flush()
            queue.create_index("id", kind="scalar")
            queue.tag("ten")
            queue.put_batch(rows(5, 10))
            queue.flush()
            assert len(found(spark, tmp_path, 12)) == 1
            queue.restore("ten")
            assert found(spark, tmp_path, 12) == []
            assert len(found(spark, tmp_path, 3)) == 1

    def test_look_ups_see_a_topic_in_the_place_of_another(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        folder = indexed(tmp_path, rows(10))
        assert found(spark, tmp_path, 3)[0]["text"] == "row 3"
        shutil.rmtree(folder)
        with pytest.raises(Exception, match="no topic"):
            found(spark, tmp_path, 3)
        indexed(tmp_path, [{"id": 3, "text": "another"}])
        assert found(spark, tmp_path, 3) == [{"id": 3, "text": "another"}]
