"""Spark beside a queue that has the topic open: reads with a flush, and writes of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.handover import OWNER, files_of_handovers, held_process
from support.held_process import killed_at
from support.spark.topics import ids, load, put, refused, rows, stored, unreferenced, writer
from support.spark.writes import SparkPipe

from persisting.errors import InvalidArgument
from persisting.spark import read_topic, session
from persisting.spark.source_options import read_options, write_options
from persisting.table.files import HANDED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class TestFlush:
    def test_read_with_flush_sees_what_this_process_has_acknowledged(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """The owner is in the process of the driver."""
        with writer(tmp_path) as queue:
            queue.put_batch(rows(10))
            assert load(spark, tmp_path).count() == 0
            assert read_topic(spark, tmp_path / "t", flush=True).count() == 10
            queue.put_batch(rows(5, 10))
            assert load(spark, tmp_path).count() == 10
            df = load(spark, tmp_path, flush=True)
            assert sorted(row["id"] for row in df.collect()) == list(range(15))
            assert files_of_handovers(tmp_path / "t") == []

    def test_read_with_flush_sees_what_another_process_has_acknowledged(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [], enable_wal=True)
        with held_process(tmp_path, OWNER, 0) as owner:
            owner.until(lambda: owner.acknowledged > 10)
            acknowledged = owner.acknowledged
            found = sorted(r["id"] for r in load(spark, tmp_path, flush=True).collect())
        assert found[:acknowledged] == list(range(acknowledged))

    def test_stream_with_flush_takes_what_was_acknowledged(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, "in") as queue:
            queue.put_batch(rows(10))
            pipe = SparkPipe(spark, tmp_path)
            pipe.run({"flush": True}, numBuckets=1)
            assert ids(tmp_path, "out") == list(range(10))

    def test_read_with_flush_names_an_owner_that_is_stopped_and_leaves_no_request(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        topic = put(tmp_path, [], buckets=2, enable_wal=True)
        with held_process(tmp_path, OWNER, 0) as owner:
            owner.until(lambda: owner.acknowledged > 10)
            owner.stop()
            words = (
                rf"is open for writing by process {owner.process.pid} .*did not flush within "
                r"0\.5 s; nothing was changed.*the option ownerTimeout"
            )
            with refused("BucketLocked", words):
                read_topic(spark, topic, flush=True, ownerTimeout=0.5).count()
            assert files_of_handovers(topic) == []

    @pytest.mark.nightly
    def test_stream_with_flush_names_an_owner_that_is_stopped_and_leaves_no_request(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        topic = put(tmp_path, [], "in", buckets=1, enable_wal=True)
        with held_process(tmp_path, OWNER, 0, "in") as owner:
            owner.until(lambda: owner.acknowledged > 10)
            owner.stop()
            words = (
                rf"process {owner.process.pid} .*did not flush within 0\.5 s; nothing was changed"
            )
            with refused("BucketLocked", words):
                SparkPipe(spark, tmp_path).run({"flush": True, "ownerTimeout": 0.5}, numBuckets=1)
            assert files_of_handovers(topic) == []

    def test_flush_of_an_older_version_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="options flush and tag contradict each other"):
            read_options({"path": "/t", "flush": "true", "tag": "x"})

    @pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan"])
    def test_owner_timeout_that_is_not_a_number_of_seconds_is_refused(self, value: str) -> None:
        for parse in (read_options, write_options):
            with pytest.raises(
                InvalidArgument, match=r"ownerTimeout=.* must be a number of seconds"
            ):
                parse({"path": "/t", "ownerTimeout": value})


class TestSql:
    def test_statements_write_to_a_live_queue_and_read_from_it(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        with writer(tmp_path, "steps") as queue, writer(tmp_path, "good") as target:
            queue.put_batch(rows(10))
            target.put_batch(rows(1, 100))
            named = session(topics=tmp_path)
            named.sql(
                "INSERT INTO persisting.good SELECT * FROM persisting.steps "
                "WITH ('flush' = 'true') WHERE even"
            )
            target.put_batch(rows(1, 101))
            assert ids(tmp_path, "good") == [0, 2, 4, 6, 8, 100, 101]
            named.sql("INSERT OVERWRITE persisting.good SELECT * FROM persisting.steps LIMIT 1")
            target.put_batch(rows(1, 102))
        assert len(stored(tmp_path, "good")) == 2


def test_owner_killed_while_spark_writes_loses_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """The driver takes the lock of the dead owner."""
    put(tmp_path, [], enable_wal=True)
    with held_process(tmp_path, OWNER, 1000, hold="owner-commits") as owner:
        owner.until(lambda: owner.acknowledged > 1000)
        with killed_at(owner, "owner-commits"):
            frame = spark.range(100).selectExpr("id", "concat('row ', id) text")
            frame.write.format("persisting").mode("append").save(str(tmp_path / "t"))
        acknowledged = owner.acknowledged
    found = ids(tmp_path)
    assert [n for n in found if n < 1000] == list(range(100))
    own = [n for n in found if n >= 1000]
    assert own == list(range(1000, 1000 + len(own)))
    assert len(own) >= acknowledged - 1000
    # The owner may have died while it wrote the arrival times of the other bucket's rows.
    assert not [name for name in unreferenced(tmp_path) if name.startswith(HANDED)]
