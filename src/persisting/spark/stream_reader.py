"""Streaming reads: each micro-batch is a range of offsets in every bucket, read exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from persisting import fs as filesystem
from persisting.errors import InvalidArgument, OffsetOutOfRange, StorageError
from persisting.spark import stream_offsets
from persisting.spark.batch_reader import Part, bounds, rows_per_partition, shares
from persisting.spark.source_options import LATEST, ReadOptions
from persisting.spark.stream_offsets import Place
from persisting.spark.topic_scan import checked_filter, read_slices
from persisting.topic import spec as topics
from persisting.topic.scan import Filter, Slice
from persisting.topic.topic_files import TopicFolder


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a topic. Spark keeps the offsets; this looks them up."""

    def __init__(self, options: ReadOptions, target: pa.Schema) -> None:
        self._options, self._target = options, target
        self._where: Filter | None = None
        self._checked = False
        self._until: dict[int, int] | None = None
        self._known: TopicFolder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    @property
    def _topic(self) -> TopicFolder:
        self._check()
        if self._known is None:
            self._known = TopicFolder.open(self._options.folder)
            self._known.recover()
        return self._known

    def initialOffset(self) -> dict[str, Any]:
        places = {b: Place(0) for b in self._topic.buckets}
        for part in bounds(self._topic, self._options):
            places[part.bucket] = Place(part.start, part.epoch)
        return stream_offsets.encode(places, self._id())

    def _check(self) -> None:
        """Here and not at construction, where Spark would hide the reason behind an error of its
        own."""
        if self._checked:
            return
        for name, is_set in (
            ("version, timestamp and tag", self._options.version is not None),
            ("endingOffsets and endingTimestamp", self._options.ending != LATEST),
        ):
            if is_set:
                raise InvalidArgument(f"a stream follows a topic: {name} are not for it")
        self._where = checked_filter(self._options)
        self._checked = True

    def getDefaultReadLimit(self) -> ReadLimit:
        self._check()
        most = self._options.max_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = self._ends()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        self._topic.recover()  # an owner may have crashed since
        anew = self._is_another(start)
        if anew:
            self._known = None  # it may have other buckets
        places = {
            b: self._now(b, place, anew=anew)
            for b, place in stream_offsets.decode(start).items()
            if b in self._topic.buckets
        }
        for bucket in self._topic.buckets:
            places.setdefault(bucket, Place(0, len(self._topic.table(bucket).restores)))
        ends = self._ends() if self._until is None else self._until
        lags = {b: max(0, ends.get(b, 0) - place.offset) for b, place in places.items()}
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        taken = stream_offsets.shares(lags, most)
        return stream_offsets.encode(
            {b: Place(place.offset + taken[b], place.epoch) for b, place in places.items()},
            self._id(),
        )

    def reportLatestOffset(self) -> dict[str, Any]:
        ends = self._ends()
        return stream_offsets.encode(
            {b: Place(end, len(self._topic.table(b).restores)) for b, end in ends.items()},
            self._id(),
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begins, parts = stream_offsets.decode(start), []
        was_another, is_another = self._is_another(start), self._is_another(end)
        for bucket, place in stream_offsets.decode(end).items():
            place = self._now(bucket, place, anew=is_another)
            begin = begins.get(bucket, Place(0, place.epoch))
            begin = self._now(bucket, begin, anew=was_another)
            first = self._left(bucket, begin.offset)
            parts.append(Slice(str(self._topic.folder), bucket, first, place.offset, place.epoch))
        most = rows_per_partition(self._topic, self._options, parts)
        return [Part(one) for one in shares(parts, most) if one]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Part)
        self._check()  # tasks have a reader of their own, which nobody has asked for anything yet
        return read_slices(
            partition.slices, self._target, self._where, metadata=self._options.metadata
        )

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has stored what was read up to here; nothing is kept of that."""

    def stop(self) -> None:
        self._known = None

    def _ends(self) -> dict[int, int]:
        return {bucket: self._topic.view(bucket).end for bucket in self._topic.buckets}

    def _id(self) -> str:
        """The topic's id as it is now: it may have been made again under its name."""
        found = topics.load(self._options.folder, filesystem.current())
        return "" if found is None else found.id

    def _is_another(self, offset: dict[str, Any]) -> bool:
        """Whether an offset is of a topic that was here before."""
        then, now = stream_offsets.topic_of(offset), self._id()
        return bool(then and now) and then != now

    def _now(self, bucket: int, place: Place, *, anew: bool = False) -> Place:
        """A place after restores of its bucket; unless told otherwise they are an error."""
        table = self._topic.table(bucket)
        restores, view = table.restores, table.view
        beyond = place.epoch == len(restores) and place.offset > view.end
        if anew or beyond or place.epoch > len(restores):
            if self._options.fail_on_loss:
                why = "the topic was made anew" + ("" if anew else ", or put back from a backup")
                raise StorageError(
                    f"bucket {bucket} of {self._topic.folder} ends at offset {view.end}, and the "
                    f"stream had come to {place.offset}: {why}. Begin with a new checkpoint, or "
                    "set failOnDataLoss=false to read the bucket from its start"
                )
            return Place(view.start, len(restores))
        if place.epoch == len(restores):
            return place
        least = min([place.offset, *(one.end for one in restores[place.epoch :])])
        if least < place.offset and self._options.fail_on_loss:
            raise StorageError(
                f"bucket {bucket} of {self._topic.folder} was restored to an older version that "
                f"ends at offset {least}, and the stream had come to {place.offset}. Set "
                "failOnDataLoss=false to go on from there, or begin with a new checkpoint"
            )
        return Place(least, len(restores))

    def _left(self, bucket: int, offset: int) -> int:
        """Where to begin, if retention has removed what was there."""
        start = self._topic.view(bucket).start
        if offset < start and self._options.fail_on_loss:
            raise OffsetOutOfRange(
                f"offsets {offset} to {start} of bucket {bucket} of {self._topic.folder} were "
                "removed by retention before the stream had read them. Set failOnDataLoss=false "
                "to go on with what is left"
            )
        return max(offset, start)
