"""A streaming query that a person can watch: rows per second, batch, lag by bucket, a summary."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from persisting import errors
from persisting.errors import StorageError
from persisting.spark import stream_offsets

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_PAUSE: Any = 0.5
"""Seconds between looks at the query."""

_OURS = re.compile(r"persisting\.errors\.(\w+): (.+)")


@dataclass(frozen=True)
class Batch:
    """A micro-batch, as Spark reports it."""

    number: int
    rows: int
    written: int | None
    """None where the sink does not say."""
    seconds: float
    lag: dict[str, int]
    """By bucket, the rows of the topic that were not read yet; with several topics, each bucket
    has its topic's place among them before it, ``1/0``."""

    @classmethod
    def of(cls, progress: Mapping[str, Any]) -> Batch:
        written = progress.get("sink", {}).get("numOutputRows", -1)
        return cls(
            number=progress["batchId"],
            # The sum of the sources: under Spark Connect the whole has no such number.
            rows=sum(source["numInputRows"] for source in progress.get("sources", [])),
            written=written if written >= 0 else None,
            seconds=progress["durationMs"].get("triggerExecution", 0) / 1000,
            lag=lag_of(progress.get("sources", [])),
        )

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return f"batch {self.number}: {self.rows:,} rows, {self.rows_per_second:,.0f} rows/s, " + (
            lag_text(self.lag)
        )


@dataclass
class Summary:
    """What a query did."""

    rows: int = 0
    """Rows that were read."""
    written: int = 0
    """Rows that the sink was given."""
    batches: int = 0
    seconds: float = 0.0
    lag: dict[str, int] = field(default_factory=dict)
    """By bucket, the rows of the topic that were not read yet."""

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    def add(self, batch: Batch) -> None:
        self.rows += batch.rows
        self.written += batch.written or 0
        self.batches += 1

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows read, {self.written:,} written in {self.batches} batches and "
            f"{self.seconds:.1f} s, {self.rows_per_second:,.0f} rows/s, {lag_text(self.lag)}"
        )


def watch(
    query: StreamingQuery, *, quiet: bool | None = None, out: IO[str] | None = None
) -> Summary:
    """Wait until a streaming query ends, telling its progress, and return what it did.

    A line on ``out`` (stderr) shows the current batch, rows per second and the lag by bucket; at
    the end there is a summary. With ``quiet`` nothing is told; by default so unless ``out`` is a
    terminal. What the query fails with is raised, ours as themselves; an interrupt stops it.
    """
    out = sys.stderr if out is None else out
    line = _Line(None if (not out.isatty() if quiet is None else quiet) else out)
    began, seen, summary = time.monotonic(), _Seen(), Summary()
    try:
        ended = False
        while not ended:
            ended = _wait(query)
            for batch in seen.new(query):
                summary.add(batch)
                line.show(batch)
            summary.lag = seen.lag
    except KeyboardInterrupt:
        query.stop()
        raise
    finally:
        summary.seconds = time.monotonic() - began
        line.end(summary)
    return summary


def lag_of(sources: list[Mapping[str, Any]]) -> dict[str, int]:
    """By bucket, how far each source is behind its topic; sources of other formats are left out."""
    found = []
    for source in sources:
        end, latest = (_places(source.get(name)) for name in ("endOffset", "latestOffset"))
        if end is not None and latest is not None:
            found.append({str(b): max(0, latest[b] - end.get(b, 0)) for b in latest})
    if len(found) == 1:
        return found[0]
    return {f"{place}/{b}": rows for place, lag in enumerate(found) for b, rows in lag.items()}


def _places(said: Any) -> dict[int, int] | None:
    try:
        known = json.loads(said) if isinstance(said, str) else said
        return {bucket: place.offset for bucket, place in stream_offsets.decode(known).items()}
    except (ValueError, TypeError, AttributeError):
        return None


def lag_text(lag: Mapping[str, int]) -> str:
    """The lag in all, and of each bucket where there is one."""
    behind = {bucket: rows for bucket, rows in lag.items() if rows}
    if not behind:
        return "no lag"
    parts = ", ".join(f"{bucket}: {rows:,}" for bucket, rows in behind.items())
    return f"lag {sum(behind.values()):,} ({parts})"


def _wait(query: StreamingQuery) -> bool:
    """Wait a moment; whether the query has ended."""
    from pyspark.errors import StreamingQueryException

    try:
        return bool(query.awaitTermination(_PAUSE))
    except StreamingQueryException as exc:
        raise _ours(exc) from exc


def _ours(exc: Exception) -> Exception:
    """The error of ours that made a query fail, if it is one."""
    found = _OURS.findall(str(exc))
    if not found:
        return exc
    name, text = found[-1]
    cls = getattr(errors, name, StorageError)
    return cls(text) if issubclass(cls, StorageError) else StorageError(text)


class _Seen:
    """The batches of a query that were told already."""

    def __init__(self) -> None:
        self._last = -1
        self.lag: dict[str, int] = {}

    def new(self, query: StreamingQuery) -> list[Batch]:
        """Those that have ended since; a trigger that found nothing is none."""
        found = []
        for progress in query.recentProgress:
            said = json.loads(progress.json)
            batch = Batch.of(said)
            self.lag = batch.lag or self.lag
            if "addBatch" in said["durationMs"] and batch.number > self._last:
                self._last = batch.number
                found.append(batch)
        return found


class _Line:
    """One line of a terminal, written again and again."""

    def __init__(self, out: IO[str] | None) -> None:
        self._out = out

    def show(self, batch: Batch) -> None:
        if self._out is not None:
            self._out.write(f"\r\x1b[K{batch}")
            self._out.flush()

    def end(self, summary: Summary) -> None:
        if self._out is not None:
            self._out.write(f"\r\x1b[K{summary}\n")
            self._out.flush()
