"""Batch reads: planned once, on offsets that never move."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from persisting.errors import InvalidArgument, OffsetOutOfRange
from persisting.spark.gc_tuning import settle
from persisting.spark.source_options import (
    BYTES_PER_PARTITION,
    EARLIEST,
    ROWS_PER_PARTITION,
    ReadOptions,
)
from persisting.spark.topic_scan import fields_of, read_slices
from persisting.table.view import TableView
from persisting.topic.scan import METADATA, Filter, Slice
from persisting.topic.topic_files import TopicFolder


class Part(InputPartition):
    """What one task reads."""

    def __init__(self, value: tuple[Slice, ...]) -> None:
        super().__init__(value)
        self.slices = value


class TopicReader(DataSourceReader):
    """Reads a topic; everything in it pickles."""

    def __init__(
        self, options: ReadOptions, target: pa.Schema, where: Filter | None = None
    ) -> None:
        self._options, self._target, self._where = options, target, where

    def partitions(self) -> list[InputPartition]:
        topic = TopicFolder.open(self._options.folder)
        topic.recover()
        settle()
        found = bounds(topic, self._options)
        self._check_names(topic, found)
        most = rows_per_partition(topic, self._options, found)
        return [Part(one) for one in shares(found, most)]

    def _check_names(self, topic: TopicFolder, found: list[Slice]) -> None:
        """A schema that the user has given may name fields that are not there yet, but not one by
        a name that is nearly its own."""
        known = set(METADATA.names if self._options.metadata else ())
        known.update(name for one in found for name in topic.view(one.bucket).schema.names)
        if known.issuperset(self._target.names):
            return
        known.update(fields_of(self._options).names)
        meant = {name.lower(): name for name in (*METADATA.names, *known)}
        for name in self._target.names:
            if name not in known and name.lower() in meant:
                there = ", ".join(map(repr, sorted(known)))
                raise InvalidArgument(
                    f"the schema names {name!r}; the fields of the topic are: {there}"
                )

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Part)
        return read_slices(
            partition.slices, self._target, self._where, metadata=self._options.metadata
        )


def rows_per_partition(topic: TopicFolder, options: ReadOptions, found: Iterable[Slice]) -> int:
    """Rows that a task reads at most: as was said, else by what a row takes on disk."""
    if options.rows_per_partition is not None:
        return options.rows_per_partition
    tables = [(topic.table(one.bucket), one.version) for one in found]
    views = [table.view if version is None else table.at(version) for table, version in tables]
    sizes = [size for view in views for size in view.sizes]
    rows, nbytes = sum(size.rows for size in sizes), sum(size.nbytes for size in sizes)
    return max(1, min(ROWS_PER_PARTITION, BYTES_PER_PARTITION * rows // max(1, nbytes)))


def shares(found: Iterable[Slice], most: int) -> list[tuple[Slice, ...]]:
    """The slices in parts of equal size, of so many rows at most.

    A part goes on from one bucket into the next: each task costs, whatever it reads.
    """
    left = [one for one in found if one.start < one.end]
    rows = sum(one.end - one.start for one in left)
    count = max(1, -(-rows // most))
    parts: list[tuple[Slice, ...]] = []
    for number in range(count):
        room = rows * (number + 1) // count - rows * number // count
        taken = []
        while room:
            one = left.pop(0)
            end = min(one.end, one.start + room)
            taken.append(replace(one, end=end))
            room -= end - one.start
            if end < one.end:
                left.insert(0, replace(one, start=end))
        parts.append(tuple(taken))
    return parts


def bounds(topic: TopicFolder, options: ReadOptions) -> list[Slice]:
    """The offsets of each bucket that a read was told to read."""
    chosen = None if options.version is None else topic.versions(options.version)
    _check_buckets(topic, options)
    found = []
    for bucket in topic.buckets:
        table = topic.table(bucket)
        version = None if chosen is None else chosen[bucket]
        view = table.view if version is None else table.at(version)
        start = _position(topic, bucket, view, options.starting, options)
        end = _position(topic, bucket, view, options.ending, options)
        if view.dataset is not None:
            found.append(Slice(str(topic.folder), bucket, start, end, len(table.restores), version))
    return found


def _position(
    topic: TopicFolder,
    bucket: int,
    view: TableView,
    wanted: str | dict[int, int] | dt.datetime,
    options: ReadOptions,
) -> int:
    if isinstance(wanted, dt.datetime):
        return min(max(topic.offset_at(bucket, wanted, view), view.start), view.end)
    if isinstance(wanted, str):
        return view.start if wanted == EARLIEST else view.end
    default = view.start if wanted is options.starting else view.end
    offset = wanted.get(bucket, default)
    if 0 < offset < view.start and options.fail_on_loss:
        raise OffsetOutOfRange(
            f"offset {offset} of bucket {bucket} was removed by retention: the first one left is "
            f"{view.start}. Begin there, or set failOnDataLoss=false"
        )
    return min(max(offset, view.start), view.end)


def _check_buckets(topic: TopicFolder, options: ReadOptions) -> None:
    for name, wanted in (("startingOffsets", options.starting), ("endingOffsets", options.ending)):
        unknown = [b for b in wanted if b not in topic.buckets] if isinstance(wanted, dict) else []
        if unknown:
            raise InvalidArgument(
                f"option {name} names bucket {unknown[0]}; the topic has buckets 0 to "
                f"{len(topic.buckets) - 1}"
            )
