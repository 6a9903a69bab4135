"""Writing to a topic: tasks write files, the driver commits them bucket by bucket.

The driver makes the tables ready when it plans, and takes each bucket's lock again to commit. A
commit carries the writer's mark (its write or query id, and the batch), so that a repetition
completes the buckets that lack it and doubles nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from persisting import fs as filesystem
from persisting.bucket import bulk_import
from persisting.bucket.producer_sequences import ANONYMOUS
from persisting.errors import InvalidArgument, TableError
from persisting.records import EMPTY, Rules
from persisting.spark.bucket_owner import owner_of
from persisting.spark.scan_plan import EVOLVING, INSTEAD, Plan, plan, shared_schema
from persisting.spark.source_options import WriteOptions
from persisting.spark.write_task import Written, unlink, write_task
from persisting.table.files import DATA, data_paths, versions_on_disk
from persisting.table.table import Table
from persisting.topic.spec import bucket_folder
from persisting.topic.topic_files import TopicFolder


def commit(
    folder: Path, messages: list[Written], mark: tuple[str, int], *, overwrite: bool = False
) -> int:
    """Commit what tasks wrote, bucket by bucket; how many rows are new."""
    config = TopicFolder.open(folder).config
    ordered = sorted(messages, key=lambda one: one.part)
    large = frozenset(name for one in ordered for name in one.large)
    if large:
        shared = shared_schema(folder)
        rules = EVOLVING if config.backend == "persisting" else Rules()
        shared.propose(shared.read() or EMPTY, large, rules)
    rows = 0
    for bucket in range(config.num_buckets):
        fragments = [f for one in ordered for f in one.fragments.get(bucket, [])]
        if fragments or overwrite:
            written_for = [one.columns[bucket] for one in ordered if bucket in one.columns]
            with owner_of(folder, config, bucket, INSTEAD) as owner:
                new = bulk_import.adopt(
                    owner.bucket, fragments, written_for, *mark, replace=overwrite
                )
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
    unlink(table.root / DATA, lost)
