"""The progress of a streaming query on a terminal, and the summary at its end."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from support.spark.topics import put, rows

from persisting.errors import BucketLocked, StorageError
from persisting.spark import query_errors
from persisting.spark.jobs import Summary, watch
from persisting.spark.jobs.stream_progress import Batch, lag_of, lag_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def source(end: Any, latest: Any) -> dict[str, Any]:
    return {"endOffset": end, "latestOffset": latest}


class TestLag:
    def test_lag_is_by_bucket(self) -> None:
        assert lag_of([source({"0": 5, "1": 7}, {"0": 9, "1": 7})]) == {"0": 4, "1": 0}
        assert lag_of([source('{"0": 5}', '{"0": 9, "1": 2}')]) == {"0": 4, "1": 2}

    def test_restored_bucket_has_no_lag(self) -> None:
        assert lag_of([source({"0": 9}, {"0": 4, "epochs": {"0": 1}})]) == {"0": 0}

    def test_lag_of_several_sources_names_the_source(self) -> None:
        both = [source({"0": 1}, {"0": 2}), source({"0": 1}, {"0": 4})]
        assert lag_of(both) == {"0/0": 1, "1/0": 3}

    @pytest.mark.parametrize("other", [None, "", "12", {"logOffset": 3}, [1], {"topic": {"0": 1}}])
    def test_lag_skips_sources_of_other_formats(self, other: Any) -> None:
        assert lag_of([source(other, other)]) == {}

    def test_lag_text_has_the_total_and_each_bucket(self) -> None:
        assert lag_text({"0": 0, "1": 1200, "2": 3}) == "lag 1,203 (1: 1,200, 2: 3)"
        assert lag_text({"0": 0}) == lag_text({}) == "no lag"


class TestBatch:
    SAID: ClassVar = {
        "batchId": 7,
        "durationMs": {"triggerExecution": 500, "addBatch": 300},
        "sources": [{**source({"0": 1500}, {"0": 1600}), "numInputRows": 1500}],
        "sink": {"numOutputRows": 20},
    }

    def test_batch_is_shown_as_a_line(self) -> None:
        batch = Batch.of(self.SAID)
        assert (batch.rows, batch.written, batch.rows_per_second) == (1500, 20, 3000.0)
        assert str(batch) == "batch 7: 1,500 rows, 3,000 rows/s, lag 100 (0: 100)"

    def test_batch_of_a_sink_without_a_count_has_no_rows_written(self) -> None:
        assert Batch.of({**self.SAID, "sink": {"numOutputRows": -1}}).written is None

    def test_batch_without_a_duration_has_no_rate(self) -> None:
        assert Batch.of({**self.SAID, "durationMs": {}}).rows_per_second == 0.0
        assert Summary(rows=3).rows_per_second == 0.0


class TestErrors:
    def test_own_error_is_extracted_from_a_failed_query(self) -> None:
        text = (
            "[STREAM_FAILED] Query [id = 1] terminated with exception: Traceback\n"
            "persisting.errors.BucketLocked: first\n\nThe above exception was the direct cause\n"
            "persisting.errors.BucketLocked: bucket /x is open; close it\n SQLSTATE: 38000\n"
        )
        error = query_errors.storage_error(ValueError(text))
        assert type(error) is BucketLocked
        assert str(error) == "bucket /x is open; close it"

    def test_unknown_class_of_ours_becomes_a_storage_error(self) -> None:
        error = query_errors.storage_error(ValueError("persisting.errors.Any: text"))
        assert (type(error), str(error)) == (StorageError, "text")

    def test_reason_of_a_failed_query_is_one_line(self) -> None:
        text = (
            "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: "
            "[USER_RAISED_EXCEPTION] bad row SQLSTATE: P0001 SQLSTATE: XXKST\n=== Query ===\nplan"
        )
        error = query_errors.storage_error(ValueError(text))
        assert str(error) == "[USER_RAISED_EXCEPTION] bad row"

    def test_renamed_error_keeps_its_kind_and_owner(self) -> None:
        error = query_errors.renamed(BucketLocked("old", owner={"pid": 7}), "new")
        assert (type(error), str(error)) == (BucketLocked, "new")
        assert isinstance(error, BucketLocked)
        assert error.owner == {"pid": 7}

    def test_only_errors_of_spark_are_translated(self) -> None:
        def fails() -> None:
            raise KeyError("the user's own")

        with pytest.raises(KeyError):
            query_errors.readable_errors(fails)()


@pytest.fixture(scope="module")
def query(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> StreamingQuery:
    """Run a query that takes 60 rows in three batches; it can be watched again after its end."""
    folder = tmp_path_factory.mktemp("watch")
    reader = spark.readStream.format("persisting").option("maxOffsetsPerTrigger", 25)
    stream = reader.load(str(put(folder, rows(60)))).writeStream.format("noop")
    stream = stream.option("checkpointLocation", str(folder / "checkpoint"))
    started = stream.trigger(availableNow=True).start()
    watch(started)
    return started


class TestWatch:
    def test_watch_waits_for_the_end_and_returns_a_summary(self, query: StreamingQuery) -> None:
        assert not query.isActive
        summary = watch(query)
        assert (summary.rows, summary.batches) == (60, 3)
        assert summary.lag == {"0": 0, "1": 0}
        assert summary.seconds > 0

    def test_watch_shows_batches_and_a_summary_on_a_terminal(self, query: StreamingQuery) -> None:
        out = Terminal()
        summary = watch(query, out=out)
        _, *lines, last = out.getvalue().removesuffix("\n").split("\r\x1b[K")
        assert [line.split(" rows")[0] for line in lines] == [
            "batch 0: 25",
            "batch 1: 25",
            "batch 2: 10",
        ]
        assert all("rows/s" in line for line in lines)
        assert "lag 35 (" in lines[0]
        assert last == str(summary)
        assert last.startswith("60 rows read, ")
        assert last.endswith("no lag")

    def test_watch_is_quiet_unless_on_a_terminal_or_requested(self, query: StreamingQuery) -> None:
        plain, loud, quiet = io.StringIO(), io.StringIO(), Terminal()
        watch(query, out=plain)
        watch(query, out=loud, quiet=False)
        watch(query, out=quiet, quiet=True)
        assert plain.getvalue() == quiet.getvalue() == ""
        assert "60 rows read" in loud.getvalue()

    def test_interrupted_watch_stops_the_query(self, spark: SparkSession, tmp_path: Path) -> None:
        class Interrupted(Terminal):
            def write(self, text: str) -> int:
                if "batch" in text and "batches" not in text:
                    raise KeyboardInterrupt
                return super().write(text)

        out = Interrupted()
        stream = spark.readStream.format("rate").load().writeStream.format("noop")
        running = stream.option("checkpointLocation", str(tmp_path)).start()
        with pytest.raises(KeyboardInterrupt):
            watch(running, out=out)
        assert not running.isActive
        assert "rows read" in out.getvalue()
