"""Writing to a topic: tasks write files, the driver commits them bucket by bucket.

The driver prepares the tables when it plans, and takes each bucket's lock again to commit. A commit
carries the producer sequence of the writer (its write id or query id, and the batch), so that a
repeated write completes the buckets that lack it and stores nothing twice.
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
from persisting.spark.source_options import WriteOptions
from persisting.spark.write_plan import (
    EVOLVING,
    USE_THE_QUEUE,
    WritePlan,
    plan_write,
    shared_schema,
)
from persisting.spark.write_task import TaskOutput, remove_files, write_task
from persisting.table.files import DATA, data_paths, versions_on_disk
from persisting.table.table import Table
from persisting.topic.spec import bucket_folder
from persisting.topic.topic_files import TopicFolder


def commit(
    folder: Path, outputs: list[TaskOutput], sequence: tuple[str, int], *, overwrite: bool = False
) -> int:
    """Commit the files of tasks, bucket by bucket; return how many rows are new."""
    config = TopicFolder.open(folder).config
    ordered = sorted(outputs, key=lambda output: output.part)
    large = frozenset(name for output in ordered for name in output.large)
    if large:
        shared = shared_schema(folder)
        rules = EVOLVING if config.backend == "persisting" else Rules()
        shared.propose(shared.read() or EMPTY, large, rules)
    rows = 0
    for bucket in range(config.num_buckets):
        fragments = [f for output in ordered for f in output.fragments.get(bucket, [])]
        if fragments or overwrite:
            columns = [output.columns[bucket] for output in ordered if bucket in output.columns]
            with owner_of(folder, config, bucket, USE_THE_QUEUE) as owner:
                new = bulk_import.adopt(
                    owner.bucket, fragments, columns, *sequence, replace=overwrite
                )
            if not new:  # an earlier attempt stored these rows from other files
                _discard_bucket(folder, bucket, fragments)
            rows += new
    return rows


class TopicWriter(DataSourceArrowWriter):
    """A batch write: append, or overwrite."""

    def __init__(self, options: WriteOptions, incoming: pa.Schema, *, overwrite: bool) -> None:
        self._options, self._overwrite = options, overwrite
        # Without a write id the write cannot be repeated, and its sequence need not be kept.
        name = options.write_id
        anonymous = f"{ANONYMOUS}spark:{uuid.uuid4().hex}"
        self._sequence = (anonymous if name is None else _producer(name), 0)
        self._plan = plan_write(options, incoming)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write_task(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        outputs = _outputs(messages)
        commit(self._options.folder, outputs, self._sequence, overwrite=self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove the files that the tasks wrote, except those of buckets that were committed."""
        _discard(self._options.folder, _outputs(messages))


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """A streaming sink: each micro-batch is stored exactly once.

    Spark constructs another one to commit or abort a micro-batch; that one has no plan.
    """

    def __init__(self, options: WriteOptions, plan: WritePlan | None) -> None:
        self._options, self._plan = options, plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        assert self._plan is not None
        return write_task(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        outputs = _outputs(messages)
        names = {self._options.write_id or output.query for output in outputs} - {None}
        if not names:
            if any(output.fragments for output in outputs):
                raise InvalidArgument("Spark gives no query id: set the option writeId on the sink")
            return
        commit(self._options.folder, outputs, (_producer(str(names.pop())), batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _discard(self._options.folder, _outputs(messages))


def _outputs(messages: list[WriterCommitMessage | None]) -> list[TaskOutput]:
    """Return the messages of tasks that succeeded."""
    return [message for message in messages if isinstance(message, TaskOutput)]


def _producer(name: str) -> str:
    return f"spark:{name}"


def _discard(folder: Path, outputs: list[TaskOutput]) -> None:
    for output in outputs:
        for bucket, fragments in output.fragments.items():
            _discard_bucket(folder, bucket, fragments)


def _discard_bucket(folder: Path, bucket: int, fragments: list[dict[str, Any]]) -> None:
    """Remove the files of fragments to which no version of the table refers."""
    table = Table(bucket_folder(folder, bucket), filesystem.current())
    table.refresh()
    used: set[str] = set()
    for version in versions_on_disk(table.root):
        with suppress(TableError):
            used.update(data_paths(table.at(version).fragments))
    unused = [f for f in fragments if not used & {file["path"] for file in f["files"]}]
    remove_files(table.root / DATA, unused)
