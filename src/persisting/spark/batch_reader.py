"""Batch reads: planned once, as ranges of offsets, which never change."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from persisting.errors import InvalidArgument, OffsetOutOfRange
from persisting.spark.gc_tuning import freeze_loaded_objects
from persisting.spark.open_topics import open_topic
from persisting.spark.partial_aggregates import PartialAggregates
from persisting.spark.scan_hints import ROWS, KeyedRows, ScanHints, snapshot_text
from persisting.spark.source_options import (
    BYTES_PER_PARTITION,
    EARLIEST,
    ROWS_PER_PARTITION,
    ReadOptions,
)
from persisting.spark.topic_scan import (
    look_up_slice,
    pushed_hint,
    read_slices,
    topic_fields,
)
from persisting.table.view import TableView
from persisting.topic import handover
from persisting.topic.scan import METADATA, Filter, Slice
from persisting.topic.topic_files import TopicFolder

_MOST_LOOKED_UP = 1000
_MOST_LOOKED_UP_BYTES = 1 << 20
"""Up to this many rows are read while a scan is planned, if an index finds them: the planner has
the tables open, and a task would open them again."""
_LOOKED_UP_AT_ONCE = 4
"""Buckets in which rows are looked up at the same time."""


class SlicePartition(InputPartition):
    """What one task reads: slices, and rows that were looked up.

    ``snapshot`` is the text of all slices of a load, with which later scans of the same load are
    planned. Only the first partition of a scan has it.
    """

    def __init__(
        self, value: tuple[Slice, ...], snapshot: str | None = None, rows: KeyedRows | None = None
    ) -> None:
        super().__init__(value)
        self.slices, self.rows = value, rows
        self.snapshot = snapshot  # the last: the end of the pickled bytes is searched for it


class TopicReader(DataSourceReader):
    """Reads a topic; it is pickled and sent to tasks."""

    def __init__(
        self,
        options: ReadOptions,
        target: pa.Schema,
        where: Filter | None = None,
        hints: ScanHints | None = None,
        aggregates: PartialAggregates | None = None,
    ) -> None:
        """With ``aggregates`` it returns these instead of the rows."""
        self._options, self._target, self._where = options, target, where
        self._hints, self._aggregates = hints or ScanHints(), aggregates
        self._topic: TopicFolder | None = None
        if self._hints.conditions:
            self._topic = open_topic(options.folder)
        self._hint = pushed_hint(options, self._hints.conditions, target, self._topic)

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get the reader without the tables that are open where the scan is planned."""
        return {**self.__dict__, "_topic": None}

    def partitions(self) -> list[InputPartition]:
        topic = self._topic or open_topic(self._options.folder)
        topic.recover()
        seen = self._hints.slices(topic.place)
        if self._options.flush and seen is None:
            handover.flush(topic.handover_place, topic.config, self._options.owner_seconds)
        freeze_loaded_objects()
        slices = slices_to_read(topic, self._options) if seen is None else seen
        self._check_names(topic, slices)
        left, rows = self._look_up(topic, slices)
        most = rows_per_partition(topic, self._options, slices) if left else 1
        first, *rest = pack_slices(left, most)
        text = snapshot_text(slices, None if left else rows)
        return [SlicePartition(first, text, rows), *map(SlicePartition, rest)]

    def _look_up(
        self, topic: TopicFolder, slices: list[Slice]
    ) -> tuple[list[Slice], KeyedRows | None]:
        """Return the slices that tasks must read, and the matching rows of all others."""
        if self._hint is None or self._where is not None or self._aggregates is not None:
            return slices, None
        look_up = partial(
            look_up_slice,
            topic,
            target=self._target,
            hint=self._hint,
            most_rows=_MOST_LOOKED_UP,
            metadata=self._options.metadata,
        )
        filled = [part for part in slices if part.start < part.end]
        left: list[Slice] = []
        found: list[pa.RecordBatch] = []
        room = _MOST_LOOKED_UP_BYTES
        with ThreadPoolExecutor(_LOOKED_UP_AT_ONCE) as threads:
            for first in range(0, len(filled), _LOOKED_UP_AT_ONCE):
                parts = filled[first : first + _LOOKED_UP_AT_ONCE]
                for part, rows in zip(
                    parts, threads.map(partial(look_up, most_bytes=room), parts), strict=True
                ):
                    size = sum(batch.nbytes for batch in rows or ())
                    if rows is None or size > room:
                        left.append(part)
                    else:
                        found += rows
                        room -= size
        return left, _encoded(found, self._target) if found or not left else None

    def _check_names(self, topic: TopicFolder, slices: Sequence[Slice]) -> None:
        """Raise if the schema that the user gave misspells the case of a field's name.

        Other unknown names are allowed: the topic may get those fields later.
        """
        known = {ROWS, *(METADATA.names if self._options.metadata else ())}
        known.update(name for part in slices for name in topic.view(part.bucket).schema.names)
        if known.issuperset(self._target.names):
            return
        known.update(topic_fields(self._options).names)
        by_lower_case = {name.lower(): name for name in (*METADATA.names, *known)}
        for name in self._target.names:
            if name not in known and name.lower() in by_lower_case:
                fields = ", ".join(map(repr, sorted(known)))
                raise InvalidArgument(
                    f"the schema names {name!r}; the fields of the topic are: {fields}"
                )

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, SlicePartition)
        rows = self._rows(partition)
        return rows if self._aggregates is None else self._aggregates.of(rows)

    def _rows(self, partition: SlicePartition) -> Iterator[pa.RecordBatch]:
        if partition.rows is not None:
            yield from pa.ipc.open_stream(partition.rows.stream)
        yield from read_slices(
            partition.slices,
            self._target,
            self._where,
            metadata=self._options.metadata,
            hint=self._hint,
        )


def _encoded(batches: list[pa.RecordBatch], schema: pa.Schema) -> KeyedRows:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return KeyedRows(bytes(sink.getvalue()))


def rows_per_partition(topic: TopicFolder, options: ReadOptions, slices: Iterable[Slice]) -> int:
    """Return how many rows a task reads at most: the option, else by the size of rows on disk."""
    if options.rows_per_partition is not None:
        return options.rows_per_partition
    tables = [(topic.table(part.bucket), part.version) for part in slices]
    views = [table.view if version is None else table.at(version) for table, version in tables]
    sizes = [size for view in views for size in view.sizes]
    rows, nbytes = sum(size.rows for size in sizes), sum(size.nbytes for size in sizes)
    return max(1, min(ROWS_PER_PARTITION, BYTES_PER_PARTITION * rows // max(1, nbytes)))


def pack_slices(slices: Iterable[Slice], most: int) -> list[tuple[Slice, ...]]:
    """Pack slices into groups of equal size with at most ``most`` rows each.

    A group may span several buckets, since every task has a fixed cost, whatever it reads.
    """
    left = [part for part in slices if part.start < part.end]
    rows = sum(part.end - part.start for part in left)
    count = max(1, -(-rows // most))
    groups: list[tuple[Slice, ...]] = []
    for number in range(count):
        room = rows * (number + 1) // count - rows * number // count
        group = []
        while room:
            part = left.pop(0)
            end = min(part.end, part.start + room)
            group.append(replace(part, end=end))
            room -= end - part.start
            if end < part.end:
                left.insert(0, replace(part, start=end))
        groups.append(tuple(group))
    return groups


def slices_to_read(topic: TopicFolder, options: ReadOptions) -> list[Slice]:
    """Return the range of offsets to read from each bucket that has a table."""
    versions = None if options.version is None else topic.versions(options.version)
    _check_buckets(topic, options)
    slices = []
    for bucket in topic.buckets:
        table = topic.table(bucket)
        version = None if versions is None else versions[bucket]
        view = table.view if version is None else table.at(version)
        start = _offset(topic, bucket, view, options.starting, options)
        end = _offset(topic, bucket, view, options.ending, options)
        if view.dataset is not None:
            epoch = len(table.restores)
            slices.append(Slice(topic.place, bucket, start, end, epoch, version))
    return slices


def _offset(
    topic: TopicFolder,
    bucket: int,
    view: TableView,
    position: str | dict[int, int] | dt.datetime,
    options: ReadOptions,
) -> int:
    """Return the offset of a bucket that a position of the options stands for."""
    if isinstance(position, dt.datetime):
        return min(max(topic.offset_at(bucket, position, view), view.start), view.end)
    if isinstance(position, str):
        return view.start if position == EARLIEST else view.end
    default = view.start if position is options.starting else view.end
    offset = position.get(bucket, default)
    if 0 < offset < view.start and options.fail_on_loss:
        raise OffsetOutOfRange(
            f"offset {offset} of bucket {bucket} was removed by retention: the first one left is "
            f"{view.start}. Start there, or set failOnDataLoss=false"
        )
    return min(max(offset, view.start), view.end)


def _check_buckets(topic: TopicFolder, options: ReadOptions) -> None:
    positions = (("startingOffsets", options.starting), ("endingOffsets", options.ending))
    for name, position in positions:
        if not isinstance(position, dict):
            continue
        unknown = [bucket for bucket in position if bucket not in topic.buckets]
        if unknown:
            raise InvalidArgument(
                f"option {name} names bucket {unknown[0]}; the topic has buckets 0 to "
                f"{len(topic.buckets) - 1}"
            )
