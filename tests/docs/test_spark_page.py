"""The tables of docs/guide/spark.md and spark-jobs.md match the code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support.doc_pages import both, code, table_with

from persisting.errors import SchemaError
from persisting.records import EMPTY, Rules
from persisting.records.arrow import accept, merge
from persisting.spark import jobs, source_options
from persisting.spark.types import _WIDER, spark_type
from persisting.topic.spec import DEFAULT_BUCKETS, DEFAULT_COLUMN

if TYPE_CHECKING:
    pass

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
"""Every type that the backends store."""


@pages
def test_spark_page_lists_every_option_with_its_default(page: Path):
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
    """Return the name of a type in Spark, and the schema that Spark passes to the sink for it."""
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    schema = from_arrow_schema(pa.schema([("x", spark_type(dtype))]))
    return schema["x"].dataType.simpleString(), to_arrow_schema(schema, timezone="UTC")


@pages
def test_spark_page_lists_every_type_with_its_spark_and_stored_type(page: Path):
    rows = {code(row[0]): row for row in table_with(page, "uint64", "string")}
    assert set(rows) == {str(dtype) for dtype in TYPES}
    assert set(_WIDER) <= set(TYPES)
    for dtype in TYPES:
        _, spark_name, afterwards = rows[str(dtype)]
        name, given = in_spark(dtype)
        assert code(spark_name) == name
        stored = accept(given.empty_table(), EMPTY).field("x").type
        assert (code(afterwards) or str(dtype)) == str(stored).replace("<element:", "<item:")


@pytest.mark.parametrize("dtype", [*_WIDER, pa.uuid()], ids=str)
def test_types_written_back_by_spark_widen_or_are_refused(dtype: Any):
    known = pa.schema([("x", dtype)])
    rows = accept(in_spark(dtype)[1].empty_table(), known).schema
    if dtype in (pa.uint64(), pa.uuid()):
        with pytest.raises(SchemaError, match="'x'"):
            merge(known, rows, Rules(evolving=True))
    else:
        assert merge(known, rows, Rules(evolving=True)).field("x").type == _WIDER[dtype]


@job_pages
def test_spark_jobs_page_lists_every_job(page: Path):
    assert sorted(code(row[0]) for row in table_with(page, "incremental")) == jobs.__all__
