"""Writes to a topic: by Spark, and with the same calls but without Spark, which is much faster."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from support.spark.gates import Gate
from support.spark.streams import DirectFlow
from support.spark.topics import texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Meanwhile = Callable[[], Any]


@dataclass(frozen=True)
class Save:
    """The arguments of :meth:`Store.save`."""

    rows: pa.Table
    topic: str
    mode: str
    parts: int
    meanwhile: Meanwhile | None
    options: dict[str, Any]


class Store(ABC):
    """Writes Arrow tables to topics of a folder."""

    def save(
        self,
        rows: pa.Table,
        topic: str = "t",
        *,
        mode: str = "append",
        parts: int = 1,
        meanwhile: Meanwhile | None = None,
        **options: Any,
    ) -> None:
        """Write ``rows``; call ``meanwhile`` after planning and before any task writes."""
        self._save(Save(rows, topic, mode, parts, meanwhile, options))

    @abstractmethod
    def _save(self, given: Save) -> None: ...


class DirectStore(Store):
    """Makes the calls that Spark makes, in the same order and with the same copies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _save(self, given: Save) -> None:
        schema = struct(given.rows.schema)
        source = sink_source(self._folder / given.topic, given.options)
        writer = copied(source.writer(schema, given.mode == "overwrite"))
        if given.meanwhile is not None:
            given.meanwhile()
        messages = written(writer, partitions(given.rows, schema, given.parts))
        try:
            copied(writer).commit(messages)
        except BaseException:
            copied(writer).abort(messages)
            raise


class SparkStore(Store):
    """Writes with Spark itself."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark, self._folder, self._gates = spark, folder, 0

    def _save(self, given: Save) -> None:
        rows, meanwhile = given.rows, given.meanwhile
        # Without a schema Spark takes times without a zone for timestamps.
        df = self._spark.createDataFrame(rows, struct(rows.schema)).coalesce(1)
        if given.parts > 1:
            df = df.repartitionByRange(given.parts, rows.schema.names[0])
        gate = None
        if meanwhile is not None:
            self._gates += 1
            gate = Gate(self._folder / f"gate{self._gates}")
            df = gate.hold(df)

        def write() -> None:
            made = df.write.format("persisting").mode(given.mode).options(**texts(given.options))
            made.save(str(self._folder / given.topic))

        if gate is None or meanwhile is None:
            write()
            return
        with gate.holding(self._spark, write):
            meanwhile()


class DirectSink:
    """A streaming sink, called batch by batch as Spark calls it."""

    def __init__(self, folder: Path, query: str) -> None:
        self._folder, self._query = folder, query

    def store(
        self,
        parts: list[list[pa.RecordBatch]],
        schema: pa.Schema,
        number: int,
        meanwhile: Meanwhile | None = None,
        **options: Any,
    ) -> None:
        source = sink_source(self._folder, {"writeId": self._query, **options})
        taken = struct(schema)
        writer = copied(source.streamWriter(taken, False))
        if meanwhile is not None:
            meanwhile()
        messages = written(writer, parts)
        try:
            copied(source).streamWriter(taken, False).commit(messages, number)
        except BaseException:
            copied(source).streamWriter(taken, False).abort(messages, number)
            raise


class DirectPipe:
    """A stream from the topic ``in`` to the topic ``out``, with the calls that Spark makes."""

    def __init__(self, folder: Path, name: str = "pipe") -> None:
        self.folder, self._name = folder, name
        self._flow = DirectFlow(folder, "in")
        self._number = 0

    def run(
        self,
        source: dict[str, Any] | None = None,
        meanwhile: Meanwhile | None = None,
        **sink: Any,
    ) -> None:
        for parts, schema in self._flow.micro_batches(**source or {}):
            target = DirectSink(self.folder / "out", self._name)
            target.store(parts, schema, self._number, meanwhile, **sink)
            self._number += 1

    def forget_last_commit(self) -> None:
        self._flow.step_back()
        self._number -= 1


class SparkPipe:
    """A streaming query of Spark from the topic ``in`` to the topic ``out``."""

    def __init__(self, spark: SparkSession, folder: Path, name: str = "pipe") -> None:
        self.spark, self.folder = spark, folder
        self._checkpoint = folder / f"{name}.checkpoint"
        self._gates = 0

    def run(
        self,
        source: dict[str, Any] | None = None,
        meanwhile: Meanwhile | None = None,
        change: Callable[[DataFrame], DataFrame] | None = None,
        **sink: Any,
    ) -> None:
        """Copy the rows that were not copied yet; raise if the query fails."""
        given = self.spark.readStream.format("persisting").options(**texts(source or {}))
        df = given.load(str(self.folder / "in"))
        df = df if change is None else change(df)
        if meanwhile is None:
            self._run(df, sink)
            return
        self._gates += 1
        gate = Gate(self.folder / f"{self._checkpoint.name}.gate{self._gates}")
        with gate.holding(self.spark, lambda: self._run(gate.hold(df), sink)):
            meanwhile()

    def _run(self, df: DataFrame, sink: dict[str, Any]) -> None:
        query = (
            df.writeStream.format("persisting")
            .option("checkpointLocation", str(self._checkpoint))
            .options(**texts(sink))
            .trigger(availableNow=True)
            .start(str(self.folder / "out"))
        )
        try:
            query.awaitTermination()
        finally:
            query.stop()

    def forget_last_commit(self) -> None:
        """Undo Spark's note that the last batch is done, as if the driver had died before it."""
        done = [f for f in (self._checkpoint / "commits").iterdir() if f.name.isdigit()]
        last = max(done, key=lambda file: int(file.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def sink_source(topic: Path, options: dict[str, Any]) -> Any:
    from pyspark.sql.datasource import CaseInsensitiveDict

    from persisting.spark.source import PersistingSource

    return PersistingSource(CaseInsensitiveDict({"path": str(topic), **texts(options)}))


def struct(schema: pa.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


def partitions(rows: pa.Table, schema: StructType, parts: int) -> Iterator[list[pa.RecordBatch]]:
    """Yield the rows in order, in this many parts, serialized and parsed as Spark does."""
    from pyspark.sql.pandas.types import to_arrow_schema

    spark_rows = rows.cast(to_arrow_schema(schema, timezone="UTC"))
    size = -(-max(1, rows.num_rows) // parts)
    for start in range(0, max(1, rows.num_rows), size):
        part = spark_rows.slice(start, size)
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, part.schema) as out:
            out.write_table(part, max_chunksize=1000)
        yield list(pa.ipc.open_stream(stream.getvalue()))


def written(writer: Any, parts: Iterable[list[pa.RecordBatch]]) -> list[Any]:
    """Write each part as a task does; return the messages of the tasks."""
    messages = [copied(copied(writer).write(iter(part))) for part in parts]
    for number, message in enumerate(messages):
        message.part = number
    return messages


def copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301
