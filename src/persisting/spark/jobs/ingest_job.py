"""Ingest of files into a topic: Parquet, Lance, JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from persisting.errors import InvalidArgument
from persisting.records import EMPTY
from persisting.spark.active_session import activate
from persisting.spark.jobs import json_lines, lance_files, parquet_files, spark_files
from persisting.spark.jobs.file_formats import LANCE, PARQUET, detect_format
from persisting.spark.jobs.row_count import counted
from persisting.spark.jobs.sink_options import names_arguments, writer_options
from persisting.spark.jobs.topic_lookup import topic_place
from persisting.spark.query_errors import readable_errors
from persisting.spark.types import spark_schema
from persisting.spark.write_target import target_of
from persisting.store_address import StoreAddress
from persisting.topic.handover import OWNER_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


@names_arguments
@readable_errors
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
    """Put the rows of files into a topic, which is created if it does not exist.

    ``source`` is a file, a folder with everything below it, or (except for Lance) a pattern. Its
    ``format`` is ``parquet``, ``lance`` or ``jsonl``; by default the names of the files decide.
    Files may have different fields. Values in the names of folders (``<column>=<value>``) are text,
    unless the topic or ``schema`` has another type for the column. ``schema`` gives the types of
    JSON lines; by default they are inferred as a queue infers them. A line that is not an object,
    or does not fit the types, raises an error that names it, and nothing is stored. ``mode`` is
    ``append`` or ``overwrite``. The other options are those of the sink: ``bucket_column``,
    ``num_buckets`` and ``compression`` of a new topic; ``vectors`` (name: length), which Lance
    files declare themselves; ``write_id``, with which a repeated write completes the first one and
    stores nothing twice. Returns ``topic`` (its folder or address), ``format`` and the ``rows``
    that were read.
    """
    if mode not in ("append", "overwrite"):
        raise InvalidArgument(f"mode must be append or overwrite, got {mode!r}")
    place = topic_place(path, topic)
    chosen = detect_format(format, source)
    source_rows = _read(spark, str(source), chosen, schema, place)
    options = writer_options(
        bucket_column=bucket_column,
        num_buckets=num_buckets,
        compression=compression,
        vectors={**source_rows.vectors, **(vectors or {})},
        write_id=write_id,
    )
    activate(spark)
    with source_rows.error_context, counted(source_rows.rows) as (rows, count):
        rows.write.format("persisting").mode(mode).options(**options).save(str(place))
    return {"topic": str(place), "format": chosen, "rows": count()}


class _SourceRows(NamedTuple):
    """The rows of the files, not read yet."""

    rows: DataFrame
    vectors: Mapping[str, int] = {}
    """The lengths of the vectors that the files declare."""
    error_context: AbstractContextManager[None] = nullcontext()
    """The context to read them in, in which errors name the line of a file."""


def _read(
    spark: SparkSession,
    source: str,
    chosen: str,
    schema: str | StructType | None,
    place: Path | StoreAddress,
) -> _SourceRows:
    if chosen == LANCE:
        if schema is not None:
            raise InvalidArgument("a Lance dataset has its own schema; leave schema out")
        # Tasks run in the folder in which Spark was started.
        return _SourceRows(
            *lance_files.read(spark, Path(source.removeprefix("file://")).absolute())
        )
    files, known = spark_files.listed(spark, source), _topic_types(place)
    if chosen == PARQUET:
        return _SourceRows(parquet_files.read(spark, files, schema, known))
    rows = json_lines.read(spark, files, schema, known)
    if schema is None:
        return _SourceRows(rows)
    return _SourceRows(rows, error_context=json_lines.bad_lines_named(spark, files, rows.schema))


def _topic_types(place: Path | StoreAddress) -> StructType:
    """Return the fields of the topic, none if it does not exist."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = target_of(place, OWNER_SECONDS).shared_schema().read() or EMPTY
    return from_arrow_schema(spark_schema(schema))
