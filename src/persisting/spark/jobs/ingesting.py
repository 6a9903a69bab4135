"""Files into a topic: Parquet, Lance, JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting.errors import InvalidArgument
from persisting.spark.jobs import lance_files
from persisting.spark.jobs.counting import counted
from persisting.spark.jobs.formats import JSONL, LANCE, found_format
from persisting.spark.jobs.stored import folder_of
from persisting.spark.jobs.writing import writer_options
from persisting.spark.threads import activate

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

    ``source`` is a file, a folder or (but for Lance) a pattern; its ``format``, ``parquet``,
    ``lance`` or ``jsonl``, is found by its names if it is not said. ``schema`` gives the types of
    JSON lines, where Spark would guess them in a pass of its own. ``mode`` is ``append`` or
    ``overwrite``. The other options are those of the sink: a new topic's ``bucket_column``,
    ``num_buckets`` and ``compression``; ``vectors`` (name: length), which Lance files say by
    themselves; ``write_id``, with which a repetition completes a write and doubles nothing. What
    is returned says ``topic`` (its folder), ``format`` and the ``rows`` that were read.
    """
    if mode not in ("append", "overwrite"):
        raise InvalidArgument(f"mode must be append or overwrite, got {mode!r}")
    folder = folder_of(path, topic)
    chosen = found_format(format, source)
    df, known = _read(spark, str(source), chosen, schema)
    options = writer_options(
        bucket_column=bucket_column,
        num_buckets=num_buckets,
        compression=compression,
        vectors={**known, **(vectors or {})},
        write_id=write_id,
    )
    activate(spark)
    with counted(df) as (rows, count):
        rows.write.format("persisting").mode(mode).options(**options).save(str(folder))
    return {"topic": str(folder), "format": chosen, "rows": count()}


def _read(
    spark: SparkSession, source: str, chosen: str, schema: str | StructType | None
) -> tuple[DataFrame, dict[str, int]]:
    """The rows, and the lengths of the vectors that the files name as such."""
    if chosen == LANCE:
        if schema is not None:
            raise InvalidArgument("a Lance dataset has a schema of its own; leave schema out")
        return lance_files.read(spark, Path(source.removeprefix("file://")))
    reader = spark.read if schema is None else spark.read.schema(schema)
    return (reader.json(source) if chosen == JSONL else reader.parquet(source)), {}
