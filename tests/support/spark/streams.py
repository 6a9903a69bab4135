"""Streams from a topic that stop and continue from their checkpoint: as Spark runs them, and with
the same calls but without Spark, in a hundredth of the time."""

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
    """A stream with its own checkpoint."""

    batches: list[int]
    """The number of rows of each micro-batch so far."""

    def run(self, **options: Any) -> list[dict[str, Any]]:
        """Read all rows that were not read yet; raise if the stream fails."""


class DirectFlow:
    """Makes the calls that Spark makes, in the same order."""

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
        """Yield the batches of each task and their schema; resuming commits the micro-batch."""
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
        """Plan a micro-batch as if the driver died before its end; the next run starts with it."""
        reader, limit = self.reader(options)
        if self._checkpoint is None:
            self._checkpoint = _json(reader.initialOffset())
        self._planned = _json(reader.latestOffset(self._checkpoint, limit))

    def step_back(self) -> None:
        """Forget the commit of the last micro-batch: the next run repeats it."""
        assert self._planned is None
        self._checkpoint, self._planned = self._before, self._checkpoint

    def reader(self, options: dict[str, Any]) -> Any:
        from pyspark.sql.datasource import CaseInsensitiveDict

        from persisting.spark.source import PersistingSource

        given = CaseInsensitiveDict({"path": str(self._topic), **texts(options)})
        source = PersistingSource(given)
        reader: Any = source.streamReader(source.schema())
        return reader, reader.getDefaultReadLimit()

    def parts(
        self, reader: Any, start: dict[str, Any], end: dict[str, Any]
    ) -> list[list[pa.RecordBatch]]:
        """Return the batches of each task of a micro-batch.

        Tasks get a new reader, on which no other method was called.
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
    """A streaming query that writes its rows to a folder of JSON files."""

    def __init__(self, spark: SparkSession, folder: Path, topic: str = "t") -> None:
        self._spark, self._topic = spark, folder / topic
        self._out, self._checkpoint = folder / f"{topic}.out", folder / f"{topic}.checkpoint"
        self._seen: set[str] = set()
        self.batches: list[int] = []

    def start(self, **options: Any) -> StreamingQuery:
        """Start a query that runs until it is stopped."""
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
        """Return the rows that were written since the last call."""
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
