"""Streams from a topic that stop and go on from their checkpoint: as Spark runs them, and the same
calls without Spark, which take a hundredth of the time."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from support.spark.topics import texts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


class Flow(Protocol):
    """A stream with a checkpoint of its own."""

    batches: list[int]
    """The rows of each micro-batch so far."""

    def run(self, **options: Any) -> list[dict[str, Any]]:
        """Everything that is there and was not read yet; what fails raises."""


class DirectFlow:
    """What Spark calls, in the order in which Spark calls it."""

    def __init__(self, folder: Path, topic: str = "t") -> None:
        self._topic = folder / topic
        self._checkpoint: dict[str, Any] | None = None
        self._planned: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
        self.batches: list[int] = []

    def run(self, **options: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for parts, _ in self.micro_batches(**options):
            rows = [row for part in parts for batch in part for row in batch.to_pylist()]
            self.batches.append(len(rows))
            found += rows
        return found

    def micro_batches(
        self, **options: Any
    ) -> Iterator[tuple[list[list[pa.RecordBatch]], pa.Schema]]:
        """The batches of each task and their schema; done when the next one is asked for."""
        reader, limit = self.reader(options)
        reader.prepareForTriggerAvailableNow()
        if self._checkpoint is None:
            self._checkpoint = _json(reader.initialOffset())
        while True:
            if self._planned is None:
                end = _json(reader.latestOffset(self._checkpoint, limit))
                if end == self._checkpoint:
                    return
                self._planned = end
            yield self.parts(reader, self._checkpoint, self._planned), reader._target
            reader.commit(self._planned)
            self._before, self._checkpoint = self._checkpoint, self._planned
            self._planned = None

    def plan(self, **options: Any) -> None:
        """Plan a micro-batch and die before it is done; the next run begins with it."""
        reader, limit = self.reader(options)
        if self._checkpoint is None:
            self._checkpoint = _json(reader.initialOffset())
        self._planned = _json(reader.latestOffset(self._checkpoint, limit))

    def step_back(self) -> None:
        """The last micro-batch was done, and nobody knows: the next run repeats it."""
        assert self._planned is None
        self._checkpoint, self._planned = self._before, self._checkpoint

    def reader(self, options: dict[str, Any]) -> Any:
        from pyspark.sql.datasource import CaseInsensitiveDict

        from persisting.spark.data_source import PersistingSource

        given = CaseInsensitiveDict({"path": str(self._topic), **texts(options)})
        source = PersistingSource(given)
        reader: Any = source.streamReader(source.schema())
        return reader, reader.getDefaultReadLimit()

    def parts(
        self, reader: Any, start: dict[str, Any], end: dict[str, Any]
    ) -> list[list[pa.RecordBatch]]:
        """The batches of each task of a micro-batch.

        The reader that tasks get is made for them, and was never asked for offsets.
        """
        fresh = type(reader)(reader._options, reader._target)
        copy = pickle.loads(pickle.dumps(fresh))  # noqa: S301
        return [
            list(copy.read(pickle.loads(pickle.dumps(part))))  # noqa: S301
            for part in reader.partitions(start, end)
        ]

    def rows(self, reader: Any, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
        parts = self.parts(reader, start, end)
        return [row for part in parts for batch in part for row in batch.to_pylist()]


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))


class SparkFlow:
    """A streaming query that writes what it reads to a folder of JSON files."""

    def __init__(self, spark: SparkSession, folder: Path, topic: str = "t") -> None:
        self._spark, self._topic = spark, folder / topic
        self._out, self._checkpoint = folder / f"{topic}.out", folder / f"{topic}.checkpoint"
        self._seen: set[str] = set()
        self.batches: list[int] = []

    def start(self, **options: Any) -> StreamingQuery:
        """A query that goes on until it is stopped."""
        return self._writer(options).start(str(self._out))

    def run(self, **options: Any) -> list[dict[str, Any]]:
        query = self._writer(options).trigger(availableNow=True).start(str(self._out))
        try:
            query.awaitTermination()
        finally:
            query.stop()
        progress = [one["numInputRows"] for one in query.recentProgress]
        self.batches += [rows for rows in progress if rows]
        return self.taken()

    def taken(self) -> list[dict[str, Any]]:
        """What came since the last look."""
        found = []
        for file in sorted(self._out.glob("part-*.json")):
            if file.name not in self._seen:
                self._seen.add(file.name)
                found += [json.loads(line) for line in file.read_text().splitlines()]
        return found

    def _writer(self, options: dict[str, Any]) -> Any:
        source = self._spark.readStream.format("persisting").options(**texts(options))
        sink = source.load(str(self._topic)).writeStream.format("json")
        return sink.option("checkpointLocation", str(self._checkpoint))
