"""Reading a part of a bucket in a task, and the helper that reads a topic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persisting.errors import InvalidArgument
from persisting.spark.gc_tuning import settle
from persisting.spark.source_options import ReadOptions, plain
from persisting.spark.types import to_spark
from persisting.topic import scan
from persisting.topic.scan import METADATA, Filter, Slice
from persisting.topic.topic_files import TopicFolder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def fields_of(options: ReadOptions) -> pa.Schema:
    """The fields of the records: of the versions that are read, else of the topic."""
    topic = TopicFolder.open(options.folder)
    if options.version is None:
        return topic.schema()
    topic.recover()  # a moment may mean what a crashed owner has left in its log
    return topic.schema_at(options.version)


def checked_filter(options: ReadOptions) -> Filter | None:
    """The filter, if it is one that the topic's fields allow."""
    if options.where is None:
        return None
    try:
        return Filter.checked(options.where, fields_of(options))
    except InvalidArgument as exc:
        raise InvalidArgument(str(exc).replace("where=", "option filter=", 1)) from exc


def read_slice(
    part: Slice, target: pa.Schema, where: Filter | None, *, metadata: bool
) -> Iterator[pa.RecordBatch]:
    """The rows of a slice as batches for Spark. Runs in a task; holds one batch at a time."""
    names = [name for name in target.names if not metadata or name not in METADATA.names]
    rows = scan.read(part, names, where, metadata=metadata)
    settle()
    return to_spark(rows, target)


def read_slices(
    parts: Iterable[Slice], target: pa.Schema, where: Filter | None, *, metadata: bool
) -> Iterator[pa.RecordBatch]:
    """The rows of slices, one slice after the other."""
    for part in parts:
        yield from read_slice(part, target, where, metadata=metadata)


def read_topic(
    spark: SparkSession,
    path: str | Path,
    topic: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    **options: Any,
) -> DataFrame:
    """A topic as a DataFrame, with columns and condition pushed down to the storage.

    ``where`` is a condition in Lance's SQL; every call loads afresh, so DataFrames with different
    ones do not get into each other's way. ``options`` are those of the format ``persisting``.
    """
    reader = spark.read.format("persisting")
    if topic is not None:
        reader = reader.option("topic", topic)
    if columns is not None:
        reader = reader.option("columns", json.dumps(list(columns)))
    if where is not None:
        reader = reader.option("filter", where)
    for name, value in options.items():
        reader = reader.option(name, plain(value))
    # Spark's Java counts relative paths from the folder where it was started.
    return reader.load(str(path) if ":/" in str(path) else str(Path(path).absolute()))
