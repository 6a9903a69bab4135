"""Streams over all rows, compared with Spark's stream of Parquet files."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from corebench.report import rate
from tablebench.sizes import OURS, in_turns

from sparkbench.rows import PARQUET, Bench

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import DataStreamWriter

Measure = Callable[[int], float]


def streaming(bench: Bench) -> None:
    with bench.run.scratch() as folder:
        _compare(
            bench,
            "into nothing",
            lambda _: _run(bench, _into_nothing(_topic(bench)), folder),
            lambda _: _run(bench, _into_nothing(_files(bench)), folder),
        )
        _compare(
            bench,
            "into ours, or Parquet",
            lambda _: _run(bench, _into_topic(bench, _topic(bench), folder), folder),
            lambda _: _run(bench, _into_parquet(_files(bench), folder), folder),
        )
        _compare(
            bench,
            "Parquet into ours, or Parquet",
            lambda _: _run(bench, _into_topic(bench, _files(bench), folder), folder),
            lambda _: _run(bench, _into_parquet(_files(bench), folder), folder),
        )


def _compare(bench: Bench, name: str, ours: Measure, theirs: Measure) -> None:
    """Add lines with rows per second, for the whole query and for its micro-batches alone.

    A Python source starts a new process per query, which does not matter to a long stream.
    """
    found = asyncio.run(in_turns({OURS: ours, PARQUET: theirs}, range(bench.run.repeat)))
    for what, seconds in (
        ("with its start", {who: min(timed.seconds) for who, timed in found.items()}),
        ("micro-batches", {who: min(timed.found) for who, timed in found.items()}),
    ):
        rates = {who: rate(bench.run.records, took) for who, took in seconds.items()}
        line = f"{name}, {what}"
        bench.run.add("stream", line, rates[OURS], "rows/s", PARQUET, rates[PARQUET])


def _topic(bench: Bench) -> DataFrame:
    return bench.spark.readStream.format("persisting").load(bench.topic)


def _files(bench: Bench) -> DataFrame:
    return bench.spark.readStream.schema(bench.parquet_rows().schema).parquet(bench.parquet)


def _into_nothing(rows: DataFrame) -> DataStreamWriter:
    return rows.writeStream.format("noop")


def _into_topic(bench: Bench, rows: DataFrame, folder: Path) -> DataStreamWriter:
    sink = rows.writeStream.format("persisting").option("numBuckets", bench.buckets)
    return sink.option("path", _new(folder))


def _into_parquet(rows: DataFrame, folder: Path) -> DataStreamWriter:
    return rows.writeStream.format("parquet").option("path", _new(folder))


def _run(bench: Bench, sink: DataStreamWriter, folder: Path) -> float:
    """Run a stream; return the seconds of all its micro-batches."""
    query = sink.option("checkpointLocation", _new(folder)).trigger(availableNow=True).start()
    query.awaitTermination()
    done = query.recentProgress
    rows = sum(one["numInputRows"] for one in done)
    if rows != bench.run.records:
        raise SystemExit(f"the stream had {rows} rows")
    return sum(one["durationMs"]["triggerExecution"] for one in done) / 1000


def _new(folder: Path) -> str:
    return f"{tempfile.mkdtemp(dir=folder)}/new"
