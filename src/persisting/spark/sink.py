"""Writing to a topic: tasks write files, the driver commits them bucket by bucket.

The driver makes the tables ready when it plans, and takes each bucket's lock again to commit. A
commit carries the writer's mark (its write or query id, and the batch), so that a repetition
completes the buckets that lack it and doubles nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from persisting import fs as filesystem
from persisting.errors import BucketLocked, InvalidArgument, SchemaError, TableError
from persisting.schema import EMPTY, Rules
from persisting.schema.arrow import accept, align, beyond_float, merge
from persisting.spark.options import WriteOptions
from persisting.spark.topics import StoredTopic
from persisting.storage import adoption
from persisting.storage.backend import TableBackend
from persisting.storage.shared_schema import FILE as SCHEMA_FILE
from persisting.storage.shared_schema import SharedSchema
from persisting.storage.writers import ANONYMOUS
from persisting.table import bulk
from persisting.table.files import DATA, data_paths, versions_on_disk
from persisting.table.table import FOLDER, Table
from persisting.topic import config as topics
from persisting.topic.config import TopicConfig, Wanted, bucket_folder
from persisting.topic.local import agreed_config
from persisting.topic.owning import owned
from persisting.topic.routing import table_by_bucket

_EVOLVING = Rules(evolving=True)
_FRAGMENT_ROWS = 262_144
_FRAGMENT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Plan:
    """What the tasks need to know of the topic; it pickles."""

    folder: str
    config: TopicConfig
    schema: pa.Schema
    tables: dict[int, dict[str, Any]]


@dataclass
class Written(WriterCommitMessage):
    """What a task wrote."""

    part: int = 0
    query: str | None = None
    fragments: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    columns: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By bucket, the columns that the files were written for."""
    large: set[str] = field(default_factory=set)


def plan(options: WriteOptions, incoming: pa.Schema) -> Plan:
    """Make the topic, or find it, and have every table ready for rows of ``incoming``.

    What can be refused is refused before anything is kept.
    """
    wanted = _wanted(options)
    known = topics.load(options.folder, filesystem.current())
    config = wanted.new() if known is None else wanted.applied_to(known)
    if known is not None:
        StoredTopic.open(options.folder)  # a backend that keeps tables
    _check_column(config, _merged(options, config, incoming))
    for bucket in range(config.num_buckets) if known is not None else ():
        with _owned(options.folder, config, bucket):
            pass
    _, config, _ = agreed_config(wanted, options.folder.parent)
    schema = _agreed(options, config, incoming)
    tables = {}
    for bucket in range(config.num_buckets):
        with _owned(options.folder, config, bucket) as owner:
            tables[bucket] = adoption.prepare(owner.bucket, schema)
    return Plan(str(options.folder), config, schema, tables)


def _wanted(options: WriteOptions) -> Wanted:
    new = not (options.folder / topics.FILE).exists()
    wanted = Wanted(
        topic=options.folder.name,
        num_buckets=options.num_buckets,
        bucket_column=options.bucket_column,
        backend="persisting" if new else None,
        options=None if options.compression is None else {"compression": options.compression},
    )
    wanted.check()
    return wanted


def _check_column(config: TopicConfig, schema: pa.Schema) -> None:
    if config.bucket_column not in schema.names:
        raise InvalidArgument(
            f"the rows have no column {config.bucket_column!r}, by which topic {config.topic!r} is "
            "divided into buckets; name another one with the option bucketColumn"
        )


def _merged(options: WriteOptions, config: TopicConfig, incoming: pa.Schema) -> pa.Schema:
    """The topic's schema with that of the rows, or raise where they contradict."""
    known = _shared(options.folder).read() or EMPTY
    rows = accept(_with_vectors(incoming, options).empty_table(), known).schema
    rules = _EVOLVING if config.backend == "persisting" or not known.names else Rules()
    return merge(known, _as_known(rows, known), rules, defined=bool(known.names))


def _agreed(options: WriteOptions, config: TopicConfig, incoming: pa.Schema) -> pa.Schema:
    """The same, and the topic agrees to it."""
    rules = _EVOLVING if config.backend == "persisting" else Rules()
    return _shared(options.folder).agree(_merged(options, config, incoming), frozenset(), rules)


def _shared(folder: Path) -> SharedSchema:
    return SharedSchema(folder / SCHEMA_FILE, filesystem.current())


def _as_known(rows: pa.Schema, known: pa.Schema) -> pa.Schema:
    """Spark's arrays of floats are the vectors that the topic holds under that name."""
    fields = []
    for one in rows:
        old = known.field(one.name).type if one.name in known.names else None
        is_vector = old is not None and pa.types.is_fixed_size_list(old)
        fields.append(one.with_type(old) if is_vector and pa.types.is_list(one.type) else one)
    return pa.schema(fields)


def _with_vectors(incoming: pa.Schema, options: WriteOptions) -> pa.Schema:
    vectors = options.vectors or {}
    unknown = [name for name in vectors if name not in incoming.names]
    if unknown:
        raise InvalidArgument(f"option vectors names {unknown[0]!r}, which is no column")
    fields = []
    for one in incoming:
        if one.name in vectors:
            if not pa.types.is_list(one.type) or not pa.types.is_floating(one.type.value_type):
                raise InvalidArgument(
                    f"option vectors names {one.name!r}, which is {one.type}, no array of floats"
                )
            one = one.with_type(pa.list_(one.type.value_type, vectors[one.name]))
        fields.append(one)
    return pa.schema(fields)


@contextmanager
def _owned(folder: Path, config: TopicConfig, bucket: int) -> Iterator[TableBackend]:
    try:
        with owned(folder, config, bucket) as owner:
            yield owner
    except BucketLocked as exc:
        raise BucketLocked(
            f"{str(exc).split(';')[0]}. Spark writes to a topic that nobody has open for writing: "
            "close it there, or put through its queue",
            owner=exc.owner,
        ) from exc


def write_task(made: Plan, batches: Iterator[pa.RecordBatch]) -> Written:
    """Write the rows of a partition as files of their buckets' tables."""
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
        for bucket, writer in writers.items():
            if found := writer.finish():
                written.fragments[bucket] = found
                written.columns[bucket] = made.tables[bucket]["columns"]
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    return written


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
        rows = _aligned(pa.Table.from_batches(parts, schema=made.schema))
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


def _aligned(rows: pa.Table) -> pa.Table:
    """Spark's buffers lie at multiples of 8 bytes, and Lance wants decimals at multiples of 16."""
    columns = []
    for column in rows.columns:
        if _has_decimals(column.type):
            column = column.take(pa.array(range(len(column))))
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=rows.schema)


def _has_decimals(dtype: pa.DataType) -> bool:
    if pa.types.is_decimal(dtype):
        return True
    return any(_has_decimals(dtype.field(i).type) for i in range(dtype.num_fields))


class _BucketFiles:
    """Rows of one bucket on their way into files."""

    def __init__(self, made: Plan, bucket: int) -> None:
        self._root = bucket_folder(Path(made.folder), bucket) / FOLDER
        self._version, self._schema = made.tables[bucket]["version"], made.schema
        self._waiting: list[pa.Table] = []
        self._rows = self._bytes = 0
        self._done: list[dict[str, Any]] = []

    def add(self, rows: pa.Table) -> None:
        self._waiting.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._rows >= _FRAGMENT_ROWS or self._bytes >= _FRAGMENT_BYTES:
            self._write()

    def finish(self) -> list[dict[str, Any]]:
        if self._waiting:
            self._write()
        return self._done

    def discard(self) -> None:
        """The task failed: nothing will refer to what was written."""
        _unlink(self._root / DATA, self._done)

    def _write(self) -> None:
        whole = pa.concat_tables(self._waiting).combine_chunks()
        self._done += bulk.write_files(
            self._root, self._version, whole.to_batches(), self._schema, filesystem.current()
        )
        self._waiting, self._rows, self._bytes = [], 0, 0


def commit(
    folder: Path, messages: list[Written], mark: tuple[str, int], *, overwrite: bool = False
) -> int:
    """Commit what tasks wrote, bucket by bucket; how many rows are new."""
    config = StoredTopic.open(folder).config
    ordered = sorted(messages, key=lambda one: one.part)
    large = frozenset(name for one in ordered for name in one.large)
    if large:
        shared = _shared(folder)
        rules = _EVOLVING if config.backend == "persisting" else Rules()
        shared.agree(shared.read() or EMPTY, large, rules)
    rows = 0
    for bucket in range(config.num_buckets):
        fragments = [f for one in ordered for f in one.fragments.get(bucket, [])]
        if fragments or overwrite:
            written_for = [one.columns[bucket] for one in ordered if bucket in one.columns]
            with _owned(folder, config, bucket) as owner:
                new = adoption.adopt(owner.bucket, fragments, written_for, *mark, replace=overwrite)
            if not new:  # stored before, from other files
                _discard_bucket(folder, bucket, fragments)
            rows += new
    return rows


class TopicWriter(DataSourceArrowWriter):
    """A batch write: append, or overwrite."""

    def __init__(self, options: WriteOptions, incoming: pa.Schema, *, overwrite: bool) -> None:
        self._options, self._overwrite = options, overwrite
        # A write that nobody will repeat needs no lasting mark.
        name = options.write_id
        self._mark = (f"{ANONYMOUS}spark:{uuid.uuid4().hex}" if name is None else _mark(name), 0)
        self._plan = plan(options, incoming)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write_task(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = [one for one in messages if isinstance(one, Written)]
        commit(self._options.folder, written, self._mark, overwrite=self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove what the tasks wrote, but for buckets that were committed."""
        _discard(self._options.folder, [one for one in messages if isinstance(one, Written)])


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """A streaming sink: each micro-batch is stored exactly once."""

    def __init__(self, options: WriteOptions, incoming: pa.Schema) -> None:
        self._options, self._incoming = options, incoming
        self._plan: Plan | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Plan when the tasks are sent off: Spark makes the writer anew to commit and to abort,
        and needs no plan there."""
        self._plan = self._plan or plan(self._options, self._incoming)
        return dict(self.__dict__)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        assert self._plan is not None
        return write_task(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = [one for one in messages if isinstance(one, Written)]
        names = {self._options.write_id or one.query for one in written} - {None}
        if not names:
            if any(one.fragments for one in written):
                raise InvalidArgument("Spark names no query: give the sink an option writeId")
            return
        commit(self._options.folder, written, (_mark(str(names.pop())), batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _discard(self._options.folder, [one for one in messages if isinstance(one, Written)])


def _mark(name: str) -> str:
    return f"spark:{name}"


def _discard(folder: Path, messages: list[Written]) -> None:
    """Remove files that no version refers to; what cannot be removed is harmless."""
    for one in messages:
        for bucket, fragments in one.fragments.items():
            _discard_bucket(folder, bucket, fragments)


def _discard_bucket(folder: Path, bucket: int, fragments: list[dict[str, Any]]) -> None:
    table = Table(bucket_folder(folder, bucket), filesystem.current())
    table.refresh()
    used: set[str] = set()
    for version in versions_on_disk(table.root):
        with suppress(TableError):
            used.update(data_paths(table.at(version).fragments))
    lost = [f for f in fragments if not used & {file["path"] for file in f["files"]}]
    _unlink(table.root / DATA, lost)


def _unlink(folder: Path, fragments: list[dict[str, Any]]) -> None:
    for fragment in fragments:
        for file in fragment["files"]:
            (folder / file["path"]).unlink(missing_ok=True)
