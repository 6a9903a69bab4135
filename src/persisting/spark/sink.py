"""Writing to a topic: tasks write files, the driver commits them bucket by bucket.

The driver makes the tables ready when it plans, and takes each bucket's lock again to commit. A
commit carries the writer's mark (its write or query id, and the batch), so that a repetition
completes the buckets that lack it and doubles nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
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
from persisting.errors import BucketLocked, InvalidArgument
from persisting.schema import EMPTY, Rules
from persisting.schema.arrow import accept, align, beyond_float, merge
from persisting.spark.options import WriteOptions
from persisting.spark.topics import StoredTopic
from persisting.storage import adoption
from persisting.storage.backend import TableBackend
from persisting.storage.shared_schema import FILE as SCHEMA_FILE
from persisting.storage.shared_schema import SharedSchema
from persisting.table import bulk
from persisting.table.table import FOLDER
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
    large: set[str] = field(default_factory=set)


def plan(options: WriteOptions, incoming: pa.Schema) -> Plan:
    """Make the topic, or find it, and have every table ready for rows of ``incoming``."""
    config = _topic(options)
    schema = _agreed(options, config, incoming, frozenset())
    if config.bucket_column not in schema.names:
        raise InvalidArgument(
            f"the rows have no column {config.bucket_column!r}, by which topic {config.topic!r} is "
            "divided into buckets; name another one with the option bucketColumn"
        )
    tables = {}
    for bucket in range(config.num_buckets):
        with _owned(options.folder, config, bucket) as owner:
            tables[bucket] = adoption.prepare(owner.bucket, schema)
    return Plan(str(options.folder), config, schema, tables)


def _topic(options: WriteOptions) -> TopicConfig:
    wanted = Wanted(
        topic=options.folder.name,
        num_buckets=options.num_buckets,
        bucket_column=options.bucket_column,
        options=None if options.compression is None else {"compression": options.compression},
    )
    wanted.check()
    if not (options.folder / "topic.json").exists():
        wanted = Wanted(**{**_fields(wanted), "backend": "persisting"})
    _, config, _ = agreed_config(wanted, options.folder.parent)
    return StoredTopic.open(options.folder).config if config is None else config


def _fields(wanted: Wanted) -> dict[str, Any]:
    return {name: getattr(wanted, name) for name in wanted.__struct_fields__}


def _agreed(
    options: WriteOptions, config: TopicConfig, incoming: pa.Schema, large: frozenset[str]
) -> pa.Schema:
    """The topic's schema with that of the rows, or raise where they contradict."""
    shared = SharedSchema(options.folder / SCHEMA_FILE, filesystem.current())
    known = shared.read() or EMPTY
    vectors = _with_vectors(incoming, options)
    rows = accept(vectors.empty_table(), known).schema
    wanted = merge(known, _as_known(rows, known), _EVOLVING, defined=bool(known.names))
    rules = _EVOLVING if config.backend == "persisting" or not known.names else Rules()
    return shared.agree(wanted, large, rules)


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
    for batch in batches:
        if not batch.num_rows:
            continue
        table = accept(batch, made.schema)
        rows = pa.Table.from_batches(
            [align(one, made.schema) for one in table.to_batches()], schema=made.schema
        )
        written.large |= {
            name
            for name in made.schema.names
            if any(beyond_float(chunk) for chunk in rows.column(name).chunks)
        }
        if made.config.num_buckets == 1:
            writers[0].add(rows)
            continue
        routed = table_by_bucket(rows, made.config.bucket_column, made.config.num_buckets)
        for bucket, part in routed.items():
            writers[bucket].add(part)
    for bucket, writer in writers.items():
        if found := writer.finish():
            written.fragments[bucket] = found
    return written


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

    def _write(self) -> None:
        whole = pa.concat_tables(self._waiting).combine_chunks()
        self._done += bulk.write_files(
            self._root, self._version, whole.to_batches(), self._schema, filesystem.current()
        )
        self._waiting, self._rows, self._bytes = [], 0, 0


def commit(
    options: WriteOptions,
    made: Plan,
    messages: list[Written],
    writer: str,
    number: int,
    *,
    overwrite: bool = False,
) -> int:
    """Commit what tasks wrote, bucket by bucket; how many rows are new."""
    ordered = sorted(messages, key=lambda one: one.part)
    large = frozenset(name for one in ordered for name in one.large)
    if large:
        _agreed(options, made.config, made.schema, large)
    rows = 0
    for bucket, table in made.tables.items():
        fragments = [f for one in ordered for f in one.fragments.get(bucket, [])]
        if fragments or overwrite:
            with _owned(Path(made.folder), made.config, bucket) as owner:
                rows += adoption.adopt(
                    owner.bucket, fragments, table["columns"], writer, number, replace=overwrite
                )
    return rows


class TopicWriter(DataSourceArrowWriter):
    """A batch write: append, or overwrite."""

    def __init__(self, options: WriteOptions, incoming: pa.Schema, *, overwrite: bool) -> None:
        self._options, self._overwrite = options, overwrite
        self._writer = f"spark:{options.write_id or uuid.uuid4().hex}"
        self._plan = plan(options, incoming)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write_task(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = [one for one in messages if isinstance(one, Written)]
        commit(self._options, self._plan, written, self._writer, 0, overwrite=self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing refers to the files of the tasks; remove those that are known."""
        _discard(self._plan, [one for one in messages if isinstance(one, Written)])


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """A streaming sink: each micro-batch is stored exactly once."""

    def __init__(self, options: WriteOptions, incoming: pa.Schema) -> None:
        self._options = options
        self._plan = plan(options, incoming)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write_task(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = [one for one in messages if isinstance(one, Written)]
        names = {self._options.write_id or one.query for one in written} - {None}
        if not names:
            if any(one.fragments for one in written):
                raise InvalidArgument("Spark names no query: give the sink an option writeId")
            return
        commit(self._options, self._plan, written, f"spark:{names.pop()}", batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _discard(self._plan, [one for one in messages if isinstance(one, Written)])


def _discard(made: Plan, messages: list[Written]) -> None:
    """Remove files that will never be committed; what cannot be removed is harmless."""
    for one in messages:
        for bucket, fragments in one.fragments.items():
            data = bucket_folder(Path(made.folder), bucket) / FOLDER / "data"
            for fragment in fragments:
                for file in fragment["files"]:
                    (data / file["path"]).unlink(missing_ok=True)
