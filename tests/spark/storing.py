"""Writes to a topic: by Spark, and by the same calls without Spark, which are quicker by far."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from filled import texts
from gates import Gate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

Meanwhile = Callable[[], Any]


class Store(Protocol):
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
        """Write in one go; ``meanwhile`` happens when that is planned and no task has written."""


class DirectStore:
    """What Spark calls, in the order and with the copies that Spark makes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

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
        source, schema = sink_source(self._folder / topic, options), struct(rows.schema)
        writer = copied(source.writer(schema, mode == "overwrite"))
        if meanwhile is not None:
            meanwhile()
        messages = [copied(copied(writer).write(iter(p))) for p in partitions(rows, schema, parts)]
        for number, message in enumerate(messages):
            message.part = number
        try:
            copied(writer).commit(messages)
        except BaseException:
            copied(writer).abort(messages)
            raise


class SparkStore:
    """Spark itself."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark, self._folder, self._gates = spark, folder, 0

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
        df = self._spark.createDataFrame(rows).coalesce(1)
        if parts > 1:
            df = df.repartitionByRange(parts, rows.schema.names[0])
        gate = None
        if meanwhile is not None:
            self._gates += 1
            gate = Gate(self._folder / f"gate{self._gates}")
            df = gate.hold(df)

        def write() -> None:
            made = df.write.format("persisting").mode(mode).options(**texts(options))
            made.save(str(self._folder / topic))

        if gate is None or meanwhile is None:
            write()
            return
        with gate.holding(self._spark, write):
            meanwhile()


class DirectSink:
    """A streaming sink, batch by batch, as Spark calls it."""

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
        messages = [copied(copied(writer).write(iter(part))) for part in parts]
        for number_of_part, message in enumerate(messages):
            message.part = number_of_part
        try:
            source.streamWriter(taken, False).commit(messages, number)
        except BaseException:
            source.streamWriter(taken, False).abort(messages, number)
            raise


def sink_source(topic: Path, options: dict[str, Any]) -> Any:
    from pyspark.sql.datasource import CaseInsensitiveDict

    from persisting.spark.source import PersistingSource

    return PersistingSource(CaseInsensitiveDict({"path": str(topic), **texts(options)}))


def struct(schema: pa.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


def partitions(
    rows: pa.Table, schema: StructType, parts: int
) -> Iterator[list[pa.RecordBatch]]:
    """The rows in order, in so many parts, through the streams of bytes that Spark sends."""
    from pyspark.sql.pandas.types import to_arrow_schema

    spark_rows = rows.cast(to_arrow_schema(schema, timezone="UTC"))
    size = -(-max(1, rows.num_rows) // parts)
    for start in range(0, max(1, rows.num_rows), size):
        part = spark_rows.slice(start, size)
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, part.schema) as out:
            out.write_table(part, max_chunksize=1000)
        yield list(pa.ipc.open_stream(stream.getvalue()))


def copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301
