"""Writing to a topic: tasks write files, and the driver commits them or hands them over.

The driver prepares the tables when it plans, and commits when the tasks are done. Where a process
has a bucket open, both are done by that process, the owner. A commit carries the producer sequence
of the writer (its write id or query id, and the batch), so that a repeated write completes the
buckets that lack it and stores nothing twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from persisting.bucket.producer_sequences import ANONYMOUS
from persisting.errors import InvalidArgument, NoSuchTopic, SchemaError, StorageError
from persisting.records import EMPTY, Rules
from persisting.records.evolution import integers_become_floats
from persisting.spark.source_options import (
    ADD_FIELDS,
    DROP_TOPIC,
    WriteOptions,
    write_options,
)
from persisting.spark.write_plan import EVOLVING, WritePlan, add_fields, plan_write
from persisting.spark.write_target import BucketFiles, Fragments, Sequence, Target, target_of
from persisting.spark.write_task import TaskOutput, write_task
from persisting.store.object_store import open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress
from persisting.topic import deletion, store_deletion
from persisting.topic.spec import TopicConfig


def commit(
    options: WriteOptions,
    outputs: list[TaskOutput],
    sequence: Sequence,
    *,
    overwrite: bool = False,
) -> int:
    """Commit the files of tasks; return how many rows are new."""
    target = target_of(options.place, options.owner_seconds)
    config = _config(target, options)
    ordered = sorted(outputs, key=lambda output: output.part)
    _note_large_numbers(target, config, ordered)
    files = {
        bucket: found
        for bucket in range(config.num_buckets)
        if (found := _files_of(bucket, ordered)).fragments or overwrite
    }
    return target.commit(config, files, sequence, overwrite=overwrite)


def _config(target: Target, options: WriteOptions) -> TopicConfig:
    config = target.load()
    if config is None:
        raise NoSuchTopic(f"the topic {options.place} was deleted while rows were written to it")
    return config


def _files_of(bucket: int, outputs: list[TaskOutput]) -> BucketFiles:
    written = [output for output in outputs if bucket in output.fragments]
    return BucketFiles(
        [fragment for output in written for fragment in output.fragments[bucket]],
        [output.columns[bucket] for output in written],
        written[0].schema if written else EMPTY,
    )


def _note_large_numbers(target: Target, config: TopicConfig, outputs: list[TaskOutput]) -> None:
    """Note fields with whole numbers that a float cannot hold: they must not become floats.

    Raise if one of them has done so since the write was planned.
    """
    large = frozenset(name for output in outputs for name in output.large)
    if not large:
        return
    shared = target.shared_schema()
    rules = EVOLVING if config.backend == "persisting" else Rules()
    now = shared.propose(shared.read() or EMPTY, large, rules)
    for output in outputs:
        for name in output.large:
            planned = output.schema.field(name).type
            if integers_become_floats(planned, now.field(name).type):
                raise SchemaError(
                    f"field {name!r} became a float while the rows were written, and they hold "
                    "whole numbers beyond 2**53 in it; nothing was stored, write them to another "
                    "column"
                )


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
        commit(self._options, outputs, self._sequence, overwrite=self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove the files that the tasks wrote, except those of buckets that were committed."""
        _discard(self._options, _outputs(messages), self._sequence)


class TopicDeletion(DataSourceArrowWriter):
    """The answer to ``DROP TABLE``: creating it deletes the topic, unless a process uses it."""

    def __init__(self, options: Mapping[str, str]) -> None:
        place = write_options(_without(options, DROP_TOPIC)).place
        if isinstance(place, StoreAddress):
            store_deletion.delete(open_store(place, StorageOptions()))
        else:
            deletion.delete(place)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        raise StorageError("the topic was deleted; nothing can be written to it")


class NewFields(DataSourceArrowWriter):
    """The answer to ``ALTER TABLE … ADD COLUMN``: creating it adds the fields to the topic."""

    def __init__(self, options: Mapping[str, str], fields: pa.Schema) -> None:
        add_fields(write_options(_without(options, ADD_FIELDS)), fields)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        raise StorageError("fields were added to the topic; this writes no rows")


def _without(options: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in options.items() if key.lower() != name.lower()}


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
        sequence = self._sequence(outputs, batchId)
        if sequence is not None:
            commit(self._options, outputs, sequence)
        elif any(output.fragments for output in outputs):
            raise InvalidArgument("Spark gives no query id: set the option writeId on the sink")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        outputs = _outputs(messages)
        _discard(self._options, outputs, self._sequence(outputs, batchId))

    def _sequence(self, outputs: list[TaskOutput], batch: int) -> Sequence | None:
        """Return the producer sequence of a micro-batch; None if nothing names the query."""
        names = {self._options.write_id or output.query for output in outputs} - {None}
        return (_producer(str(names.pop())), batch) if names else None


def _outputs(messages: list[WriterCommitMessage | None]) -> list[TaskOutput]:
    """Return the messages of tasks that succeeded."""
    return [message for message in messages if isinstance(message, TaskOutput)]


def _producer(name: str) -> str:
    return f"spark:{name}"


def _discard(options: WriteOptions, outputs: list[TaskOutput], sequence: Sequence | None) -> None:
    target = target_of(options.place, options.owner_seconds)
    config = target.load()
    files: dict[int, Fragments] = {}
    for output in outputs:
        for bucket, fragments in output.fragments.items():
            files[bucket] = [*files.get(bucket, []), *fragments]
    if config is not None and files:
        target.discard(config, files, sequence)
