"""Files into a topic: Parquet, Lance, JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from persisting.errors import InvalidArgument
from persisting.records import EMPTY
from persisting.spark.active_session import activate
from persisting.spark.jobs import json_files, lance_files, parquet_files, spark_files
from persisting.spark.jobs.file_formats import LANCE, PARQUET, found_format
from persisting.spark.jobs.row_count import counted
from persisting.spark.jobs.sink_options import writer_options
from persisting.spark.jobs.topic_lookup import folder_of
from persisting.spark.scan_plan import shared_schema
from persisting.spark.types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def ingest(
    spark: SparkSession,
    source: str | Path,
    path: str | Path,
    topic: str | None = None,
    *,
    format: str | None = None,
    schema: str | StructType | None = None,
    mode: str = "append",
    bucket_column: str | None = None,
    num_buckets: int | None = None,
    compression: str | None = None,
    vectors: Mapping[str, int] | None = None,
    write_id: str | None = None,
) -> dict[str, Any]:
    """Put the rows of files into a topic, which is made if it does not exist.

    ``source`` is a file, a folder with all below it, or (but for Lance) a pattern; its ``format``,
    ``parquet``, ``lance`` or ``jsonl``, is found by its names if it is not said. Files may have
    different fields. Values in the names of folders (``<column>=<value>``) are text, unless the
    topic or ``schema`` has another type for the column. ``schema`` gives the types of JSON lines,
    which are else found as a queue finds them; a line that is no object, or does not fit, is an
    error that names it, and nothing is stored. ``mode`` is ``append`` or ``overwrite``. The
    other options are those of the sink: a new topic's ``bucket_column``, ``num_buckets`` and
    ``compression``; ``vectors`` (name: length), which Lance files say by themselves; ``write_id``,
    with which a repetition completes a write and doubles nothing. What is returned says ``topic``
    (its folder), ``format`` and the ``rows`` that were read.
    """
    if mode not in ("append", "overwrite"):
        raise InvalidArgument(f"mode must be append or overwrite, got {mode!r}")
    folder = folder_of(path, topic)
    chosen = found_format(format, source)
    read = _read(spark, str(source), chosen, schema, folder)
    options = writer_options(
        bucket_column=bucket_column,
        num_buckets=num_buckets,
        compression=compression,
        vectors={**read.vectors, **(vectors or {})},
        write_id=write_id,
    )
    activate(spark)
    with read.failing, counted(read.rows) as (rows, count):
        rows.write.format("persisting").mode(mode).options(**options).save(str(folder))
    return {"topic": str(folder), "format": chosen, "rows": count()}


class _Read(NamedTuple):
    """Rows that are on their way."""

    rows: DataFrame
    vectors: Mapping[str, int] = {}
    """The lengths of those that the files name as such."""
    failing: AbstractContextManager[None] = nullcontext()
    """In which errors are told by what is in the files."""


def _read(
    spark: SparkSession, source: str, chosen: str, schema: str | StructType | None, folder: Path
) -> _Read:
    if chosen == LANCE:
        if schema is not None:
            raise InvalidArgument("a Lance dataset has a schema of its own; leave schema out")
        # Tasks run where Spark was started.
        return _Read(*lance_files.read(spark, Path(source.removeprefix("file://")).absolute()))
    files, known = spark_files.listed(spark, source), _known(folder)
    if chosen == PARQUET:
        return _Read(parquet_files.read(spark, files, schema, known))
    rows = json_files.read(spark, files, schema, known)
    if schema is None:
        return _Read(rows)
    return _Read(rows, failing=json_files.misfits_named(spark, files, rows.schema))


def _known(folder: Path) -> StructType:
    """The fields of the topic that is there."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(spark_schema(shared_schema(folder).read() or EMPTY))
