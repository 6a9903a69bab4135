"""What docs/guide/spark.md and spark-jobs.md say: their tables, and promises of streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support.doc_pages import both, code, table_with

from persisting.errors import SchemaError
from persisting.queue import read_queue, write_queue
from persisting.records import EMPTY, Rules
from persisting.records.arrow import accept, merge
from persisting.spark import jobs, session, source_options
from persisting.spark.types import _WIDER, spark_type
from persisting.topic.spec import DEFAULT_BUCKETS, DEFAULT_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pages = pytest.mark.parametrize("page", both("guide/spark.md"), ids=["en", "zh"])
job_pages = pytest.mark.parametrize("page", both("guide/spark-jobs.md"), ids=["en", "zh"])

TYPES = [
    pa.bool_(),
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
    *(pa.string(), pa.binary(), pa.uuid()),
    *(pa.timestamp("us"), pa.timestamp("us", tz="UTC"), pa.date32(), pa.time64("us")),
    *(pa.duration("us"), pa.decimal128(38, 18)),
    *(pa.list_(pa.int64()), pa.list_(pa.float32(), 2), pa.struct([("a", pa.int64())])),
    pa.null(),
]
"""Every kind of type that the backends store."""


@pages
def test_every_option_is_listed_with_its_default(page: Path):
    reading = {code(row[0]): row[1].strip("`") for row in table_with(page, "columns", "filter")}
    assert tuple(reading) == source_options.READ
    default = source_options.read_options({"path": "/topics/t"})
    assert reading["startingOffsets"] == default.starting
    assert reading["endingOffsets"] == default.ending
    assert reading["includeMetadata"] == source_options.option_text(default.metadata)
    assert default.rows_per_partition is None
    assert f"{source_options.ROWS_PER_PARTITION:,}" in page.read_text()
    assert f"{source_options.BYTES_PER_PARTITION >> 20} MiB" in page.read_text()
    assert reading["failOnDataLoss"] == source_options.option_text(default.fail_on_loss)
    writing = {code(row[0]): row[1].strip("`") for row in table_with(page, "writeId")}
    assert tuple(writing) == source_options.WRITE
    assert writing["numBuckets"] == str(DEFAULT_BUCKETS)
    assert writing["bucketColumn"] == DEFAULT_COLUMN


def in_spark(dtype: pa.DataType) -> tuple[str, pa.Schema]:
    """What a type is in Spark, and what Spark gives to the sink for it."""
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    schema = from_arrow_schema(pa.schema([("x", spark_type(dtype))]))
    return schema["x"].dataType.simpleString(), to_arrow_schema(schema, timezone="UTC")


@pages
def test_every_type_is_listed_with_what_it_is_in_spark_and_afterwards(page: Path):
    rows = {code(row[0]): row for row in table_with(page, "uint64", "string")}
    assert set(rows) == {str(dtype) for dtype in TYPES}
    assert set(_WIDER) <= set(TYPES)
    for dtype in TYPES:
        _, there, afterwards = rows[str(dtype)]
        name, given = in_spark(dtype)
        assert code(there) == name
        stored = accept(given.empty_table(), EMPTY).field("x").type
        assert (code(afterwards) or str(dtype)) == str(stored).replace("<element:", "<item:")


@pytest.mark.parametrize("dtype", [*_WIDER, pa.uuid()], ids=str)
def test_back_in_their_topic_numbers_widen_and_the_largest_and_uuids_are_refused(dtype: Any):
    known = pa.schema([("x", dtype)])
    rows = accept(in_spark(dtype)[1].empty_table(), known).schema
    if dtype in (pa.uint64(), pa.uuid()):
        with pytest.raises(SchemaError, match="'x'"):
            merge(known, rows, Rules(evolving=True))
    else:
        assert merge(known, rows, Rules(evolving=True)).field("x").type == _WIDER[dtype]


@job_pages
def test_every_job_is_listed(page: Path):
    assert sorted(code(row[0]) for row in table_with(page, "incremental")) == jobs.__all__


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    started = session("docs", master="local[2]", conf={"spark.sql.shuffle.partitions": 2})
    yield started
    started.stop()


def copy(spark: SparkSession, home: Path, **given: Any) -> list[int]:
    """Stream what is new in topic "from" to topic "to"; the rows of each micro-batch."""
    reader = spark.readStream.format("persisting")
    for name, value in given.items():
        reader = reader.option(name, source_options.option_text(value))
    query = (
        reader.load(str(home / "from"))
        .writeStream.format("persisting")
        .option("numBuckets", 1)
        .option("checkpointLocation", str(home / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(home / "to"))
    )
    query.awaitTermination()
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


async def records(home: Path, topic: str) -> list[dict[str, Any]]:
    async with await read_queue(topic=topic, storage_path=str(home)) as reader:
        return await reader.get()


def forget_last_batch(checkpoint: Path) -> None:
    """As if Spark had been killed after the sink's commit and before its own."""
    commits = checkpoint / "commits"
    last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
    (commits / str(last)).unlink()
    (commits / f".{last}.crc").unlink(missing_ok=True)


async def put(home: Path, *rows: dict[str, Any], keep: int | None = None) -> None:
    opening = write_queue(
        topic="from",
        num_buckets=1,
        storage_path=str(home),
        backend="persisting",
        backend_options={"compaction": False},
    )
    async with await opening as writer:
        await writer.put(list(rows))
        if keep is not None:
            await writer.flush()
            await writer.retain(rows=keep)


async def test_a_batch_that_spark_repeats_is_stored_once_and_new_fields_come_after_a_restart(
    spark: SparkSession, tmp_path: Path
):
    await put(tmp_path, *({"id": i} for i in range(5)))
    assert copy(spark, tmp_path, maxOffsetsPerTrigger=2) == [2, 2, 1]
    forget_last_batch(tmp_path / "checkpoint")
    await put(tmp_path, {"id": 5, "new": "x"})
    assert copy(spark, tmp_path) == [1, 1]
    assert [row["id"] for row in await records(tmp_path, "to")] == list(range(6))
    assert (await records(tmp_path, "to"))[-1] == {"id": 5, "new": "x"}


@pytest.mark.nightly
async def test_a_stream_that_lost_rows_to_retention_stops_unless_told_to_go_on(
    spark: SparkSession, tmp_path: Path
):
    from pyspark.errors import StreamingQueryException

    await put(tmp_path, {"id": 0})
    copy(spark, tmp_path)
    await put(tmp_path, {"id": 1})
    await put(tmp_path, {"id": 2}, keep=1)
    lost = r"(?s)OffsetOutOfRange.*failOnDataLoss=false"
    with pytest.raises(StreamingQueryException, match=lost):
        copy(spark, tmp_path)
    copy(spark, tmp_path, failOnDataLoss=False)
    assert [row["id"] for row in await records(tmp_path, "to")] == [0, 2]
