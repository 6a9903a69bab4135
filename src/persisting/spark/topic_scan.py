"""Reads of slices in tasks, and the function that loads a topic as a DataFrame."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persisting.errors import InvalidArgument, StorageError
from persisting.spark.gc_tuning import freeze_loaded_objects
from persisting.spark.open_topics import open_topic
from persisting.spark.pushdown import fields_of, is_read_as_stored, to_sql
from persisting.spark.query_errors import readable_errors
from persisting.spark.scan_hints import ROWS
from persisting.spark.source_options import ReadOptions, option_text
from persisting.spark.types import to_spark
from persisting.topic import scan
from persisting.topic.scan import METADATA, Filter, Hint, Slice
from persisting.topic.topic_files import TopicFolder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("persisting.spark")


def topic_fields(options: ReadOptions, topic: TopicFolder | None = None) -> pa.Schema:
    """Return the fields of the versions that are read, else those of the topic, which may already
    be open."""
    topic = topic or open_topic(options.folder)
    if options.version is None:
        return topic.schema()
    topic.recover()  # a timestamp may refer to records in the log of a crashed owner
    return topic.schema_at(options.version)


def checked_filter(options: ReadOptions) -> Filter | None:
    """Return the filter of the options; raise if the topic's fields do not allow it."""
    if options.where is None:
        return None
    try:
        return Filter.checked(options.where, topic_fields(options))
    except InvalidArgument as exc:
        raise InvalidArgument(str(exc).replace("where=", "option filter=", 1)) from exc


def pushed_hint(
    options: ReadOptions,
    conditions: Sequence[Mapping[str, Any]],
    target: pa.Schema,
    topic: TopicFolder | None = None,
) -> Hint | None:
    """Return what the storage can evaluate of Spark's conditions on ``target``; None if nothing."""
    if not conditions:
        return None
    fields = topic_fields(options, topic)
    texts: list[str] = []
    used: set[str] = set()
    for condition in _without_implied(conditions):
        sql = to_sql(condition, fields)
        if sql is None or not is_read_as_stored(condition, fields, target):
            continue
        names = fields_of(condition) & set(fields.names)
        try:
            Hint.checked(sql.text, _only(fields, names))
        except StorageError as exc:
            _log.debug("cannot push a condition down: %s", exc)
            continue
        texts.append(sql.text)
        used |= names
    return Hint(" AND ".join(texts), _only(fields, used)) if texts else None


def _without_implied(conditions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out tests for null that another condition on the same field implies."""
    compared = [c["field"] for c in conditions if "values" in c]
    return [c for c in conditions if c["op"] != "is_not_null" or c["field"] not in compared]


def _only(fields: pa.Schema, names: set[str]) -> pa.Schema:
    return pa.schema([f for f in fields if f.name in names])


def read_slice(
    part: Slice,
    target: pa.Schema,
    where: Filter | None,
    *,
    metadata: bool,
    hint: Hint | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read a slice as batches for Spark. Runs in a task; holds one batch at a time."""
    names, metadata = _fields_to_read(target, metadata)
    rows = scan.read(part, names, where, metadata=metadata, hint=hint, shape=target)
    defaults = scan.defaults_of(part.folder)
    freeze_loaded_objects()
    return to_spark(rows, target, defaults)


def look_up_slice(
    topic: TopicFolder,
    part: Slice,
    target: pa.Schema,
    hint: Hint,
    *,
    most_rows: int,
    most_bytes: int,
    metadata: bool,
) -> list[pa.RecordBatch] | None:
    """Like :func:`read_slice`, but only if an index finds the rows and they are few; None
    otherwise."""
    names, metadata = _fields_to_read(target, metadata)
    rows = scan.look_up(
        part,
        names,
        hint,
        most_rows=most_rows,
        most_bytes=most_bytes,
        metadata=metadata,
        table=topic.table(part.bucket),
    )
    return None if rows is None else list(to_spark(rows, target, scan.defaults_of(part.folder)))


def _fields_to_read(target: pa.Schema, metadata: bool) -> tuple[list[str], bool]:
    """Return the fields of the topic that a scan needs, and whether it needs columns of
    :data:`METADATA`."""
    names = [name for name in target.names if not metadata or name not in METADATA.names]
    metadata = metadata and len(names) < len(target.names)
    return [name for name in names if name != ROWS], metadata


def read_slices(
    parts: Iterable[Slice],
    target: pa.Schema,
    where: Filter | None,
    *,
    metadata: bool,
    hint: Hint | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read slices one after the other."""
    for part in parts:
        yield from read_slice(part, target, where, metadata=metadata, hint=hint)


@readable_errors
def read_topic(
    spark: SparkSession,
    path: str | Path,
    topic: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    **options: Any,
) -> DataFrame:
    """Load a topic as a DataFrame, with columns and condition pushed down to the storage.

    ``where`` is a condition in Lance's SQL. Every call loads the topic again, so DataFrames with
    different conditions do not affect each other. ``options`` are those of the format
    ``persisting``; with ``flush=True`` the read sees everything that was acknowledged before it
    began: owners of the topic first write it to the tables. An error is one of ours, such as
    :class:`~persisting.errors.NoSuchTopic`; its ``__cause__`` has Spark's exception. With Spark
    Connect the first action raises, not this call.
    """
    reader = spark.read.format("persisting")
    if topic is not None:
        reader = reader.option("topic", topic)
    if columns is not None:
        reader = reader.option("columns", json.dumps(list(columns)))
    if where is not None:
        reader = reader.option("filter", where)
    for name, value in options.items():
        reader = reader.option(name, option_text(value))
    # Spark's Java resolves relative paths against the folder in which it was started.
    return reader.load(str(path) if ":/" in str(path) else str(Path(path).absolute()))
