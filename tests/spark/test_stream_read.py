"""Streaming reads: every row is read once, across restarts, new fields and compaction, and while a
queue writes. Rows lost to retention or a restore are an error, unless the options allow it."""

from __future__ import annotations

import datetime as dt
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.children import python, wait_for_line
from support.spark.streams import DirectFlow, Flow, SparkFlow
from support.spark.topics import (
    OWNER_OF_50_RECORDS,
    content,
    crashed_owner,
    ids,
    load,
    put,
    put_in_flushes,
    refused,
    rows,
    save,
    writer,
)

from persisting.errors import StorageError
from persisting.spark import stream_offsets
from persisting.topic.routing import bucket_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UTC = dt.timezone.utc
Fails = Callable[[str], Any]


@pytest.fixture(params=["direct", pytest.param("spark", marks=pytest.mark.nightly)])
def flow(request: pytest.FixtureRequest, tmp_path: Path) -> Flow:
    """Stream the topic ``t``: with Spark's calls; nightly also with Spark itself."""
    if request.param == "direct":
        return DirectFlow(tmp_path)
    return SparkFlow(request.getfixturevalue("spark"), tmp_path)


@pytest.fixture
def by_spark(spark: SparkSession, tmp_path: Path) -> SparkFlow:
    return SparkFlow(spark, tmp_path)


@pytest.fixture
def fails(flow: Flow) -> Fails:
    """Expect an error with these words from a run."""

    def words(text: str) -> Any:
        if isinstance(flow, DirectFlow):
            return pytest.raises(StorageError, match=text)
        from pyspark.errors import PySparkException

        return pytest.raises(PySparkException, match=text)

    return words


def numbers(found: list[dict[str, Any]]) -> list[int]:
    return sorted(r["id"] for r in found)


def rows_up_to(offset: dict[str, Any]) -> int:
    return sum(place.offset for place in stream_offsets.decode(offset).values())


class TestRun:
    def test_each_run_takes_only_rows_that_are_new(
        self, by_spark: SparkFlow, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(30), buckets=3)
        assert numbers(by_spark.run()) == list(range(30))
        assert by_spark.run() == []
        put(tmp_path, rows(5, 30))
        assert numbers(by_spark.run(maxOffsetsPerTrigger=2)) == list(range(30, 35))
        assert by_spark.batches == [30, 2, 2, 1]

    def test_direct_stream_behaves_like_a_stream_of_spark(self, tmp_path: Path) -> None:
        """The tests that run without Spark rely on this."""
        flow = DirectFlow(tmp_path)
        put(tmp_path, rows(30), buckets=3)
        assert numbers(flow.run()) == list(range(30))
        assert flow.run() == []
        put(tmp_path, rows(5, 30))
        assert numbers(flow.run(maxOffsetsPerTrigger=2)) == list(range(30, 35))
        assert flow.batches == [30, 2, 2, 1]

    def test_stream_keeps_the_order_of_each_bucket(self, flow: Flow, tmp_path: Path) -> None:
        put(tmp_path, rows(40), buckets=3)
        found = flow.run(rowsPerPartition=4, maxOffsetsPerTrigger=15)
        by_bucket: dict[int, list[int]] = {}
        for record in found:
            by_bucket.setdefault(bucket_of(record["id"], 3), []).append(record["id"])
        if isinstance(flow, DirectFlow):
            assert all(some == sorted(some) for some in by_bucket.values())
        assert numbers(found) == list(range(40))

    def test_stream_of_an_empty_topic_waits_for_records(self, flow: Flow, tmp_path: Path) -> None:
        put(tmp_path, [])
        assert flow.run() == []
        put(tmp_path, rows(5))
        assert numbers(flow.run()) == list(range(5))

    def test_stream_reads_the_log_of_a_crashed_owner(self, flow: Flow, tmp_path: Path) -> None:
        crashed_owner(tmp_path)
        assert numbers(flow.run()) == list(range(50))

    def test_running_stream_reads_the_log_of_an_owner_that_crashes(self, tmp_path: Path) -> None:
        with python(OWNER_OF_50_RECORDS, tmp_path) as child:
            wait_for_line(child)
            reader, limit = DirectFlow(tmp_path).reader({})
            start = reader.initialOffset()
            assert rows_up_to(reader.latestOffset(start, limit)) == 20
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert rows_up_to(reader.latestOffset(start, limit)) == 50

    def test_stream_reads_rows_once_they_are_flushed(self, flow: Flow, tmp_path: Path) -> None:
        with writer(tmp_path, enable_wal=True) as queue:
            queue.put_batch(rows(4))
            queue.flush()
            queue.put_batch(rows(4, 4))
            assert numbers(flow.run()) == list(range(4))
            queue.flush()
            assert numbers(flow.run()) == list(range(4, 8))

    def test_repeated_micro_batch_has_the_same_rows(self, tmp_path: Path) -> None:
        flow = DirectFlow(tmp_path)
        put(tmp_path, rows(10))
        flow.plan(maxOffsetsPerTrigger=4)
        put(tmp_path, rows(10, 10))
        with writer(tmp_path) as queue:
            queue.compact()
        assert len(flow.run()) == 20
        assert flow.batches == [4, 16]

    def test_available_now_ends_where_the_topic_ended_at_the_start(self, tmp_path: Path) -> None:
        put(tmp_path, rows(10))
        flow = DirectFlow(tmp_path)
        reader, limit = flow.reader({})
        reader.prepareForTriggerAvailableNow()
        start = reader.initialOffset()
        put(tmp_path, rows(10, 10))
        end = reader.latestOffset(start, limit)
        assert rows_up_to(end) == 10
        assert reader.latestOffset(end, limit) == end
        assert rows_up_to(reader.reportLatestOffset()) == 20


class TestLimits:
    @pytest.mark.parametrize("most", [1, 2, 7])
    def test_limit_per_trigger_is_kept_and_all_rows_are_read(
        self, flow: Flow, tmp_path: Path, most: int
    ) -> None:
        put(tmp_path, rows(11), buckets=4)
        assert numbers(flow.run(maxOffsetsPerTrigger=most)) == list(range(11))
        assert max(flow.batches) <= most
        assert len(flow.batches) == -(-11 // most)

    def test_limit_per_trigger_is_divided_among_buckets(self, tmp_path: Path) -> None:
        put(tmp_path, rows(40), buckets=2)
        found = DirectFlow(tmp_path).run(maxOffsetsPerTrigger=10)
        first = found[:10]
        assert [sum(bucket_of(r["id"], 2) == b for r in first) for b in (0, 1)] == [5, 5]


class TestStartingPosition:
    def test_stream_starts_at_the_earliest_offset_by_default(
        self, flow: Flow, tmp_path: Path
    ) -> None:
        with writer(tmp_path, buckets=1) as queue:
            put_in_flushes(queue, 12, 4)
            queue.retain(rows=8)
        assert numbers(flow.run()) == list(range(4, 12))

    def test_stream_may_start_at_the_latest_offsets(self, flow: Flow, tmp_path: Path) -> None:
        put(tmp_path, rows(10))
        assert flow.run(startingOffsets="latest") == []
        put(tmp_path, rows(3, 10))
        assert numbers(flow.run(startingOffsets="latest")) == [10, 11, 12]

    def test_stream_may_start_at_given_offsets(self, flow: Flow, tmp_path: Path) -> None:
        put(tmp_path, rows(20), buckets=2)
        found = flow.run(startingOffsets='{"0": 3}', includeMetadata=True)
        sizes = {bucket: len(some) for bucket, some in content(tmp_path).items()}
        got = sorted((r["_bucket"], r["_offset"]) for r in found)
        assert got == [*((0, o) for o in range(3, sizes[0])), *((1, o) for o in range(sizes[1]))]

    def test_stream_may_start_at_a_timestamp(self, flow: Flow, tmp_path: Path) -> None:
        put(tmp_path, rows(5))
        moment = dt.datetime.now(UTC).isoformat()
        put(tmp_path, rows(5, 5))
        assert numbers(flow.run(startingTimestamp=moment)) == list(range(5, 10))

    def test_starting_position_is_ignored_after_a_restart(self, flow: Flow, tmp_path: Path) -> None:
        put(tmp_path, rows(5))
        assert len(flow.run()) == 5
        put(tmp_path, rows(5, 5))
        assert numbers(flow.run(startingOffsets="latest")) == list(range(5, 10))


class TestFilters:
    def test_filter_applies_after_the_limit_per_trigger(self, flow: Flow, tmp_path: Path) -> None:
        """The limit counts offsets, not rows that pass the filter."""
        put(tmp_path, rows(40), buckets=1)
        found = flow.run(
            filter="id % 10 = 3", columns="id", includeMetadata=True, maxOffsetsPerTrigger=8
        )
        assert numbers(found) == [3, 13, 23, 33]
        assert {r["_offset"] for r in found} == {3, 13, 23, 33}
        put(tmp_path, rows(4, 40))
        assert numbers(flow.run(filter="id % 10 = 3", columns="id")) == [43]

    def test_filter_still_works_when_the_topic_gets_a_field(self, tmp_path: Path) -> None:
        put(tmp_path, rows(6), buckets=1)
        flow = DirectFlow(tmp_path)
        reader, limit = flow.reader({"filter": "id > 3"})
        start = reader.initialOffset()
        put(tmp_path, [{"id": 6, "new": 1}, {"id": 7, "new": 1.5}])
        found = flow.rows(reader, start, reader.latestOffset(start, limit))
        assert numbers(found) == [4, 5, 6, 7]


class TestSchema:
    def test_new_fields_appear_after_a_restart(self, by_spark: SparkFlow, tmp_path: Path) -> None:
        put(tmp_path, [{"id": 1, "x": 1}], buckets=1)
        assert by_spark.run() == [{"id": 1, "x": 1}]
        put(tmp_path, [{"id": 2, "x": 0.5, "new": "n"}])
        assert by_spark.run() == [{"id": 2, "x": 0.5, "new": "n"}]

    def test_planned_batch_leaves_out_fields_that_were_added_later(self, tmp_path: Path) -> None:
        put(tmp_path, [{"id": 1, "x": 1}], buckets=1)
        flow = DirectFlow(tmp_path)
        reader, limit = flow.reader({})
        start = reader.initialOffset()
        put(tmp_path, [{"id": 2, "x": 2, "new": "n"}])
        found = flow.rows(reader, start, reader.latestOffset(start, limit))
        assert found == [{"id": 1, "x": 1}, {"id": 2, "x": 2}]

    def test_field_that_no_longer_fits_the_schema_raises(self, tmp_path: Path) -> None:
        put(tmp_path, [{"id": 1, "x": 1}], buckets=1)
        flow = DirectFlow(tmp_path)
        reader, limit = flow.reader({})
        start = reader.initialOffset()
        put(tmp_path, [{"id": 2, "x": 0.5}])
        end = reader.latestOffset(start, limit)
        with pytest.raises(StorageError, match=r"'x'.*(restart|again)"):
            flow.rows(reader, start, end)


class TestRetention:
    @pytest.fixture
    def shortened(self, flow: Flow, tmp_path: Path) -> Path:
        """The stream has read 4 of 16 rows; retention removed 8 of the others."""
        put(tmp_path, rows(4), buckets=1)
        assert numbers(flow.run()) == list(range(4))
        with writer(tmp_path) as queue:
            for first in range(4, 16, 4):
                queue.put_batch(rows(4, first))
                queue.flush()
            queue.retain(rows=4)
        return tmp_path

    def test_unread_rows_removed_by_retention_are_an_error(
        self, flow: Flow, fails: Fails, shortened: Path
    ) -> None:
        for _ in range(2):
            with fails("4 to 12 of bucket 0.*retention.*failOnDataLoss=false"):
                flow.run()

    def test_unread_rows_removed_by_retention_are_skipped_on_request(
        self, flow: Flow, shortened: Path
    ) -> None:
        assert numbers(flow.run(failOnDataLoss=False)) == list(range(12, 16))
        put(shortened, rows(2, 16))
        assert numbers(flow.run()) == [16, 17]

    def test_retention_of_rows_already_read_is_not_a_loss(self, flow: Flow, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=1) as queue:
            put_in_flushes(queue, 12, 4)
            assert len(flow.run()) == 12
            queue.retain(rows=4)
            queue.put_batch(rows(4, 12))
            queue.flush()
        assert numbers(flow.run()) == list(range(12, 16))

    def test_retention_is_noticed_by_a_stream_that_started_on_an_empty_topic(
        self, flow: Flow, fails: Fails, tmp_path: Path
    ) -> None:
        """Its checkpoint has offset 0, though it has read nothing yet."""
        put(tmp_path, [], buckets=1)
        assert flow.run() == []
        with writer(tmp_path) as queue:
            put_in_flushes(queue, 12, 4)
            queue.retain(rows=4)
        with fails("0 to 8 of bucket 0.*retention"):
            flow.run()
        assert numbers(flow.run(failOnDataLoss=False)) == list(range(8, 12))

    def test_retention_of_planned_rows_is_noticed(self, tmp_path: Path) -> None:
        flow = DirectFlow(tmp_path)
        with writer(tmp_path, buckets=1) as queue:
            put_in_flushes(queue, 12, 4)
            flow.plan()
            queue.retain(rows=4)
        with pytest.raises(StorageError, match=r"0 to 8 of bucket 0.*retention"):
            flow.run()
        assert numbers(flow.run(failOnDataLoss=False)) == list(range(8, 12))

    def test_retention_of_all_planned_rows_leaves_an_empty_batch(self, tmp_path: Path) -> None:
        flow = DirectFlow(tmp_path)
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(rows(4))
            queue.flush()
            flow.plan()
            queue.put_batch(rows(4, 4))
            queue.flush()
            queue.retain(rows=4)
        assert numbers(flow.run(failOnDataLoss=False)) == list(range(4, 8))
        assert flow.batches == [0, 4]


class TestRestores:
    @pytest.fixture
    def restored(self, flow: Flow, tmp_path: Path) -> Path:
        """The stream has read 8 rows; a restore removed the last 4, and others were put."""
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(rows(4))
            queue.tag("four")
            queue.put_batch(rows(4, 4))
            queue.flush()
            assert len(flow.run()) == 8
            queue.restore("four")
            queue.put_batch(rows(6, 100))
        return tmp_path

    def test_restore_that_removes_rows_already_read_is_an_error(
        self, flow: Flow, fails: Fails, restored: Path
    ) -> None:
        for _ in range(2):
            with fails("bucket 0.*restored.*offset 4.*reached 8.*failOnDataLoss=false"):
                flow.run()

    def test_restore_that_removes_rows_already_read_is_followed_on_request(
        self, flow: Flow, restored: Path
    ) -> None:
        assert numbers(flow.run(failOnDataLoss=False)) == list(range(100, 106))
        put(restored, rows(2, 200))
        assert numbers(flow.run()) == [200, 201]

    def test_restore_that_keeps_rows_already_read_is_not_a_loss(
        self, flow: Flow, tmp_path: Path
    ) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(rows(4))
            queue.flush()
            assert len(flow.run()) == 4
            queue.put_batch(rows(2, 4))
            queue.tag("six")
            queue.put_batch(rows(4, 50))
            queue.restore("six")
            queue.put_batch(rows(2, 6))
        assert numbers(flow.run()) == [4, 5, 6, 7]

    def test_restore_of_planned_rows_is_noticed(self, tmp_path: Path) -> None:
        flow = DirectFlow(tmp_path)
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(rows(4))
            queue.tag("four")
            queue.put_batch(rows(4, 4))
            queue.flush()
            flow.plan()
            queue.restore("four")
            queue.put_batch(rows(2, 100))
            queue.flush()
        with pytest.raises(StorageError, match="restored"):
            flow.run()
        assert numbers(flow.run(failOnDataLoss=False)) == [0, 1, 2, 3, 100, 101]

    def test_several_restores_are_followed_on_request(self, flow: Flow, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=2) as queue:
            queue.put_batch(rows(10))
            queue.tag("ten")
            assert len(flow.run()) == 10
            for turn in (100, 200, 300):
                queue.put_batch(rows(5, turn))
                queue.flush()
                assert len(flow.run(failOnDataLoss=False)) == 5
                queue.restore("ten")
        assert flow.run(failOnDataLoss=False) == []
        put(tmp_path, rows(3, 400))
        assert numbers(flow.run()) == [400, 401, 402]

    def test_overwritten_topic_is_treated_as_restored(
        self, by_spark: SparkFlow, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(10))
        assert len(by_spark.run()) == 10
        save(spark.range(100, 105), tmp_path, mode="overwrite")
        with refused("StorageError", "restored.*failOnDataLoss=false"):
            by_spark.run()
        assert numbers(by_spark.run(failOnDataLoss=False)) == list(range(100, 105))


class TestRecreatedTopic:
    @pytest.fixture
    def recreated(self, flow: Flow, tmp_path: Path) -> Path:
        """The stream has read 8 rows of a topic that was then recreated with 5 others."""
        put(tmp_path, rows(8), buckets=1)
        assert len(flow.run()) == 8
        shutil.rmtree(tmp_path / "t")
        put(tmp_path, rows(5, 100), buckets=1)
        return tmp_path

    def test_recreated_topic_is_an_error(self, flow: Flow, fails: Fails, recreated: Path) -> None:
        for _ in range(2):
            with fails("bucket 0.*ends at offset 5.*reached 8.*recreated"):
                flow.run()

    def test_recreated_topic_is_an_error_even_if_it_is_longer(
        self, flow: Flow, fails: Fails, recreated: Path
    ) -> None:
        put(recreated, rows(20, 200))
        with fails("bucket 0.*reached 8.*recreated"):
            flow.run()
        assert len(flow.run(failOnDataLoss=False)) == 25

    def test_recreated_topic_is_read_from_its_start_on_request(
        self, flow: Flow, recreated: Path
    ) -> None:
        assert numbers(flow.run(failOnDataLoss=False)) == list(range(100, 105))
        put(recreated, rows(2, 200))
        assert numbers(flow.run()) == [200, 201]


class TestCompaction:
    def test_compaction_between_runs_does_not_affect_a_stream(
        self, flow: Flow, tmp_path: Path
    ) -> None:
        found: list[int] = []
        with writer(tmp_path, keep_versions=0.001) as queue:
            for first in range(0, 60, 10):
                queue.put_batch(rows(10, first))
                queue.flush()
                if first % 20:
                    found += numbers(flow.run(maxOffsetsPerTrigger=7))
                    queue.compact()
        found += numbers(flow.run())
        assert sorted(found) == list(range(60))

    def test_compaction_during_a_batch_does_not_affect_it(self, tmp_path: Path) -> None:
        flow = DirectFlow(tmp_path)
        with writer(tmp_path, keep_versions=0.001) as queue:
            put_in_flushes(queue, 40, 10)
            reader, limit = flow.reader({"maxOffsetsPerTrigger": 25, "rowsPerPartition": 3})
            start = reader.initialOffset()
            end = reader.latestOffset(start, limit)
            parts = reader.partitions(start, end)
            before = [
                record for part in parts for b in reader.read(part) for record in b.to_pylist()
            ]
            queue.compact()
            queue.put({"id": 40, "more": 1})
            queue.flush()
            queue.compact()
            after = [
                record for part in parts for b in reader.read(part) for record in b.to_pylist()
            ]
        assert before == after
        assert len(before) == 25


class TestLiveQueue:
    ROWS = 3000

    def test_running_stream_reads_a_live_queue_of_another_process(
        self, by_spark: SparkFlow, tmp_path: Path
    ) -> None:
        """The queue flushes and compacts at the same time; every row is read once."""
        found: list[dict[str, Any]] = []
        with python(FEEDS, tmp_path, self.ROWS) as child:
            assert wait_for_line(child) == "begun"
            query = by_spark.start(maxOffsetsPerTrigger=400)
            try:
                assert wait_for_line(child) == "done"
                query.processAllAvailable()
            finally:
                query.stop()
            found += by_spark.taken()
        found += by_spark.run()
        assert numbers(found) == list(range(self.ROWS))
        assert ids(tmp_path) == list(range(self.ROWS))

    def test_running_stream_reads_a_live_queue_of_this_process(
        self, by_spark: SparkFlow, tmp_path: Path
    ) -> None:
        with writer(tmp_path, flush_threshold=10, compaction=True) as queue:
            queue.put({"id": 0, "text": ""})
            queue.flush()
            query = by_spark.start()
            try:
                for first in range(1, 200, 20):
                    queue.put_batch([{"id": i, "text": "x"} for i in range(first, first + 20)])
                queue.flush()
                query.processAllAvailable()
            finally:
                query.stop()
        assert numbers(by_spark.taken()) == list(range(201))


FEEDS = """
import asyncio, sys
from persisting.queue import write_queue

async def main():
    count = int(sys.argv[2])
    queue = await write_queue(
        topic="t", storage_path=sys.argv[1], num_buckets=2, backend="persisting",
        backend_options={
            "enable_wal": True, "flush_threshold": 50, "flush_interval": 0.1, "keep_versions": 0.5,
        },
    )
    for first in range(0, count, 20):
        await queue.put_batch([{"id": i, "text": "x" * (i % 50)} for i in range(first, first + 20)])
        if first == 40:
            await queue.flush()
            print("begun", flush=True)
        if first % 500 == 0:
            await queue.compact()
        await asyncio.sleep(0.005)
    await queue.close()
    print("done", flush=True)

asyncio.run(main())
"""


class TestRefusedOptions:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"version": 1}, "version, timestamp and tag"),
            ({"tag": "x"}, "version, timestamp and tag"),
            ({"timestamp": "0"}, "version, timestamp and tag"),
            ({"endingOffsets": '{"0": 1}'}, "endingOffsets and endingTimestamp"),
            ({"endingTimestamp": "0"}, "endingOffsets and endingTimestamp"),
            ({"startingOffsets": '{"7": 1}'}, "startingOffsets names bucket 7"),
            ({"filter": "nope = 1"}, "option filter='nope = 1' names 'nope'"),
            ({"columns": "nope"}, "option columns names 'nope'"),
            ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger='0'"),
        ],
    )
    def test_stream_refuses_an_option_by_name(
        self, flow: Flow, fails: Fails, tmp_path: Path, options: dict[str, Any], words: str
    ) -> None:
        put(tmp_path, rows(3), buckets=1)
        with writer(tmp_path) as queue:
            queue.tag("x")
        with fails(words):
            flow.run(**options)

    def test_refusal_of_a_stream_reaches_the_user_as_the_last_error(
        self, by_spark: SparkFlow, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(3))
        with writer(tmp_path) as queue:
            queue.tag("x")
        for options in ({"tag": "x"}, {"filter": "nope = 1"}):
            with refused("InvalidArgument", "tag|nope") as raised:
                by_spark.run(**options)
            assert "UnboundLocalError" not in str(raised.value)


class TestJoins:
    def test_stream_of_a_topic_joins_with_the_topic_as_a_table(
        self, spark: SparkSession, by_spark: SparkFlow, tmp_path: Path
    ) -> None:
        """The same topic as a stream and as a table in one query."""
        put(tmp_path, rows(10))
        at_rest = load(spark, tmp_path, columns="id,text", filter="id > 5")
        stream = (
            spark.readStream.format("persisting").option("columns", "id").load(str(tmp_path / "t"))
        )
        query = (
            stream.join(at_rest, "id")
            .writeStream.format("json")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "t.out"))
        )
        query.awaitTermination()
        found = by_spark.taken()
        assert sorted((r["id"], r["text"]) for r in found) == [
            (i, f"row {i}") for i in range(6, 10)
        ]
