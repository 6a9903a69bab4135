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

from persisting.errors import InvalidArgument, OffsetOutOfRange, StorageError
from persisting.spark import stream_offsets
from persisting.spark.batch_reader import (
    SlicePartition,
    pack_slices,
    rows_per_partition,
    slices_to_read,
)
from persisting.spark.source_options import LATEST, ReadOptions
from persisting.spark.stream_offsets import StreamPlace
from persisting.spark.topic_scan import checked_filter, read_slices
from persisting.topic import handover
from persisting.topic.scan import Filter, Slice
from persisting.topic.topic_files import TopicFolder, open_stored, stored_config


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a topic. Spark stores the offsets; this only looks them up."""

    def __init__(self, options: ReadOptions, target: pa.Schema) -> None:
        self._options, self._target = options, target
        self._where: Filter | None = None
        self._checked = False
        self._last_offsets: dict[int, int] | None = None
        """Where the run ends, if its trigger is ``availableNow``."""
        self._opened: TopicFolder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def _topic(self) -> TopicFolder:
        self._check()
        if self._opened is None:
            self._opened = open_stored(self._options.folder)
            self._opened.recover()
        return self._opened

    def initialOffset(self) -> dict[str, Any]:
        places = {b: StreamPlace(0) for b in self._topic.buckets}
        for part in slices_to_read(self._topic, self._options):
            places[part.bucket] = StreamPlace(part.start, part.epoch)
        return stream_offsets.encode(places, self._topic_id())

    def _check(self) -> None:
        """Check the options once; raise for those that a stream does not have.

        Not at construction, where Spark would hide the reason behind an error of its own.
        """
        if self._checked:
            return
        for name, is_set in (
            ("version, timestamp and tag", self._options.version is not None),
            ("endingOffsets and endingTimestamp", self._options.ending != LATEST),
        ):
            if is_set:
                raise InvalidArgument(
                    f"a stream has no options {name}: it follows the topic; leave them out"
                )
        self._where = checked_filter(self._options)
        self._checked = True

    def getDefaultReadLimit(self) -> ReadLimit:
        self._check()
        most = self._options.max_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def _flush(self) -> None:
        """Have owners write what they have acknowledged, if the options ask for it."""
        if self._options.flush:
            topic = self._topic
            handover.flush(topic.handover_place, topic.config, self._options.owner_seconds)

    def prepareForTriggerAvailableNow(self) -> None:
        self._flush()
        self._last_offsets = self._ends()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        self._topic.recover()  # an owner may have crashed since the last call
        self._flush()
        recreated = self._is_recreated(start)
        if recreated:
            self._opened = None  # the number of buckets may have changed
        places = {
            b: self._resolve(b, place, recreated=recreated)
            for b, place in stream_offsets.decode(start).items()
            if b in self._topic.buckets
        }
        for bucket in self._topic.buckets:
            places.setdefault(bucket, StreamPlace(0, len(self._topic.table(bucket).restores)))
        ends = self._ends() if self._last_offsets is None else self._last_offsets
        lags = {b: max(0, ends.get(b, 0) - place.offset) for b, place in places.items()}
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        taken = stream_offsets.divide_limit(lags, most)
        return stream_offsets.encode(
            {b: StreamPlace(place.offset + taken[b], place.epoch) for b, place in places.items()},
            self._topic_id(),
        )

    def reportLatestOffset(self) -> dict[str, Any]:
        ends = self._ends()
        return stream_offsets.encode(
            {b: StreamPlace(end, len(self._topic.table(b).restores)) for b, end in ends.items()},
            self._topic_id(),
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        starts, slices = stream_offsets.decode(start), []
        start_recreated, end_recreated = self._is_recreated(start), self._is_recreated(end)
        for bucket, place in stream_offsets.decode(end).items():
            last = self._resolve(bucket, place, recreated=end_recreated)
            first = starts.get(bucket, StreamPlace(0, last.epoch))
            first = self._resolve(bucket, first, recreated=start_recreated)
            offset = self._skip_removed(bucket, first.offset)
            slices.append(Slice(self._topic.place, bucket, offset, last.offset, last.epoch))
        most = rows_per_partition(self._topic, self._options, slices)
        return [SlicePartition(packed) for packed in pack_slices(slices, most) if packed]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, SlicePartition)
        self._check()  # a task has a copy of the reader, on which nothing was called before
        return read_slices(
            partition.slices, self._target, self._where, metadata=self._options.metadata
        )

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint has the offsets."""

    def stop(self) -> None:
        self._opened = None

    def _ends(self) -> dict[int, int]:
        return {bucket: self._topic.view(bucket).end for bucket in self._topic.buckets}

    def _topic_id(self) -> str:
        """Return the current id of the topic, which may have been recreated under its name."""
        config = stored_config(self._options.folder)
        return "" if config is None else config.id

    def _is_recreated(self, offset: dict[str, Any]) -> bool:
        """Whether the topic was recreated since ``offset`` was taken."""
        then, now = stream_offsets.topic_of(offset), self._topic_id()
        return bool(then and now) and then != now

    def _resolve(self, bucket: int, place: StreamPlace, *, recreated: bool) -> StreamPlace:
        """Return where a place is after restores of its bucket.

        Raises if rows before it were taken back, unless ``failOnDataLoss`` is false.
        """
        table = self._topic.table(bucket)
        restores, view = table.restores, table.view
        is_beyond = place.epoch == len(restores) and place.offset > view.end
        if recreated or is_beyond or place.epoch > len(restores):
            if self._options.fail_on_loss:
                why = "the topic was recreated"
                why += "" if recreated else ", or restored from a backup"
                raise StorageError(
                    f"bucket {bucket} of {self._topic.place} ends at offset {view.end}, and the "
                    f"stream had reached {place.offset}: {why}. Start with a new checkpoint, or "
                    "set failOnDataLoss=false to read the bucket from its start"
                )
            return StreamPlace(view.start, len(restores))
        if place.epoch == len(restores):
            return place
        least = min([place.offset, *(restore.end for restore in restores[place.epoch :])])
        if least < place.offset and self._options.fail_on_loss:
            raise StorageError(
                f"bucket {bucket} of {self._topic.place} was restored to an older version that "
                f"ends at offset {least}, and the stream had reached {place.offset}. Set "
                "failOnDataLoss=false to continue from there, or start with a new checkpoint"
            )
        return StreamPlace(least, len(restores))

    def _skip_removed(self, bucket: int, offset: int) -> int:
        """Return the first offset from ``offset`` on that retention has left.

        Raises if retention removed any, unless ``failOnDataLoss`` is false.
        """
        start = self._topic.view(bucket).start
        if offset < start and self._options.fail_on_loss:
            raise OffsetOutOfRange(
                f"offsets {offset} to {start} of bucket {bucket} of {self._topic.place} were "
                "removed by retention before the stream had read them. Set failOnDataLoss=false "
                "to continue with the rows that are left"
            )
        return max(offset, start)
