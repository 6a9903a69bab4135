"""What a task of a write does: rows become files of their buckets' tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from persisting import fs as filesystem
from persisting.errors import SchemaError
from persisting.records.arrow import accept, align, beyond_float
from persisting.spark.gc_tuning import settle
from persisting.spark.scan_plan import Plan
from persisting.table import bulk_write
from persisting.table.files import DATA
from persisting.table.table import FOLDER
from persisting.topic.routing import table_by_bucket
from persisting.topic.spec import bucket_folder

_FRAGMENT_ROWS = 262_144
_FRAGMENT_BYTES = 64 * 1024 * 1024
_TASK_BYTES = 256 * 1024 * 1024
"""What a task keeps at most of all buckets together; beyond it the fullest is written."""


@dataclass
class Written(WriterCommitMessage):
    """What a task wrote."""

    part: int = 0
    query: str | None = None
    fragments: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    columns: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By bucket, the columns that the files were written for."""
    large: set[str] = field(default_factory=set)


def write_task(made: Plan, batches: Iterator[pa.RecordBatch]) -> Written:
    """Write the rows of a partition as files of their buckets' tables."""
    settle()
    context = TaskContext.get()
    written = Written()
    if context is not None:
        written.part = context.partitionId()
        written.query = context.getLocalProperty("sql.streaming.queryId")
    writers = {bucket: _BucketFiles(made, bucket) for bucket in made.tables}
    try:
        for batch in batches:
            if batch.num_rows:
                _write_rows(made, writers, batch, written)
                _keep_within(list(writers.values()), _TASK_BYTES)
        for bucket, writer in writers.items():
            if found := writer.finish():
                written.fragments[bucket] = found
                written.columns[bucket] = made.tables[bucket]["columns"]
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    return written


def _keep_within(writers: list[_BucketFiles], most: int) -> None:
    while sum(writer.nbytes for writer in writers) > most:
        max(writers, key=lambda writer: writer.nbytes).write()


def _write_rows(
    made: Plan, writers: dict[int, _BucketFiles], batch: pa.RecordBatch, written: Written
) -> None:
    table = accept(batch, made.schema)
    _check_vectors(table, made.schema)
    # By the value as it came, as the queue does it: the topic's type may be a wider one.
    routed = {0: table}
    if made.config.num_buckets > 1:
        routed = table_by_bucket(table, made.config.bucket_column, made.config.num_buckets)
    for bucket, part in routed.items():
        defaults = made.config.options.get("schema_defaults")
        parts = [align(one, made.schema, defaults) for one in part.to_batches()]
        rows = pa.Table.from_batches(parts, schema=made.schema)
        for one in made.schema:
            if any(beyond_float(chunk) for chunk in rows.column(one.name).chunks):
                written.large.add(one.name)
        writers[bucket].add(rows)


def _check_vectors(table: pa.Table, schema: pa.Schema) -> None:
    """While tasks write, the topic's vectors cannot become lists of any length."""
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
                f"field {known.name!r} holds vectors of {size} floats, and a row has another list; "
                "leave such rows out, or write them to another column"
            )


class _BucketFiles:
    """Rows of one bucket on their way into files."""

    def __init__(self, made: Plan, bucket: int) -> None:
        self._root = bucket_folder(Path(made.folder), bucket) / FOLDER
        self._version, self._schema = made.tables[bucket]["version"], made.schema
        self._waiting: list[pa.Table] = []
        self._rows = self.nbytes = 0
        self._done: list[dict[str, Any]] = []

    def add(self, rows: pa.Table) -> None:
        self._waiting.append(rows)
        self._rows += rows.num_rows
        self.nbytes += rows.nbytes
        if self._rows >= _FRAGMENT_ROWS or self.nbytes >= _FRAGMENT_BYTES:
            self.write()

    def finish(self) -> list[dict[str, Any]]:
        if self._waiting:
            self.write()
        return self._done

    def discard(self) -> None:
        """The task failed: nothing will refer to what was written."""
        unlink(self._root / DATA, self._done)

    def write(self) -> None:
        """Write what waits as a fragment."""
        whole = pa.concat_tables(self._waiting).combine_chunks()
        self._done += bulk_write.write_files(
            self._root, self._version, whole.to_batches(), self._schema, filesystem.current()
        )
        self._waiting, self._rows, self.nbytes = [], 0, 0


def unlink(folder: Path, fragments: list[dict[str, Any]]) -> None:
    """Remove the files of fragments that nothing will refer to."""
    for fragment in fragments:
        for file in fragment["files"]:
            (folder / file["path"]).unlink(missing_ok=True)
