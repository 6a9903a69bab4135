"""Progress of a streaming query: batches, rows per second, lag by bucket, and a summary."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from persisting.spark import stream_offsets
from persisting.spark.query_errors import readable_errors

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_POLL_SECONDS: Any = 0.5


@dataclass(frozen=True)
class Batch:
    """A micro-batch, as Spark reports it."""

    number: int
    rows: int
    written: int | None
    """None if the sink does not report it."""
    seconds: float
    lag: dict[str, int]
    """By bucket, the rows of the topic that were not read yet. With several sources, the number of
    the source comes before the bucket: ``1/0``."""

    @classmethod
    def of(cls, progress: Mapping[str, Any]) -> Batch:
        written = progress.get("sink", {}).get("numOutputRows", -1)
        return cls(
            number=progress["batchId"],
            # The sum over the sources: Spark Connect does not report the total.
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
    """What a streaming query did."""

    rows: int = 0
    """Rows that were read."""
    written: int = 0
    """Rows that the sink received."""
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


@readable_errors
def watch(
    query: StreamingQuery, *, quiet: bool | None = None, out: IO[str] | None = None
) -> Summary:
    """Wait until a streaming query ends, show its progress, and return what it did.

    A line on ``out`` (stderr) shows the current batch, rows per second and the lag by bucket,
    followed by a summary at the end. Nothing is shown if ``quiet``, which is the default unless
    ``out`` is a terminal. If the query fails, our error that made it fail is raised, otherwise a
    ``StorageError`` with the line that says why; its ``__cause__`` has Spark's exception. An
    interrupt stops the query.
    """
    out = sys.stderr if out is None else out
    line = _Line(None if (not out.isatty() if quiet is None else quiet) else out)
    began, tracker, summary = time.monotonic(), _BatchTracker(), Summary()
    try:
        ended = False
        while not ended:
            ended = _wait(query)
            for batch in tracker.new_batches(query):
                summary.add(batch)
                line.show(batch)
            summary.lag = tracker.lag
    except KeyboardInterrupt:
        query.stop()
        raise
    finally:
        summary.seconds = time.monotonic() - began
        line.end(summary)
    return summary


def lag_of(sources: list[Mapping[str, Any]]) -> dict[str, int]:
    """Return by bucket how far each source is behind its topic; skip sources of other formats."""
    lags = []
    for source in sources:
        end, latest = (_offsets(source.get(name)) for name in ("endOffset", "latestOffset"))
        if end is not None and latest is not None:
            lags.append({str(b): max(0, latest[b] - end.get(b, 0)) for b in latest})
    if len(lags) == 1:
        return lags[0]
    return {f"{number}/{b}": rows for number, lag in enumerate(lags) for b, rows in lag.items()}


def _offsets(reported: Any) -> dict[int, int] | None:
    """Return the offsets by bucket; None if they are not our offsets."""
    try:
        offset = json.loads(reported) if isinstance(reported, str) else reported
        return {bucket: place.offset for bucket, place in stream_offsets.decode(offset).items()}
    except (ValueError, TypeError, AttributeError):
        return None


def lag_text(lag: Mapping[str, int]) -> str:
    """Return the total lag and that of each bucket that has one, in words."""
    behind = {bucket: rows for bucket, rows in lag.items() if rows}
    if not behind:
        return "no lag"
    parts = ", ".join(f"{bucket}: {rows:,}" for bucket, rows in behind.items())
    return f"lag {sum(behind.values()):,} ({parts})"


def _wait(query: StreamingQuery) -> bool:
    """Wait for a short time; return whether the query has ended."""
    return bool(query.awaitTermination(_POLL_SECONDS))


class _BatchTracker:
    """Keeps track of the batches of a query that were already reported."""

    def __init__(self) -> None:
        self._last = -1
        self.lag: dict[str, int] = {}

    def new_batches(self, query: StreamingQuery) -> list[Batch]:
        """Return the batches that ended since the last call; triggers without rows do not count."""
        batches = []
        for progress in query.recentProgress:
            report = json.loads(progress.json)
            batch = Batch.of(report)
            self.lag = batch.lag or self.lag
            if "addBatch" in report["durationMs"] and batch.number > self._last:
                self._last = batch.number
                batches.append(batch)
        return batches


class _Line:
    """A line of a terminal that is overwritten."""

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
