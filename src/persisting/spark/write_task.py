"""The task of a write: stores rows in files of the tables of their buckets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from persisting.errors import SchemaError
from persisting.records import EMPTY
from persisting.records.arrow import accept, align, beyond_float
from persisting.spark.gc_tuning import freeze_loaded_objects
from persisting.spark.write_plan import WritePlan
from persisting.spark.write_target import bulk_files
from persisting.table import bulk_write
from persisting.table.bulk_files import names_of
from persisting.topic.routing import table_by_bucket

_FRAGMENT_ROWS = 262_144
_FRAGMENT_BYTES = 64 * 1024 * 1024
_TASK_BYTES = 256 * 1024 * 1024
"""Bytes that a task buffers for all buckets together; beyond that it writes the fullest one."""


@dataclass
class TaskOutput(WriterCommitMessage):
    """The files that a task wrote, for the commit."""

    part: int = 0
    query: str | None = None
    fragments: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    columns: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By bucket, the columns of the table that the files were written for."""
    large: set[str] = field(default_factory=set)
    schema: pa.Schema = EMPTY


def write_task(plan: WritePlan, batches: Iterator[pa.RecordBatch]) -> TaskOutput:
    """Write the rows of a partition as files of their buckets' tables."""
    freeze_loaded_objects()
    context = TaskContext.get()
    output = TaskOutput(schema=plan.schema)
    if context is not None:
        output.part = context.partitionId()
        output.query = context.getLocalProperty("sql.streaming.queryId")
    writers = {bucket: _BucketFiles(plan, bucket) for bucket in plan.tables}
    try:
        for batch in batches:
            if batch.num_rows:
                _add_rows(plan, writers, batch, output)
                _limit_buffers(list(writers.values()), _TASK_BYTES)
        for bucket, writer in writers.items():
            if fragments := writer.finish():
                output.fragments[bucket] = fragments
                output.columns[bucket] = plan.tables[bucket]["columns"]
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    return output


def _limit_buffers(writers: list[_BucketFiles], most: int) -> None:
    while sum(writer.nbytes for writer in writers) > most:
        max(writers, key=lambda writer: writer.nbytes).write()


def _add_rows(
    plan: WritePlan, writers: dict[int, _BucketFiles], batch: pa.RecordBatch, output: TaskOutput
) -> None:
    table = accept(batch, plan.schema)
    _check_vectors(table, plan.schema)
    # Route by the value as it arrived, as the queue does: the type of the topic may be wider.
    routed = {0: table}
    if plan.config.num_buckets > 1:
        routed = table_by_bucket(table, plan.config.bucket_column, plan.config.num_buckets)
    for bucket, part in routed.items():
        defaults = plan.config.options.get("schema_defaults")
        parts = [align(batch, plan.schema, defaults) for batch in part.to_batches()]
        rows = pa.Table.from_batches(parts, schema=plan.schema)
        for name in plan.schema.names:
            if any(beyond_float(chunk) for chunk in rows.column(name).chunks):
                output.large.add(name)
        writers[bucket].add(rows)


def _check_vectors(table: pa.Table, schema: pa.Schema) -> None:
    """Raise for lists that do not fit the vectors of the topic, which cannot change now."""
    for known in schema:
        if not pa.types.is_fixed_size_list(known.type) or known.name not in table.column_names:
            continue
        column = table.column(known.name)
        size = known.type.list_size
        if not pa.types.is_fixed_size_list(column.type) or any(
            chunk.flatten().null_count for chunk in column.chunks
        ):
            if column.null_count == len(column):
                continue
            raise SchemaError(
                f"field {known.name!r} holds vectors of {size} floats, and a row has a list that "
                "does not fit; leave such rows out, or write them to another column"
            )


class _BucketFiles:
    """Buffers the rows of one bucket and writes them to files."""

    def __init__(self, plan: WritePlan, bucket: int) -> None:
        self._place = bulk_files(plan.place, bucket)
        self._version, self._schema = plan.tables[bucket]["version"], plan.schema
        self._buffered: list[pa.Table] = []
        self._rows = self.nbytes = 0
        self._fragments: list[dict[str, Any]] = []

    def add(self, rows: pa.Table) -> None:
        self._buffered.append(rows)
        self._rows += rows.num_rows
        self.nbytes += rows.nbytes
        if self._rows >= _FRAGMENT_ROWS or self.nbytes >= _FRAGMENT_BYTES:
            self.write()

    def finish(self) -> list[dict[str, Any]]:
        if self._buffered:
            self.write()
        return self._fragments

    def discard(self) -> None:
        """Remove the files after a failure: no commit will refer to them."""
        self._place.remove(names_of(self._fragments))

    def write(self) -> None:
        """Write the buffered rows as a fragment."""
        whole = pa.concat_tables(self._buffered).combine_chunks()
        self._fragments += bulk_write.write_files(
            self._place, self._version, whole.to_batches(), self._schema
        )
        self._buffered, self._rows, self.nbytes = [], 0, 0
