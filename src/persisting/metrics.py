"""All Prometheus metrics. ``prometheus_client`` is imported when the first one is needed.

They carry the labels ``topic`` and ``bucket``; a bucket's series are removed when its last backend
closes.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

_LABELS = ("topic", "bucket")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SYNC_SECONDS = (0.0001, 0.00025, 0.0005, *_SECONDS)


class BucketMetrics:
    """What a bucket reports. This base class discards it."""

    def accepted(self, records: int, buffered: int) -> None:
        """Records were acknowledged."""

    def flushed(self, seconds: float, buffered: int) -> None:
        """A flush reached the table."""

    def flush_failed(self) -> None:
        """A flush raised."""

    def log_written(self, size: int, unsynced: int) -> None:
        """The log was written: the bytes that the bucket has unflushed in it, and the frames that
        power loss would take."""

    def log_synced(self, seconds: float, unsynced: int) -> None:
        """The log was synced."""

    def log_failed(self) -> None:
        """The log could not be written or synced."""

    def recovered(self, records: int) -> None:
        """Opening replayed records from a log."""

    def table_is(self, fragments: int, start: int) -> None:
        """The table changed: its number of fragments and its first offset."""

    def compacted(self, seconds: float, records: int) -> None:
        """A compaction rewrote records."""

    def dropped(self, records: int) -> None:
        """Retention dropped records."""

    def indexed(self, behind: int) -> None:
        """The indexes changed: how many records an index does not cover yet."""

    def searching(self) -> AbstractContextManager[Any]:
        """Return a context that measures a search."""
        return nullcontext()

    def verified(self, damaged: int) -> None:
        """A verification ended: how many damaged files it found."""

    def maintenance_failed(self) -> None:
        """Maintenance raised."""

    def remove(self) -> None:
        """The bucket was closed."""


NO_METRICS = BucketMetrics()


@cache
def _families() -> SimpleNamespace:
    from prometheus_client import Counter, Gauge, Histogram

    return SimpleNamespace(
        records=Counter("persisting_records_total", "Total records written", _LABELS),
        buffer=Gauge("persisting_buffer_size", "Current buffer size", _LABELS),
        flush=Histogram(
            "persisting_flush_duration_seconds", "Flush latency", _LABELS, buckets=_SECONDS
        ),
        wal_size=Gauge(
            "persisting_wal_size_bytes",
            "Bytes of the log that hold records which the table lacks",
            _LABELS,
        ),
        wal_unsynced=Gauge(
            "persisting_wal_unsynced_frames",
            "Log frames written but not yet synced: what power loss would take",
            _LABELS,
        ),
        wal_sync=Histogram(
            "persisting_wal_sync_duration_seconds",
            "Time to sync the log",
            _LABELS,
            buckets=_SYNC_SECONDS,
        ),
        recoveries=Counter(
            "persisting_recoveries_total", "Openings that replayed records from the log", _LABELS
        ),
        recovered=Counter(
            "persisting_recovered_records_total",
            "Records replayed from the log at opening",
            _LABELS,
        ),
        compaction=Histogram(
            "persisting_compaction_duration_seconds",
            "Time of a compaction, during which a flush waits",
            _LABELS,
            buckets=_SECONDS,
        ),
        compacted=Counter(
            "persisting_compacted_records_total", "Records that compactions rewrote", _LABELS
        ),
        fragments=Gauge("persisting_fragments", "Fragments of the table", _LABELS),
        dropped=Counter(
            "persisting_dropped_records_total", "Records that retention dropped", _LABELS
        ),
        start=Gauge("persisting_start_offset", "First offset in the table", _LABELS),
        behind=Gauge(
            "persisting_unindexed_records", "Records that an index does not cover yet", _LABELS
        ),
        search=Histogram(
            "persisting_search_duration_seconds", "Time of a search", _LABELS, buckets=_SECONDS
        ),
        damaged=Gauge(
            "persisting_damaged_files", "Damaged files that the last verification found", _LABELS
        ),
        upkeep_errors=Counter(
            "persisting_upkeep_errors_total", "Maintenance runs that failed", _LABELS
        ),
        flush_errors=Counter("persisting_flush_errors_total", "Flushes that failed", _LABELS),
        wal_errors=Counter(
            "persisting_wal_errors_total", "Writes or syncs of the log that failed", _LABELS
        ),
    )


_open: Tally[tuple[str, str]] = Tally()
_open_guard = threading.Lock()


class PrometheusMetrics(BucketMetrics):
    """The series of a bucket in the default registry of ``prometheus_client``."""

    def __init__(self, topic: str, bucket: int) -> None:
        self._labels = (topic, str(bucket))
        with _open_guard:
            _open[self._labels] += 1
            families = _families()
            self._of = SimpleNamespace(
                **{name: family.labels(*self._labels) for name, family in vars(families).items()}
            )

    def accepted(self, records: int, buffered: int) -> None:
        self._of.records.inc(records)
        self._of.buffer.set(buffered)

    def flushed(self, seconds: float, buffered: int) -> None:
        self._of.flush.observe(seconds)
        self._of.buffer.set(buffered)

    def flush_failed(self) -> None:
        self._of.flush_errors.inc()

    def log_written(self, size: int, unsynced: int) -> None:
        self._of.wal_size.set(size)
        self._of.wal_unsynced.set(unsynced)

    def log_synced(self, seconds: float, unsynced: int) -> None:
        self._of.wal_sync.observe(seconds)
        self._of.wal_unsynced.set(unsynced)

    def log_failed(self) -> None:
        self._of.wal_errors.inc()

    def recovered(self, records: int) -> None:
        self._of.recoveries.inc()
        self._of.recovered.inc(records)

    def table_is(self, fragments: int, start: int) -> None:
        self._of.fragments.set(fragments)
        self._of.start.set(start)

    def compacted(self, seconds: float, records: int) -> None:
        self._of.compaction.observe(seconds)
        self._of.compacted.inc(records)

    def dropped(self, records: int) -> None:
        self._of.dropped.inc(records)

    def indexed(self, behind: int) -> None:
        self._of.behind.set(behind)

    def searching(self) -> AbstractContextManager[Any]:
        timer: AbstractContextManager[Any] = self._of.search.time()
        return timer

    def verified(self, damaged: int) -> None:
        self._of.damaged.set(damaged)

    def maintenance_failed(self) -> None:
        self._of.upkeep_errors.inc()

    def remove(self) -> None:
        with _open_guard:
            _open[self._labels] -= 1
            if _open[self._labels] > 0:
                return
            del _open[self._labels]
            for family in vars(_families()).values():
                family.remove(*self._labels)


@cache
def _group_lag() -> Any:
    from prometheus_client import Gauge

    return Gauge(
        "persisting_group_lag_records",
        "Records that a consumer group has not committed yet",
        ("topic", "group", "bucket"),
    )


class GroupMetrics:
    """The lag of the buckets of one group. The reader that reported last owns a bucket's series."""

    _reporters: ClassVar[dict[tuple[str, ...], GroupMetrics]] = {}

    def __init__(self, topic: str, group: str) -> None:
        self._topic, self._group = topic, group
        self._buckets: set[int] = set()

    def lag(self, bucket: int, records: int) -> None:
        """A commit left this many records of a bucket."""
        self._buckets.add(bucket)
        labels = self._topic, self._group, str(bucket)
        self._reporters[labels] = self
        _group_lag().labels(*labels).set(records)

    def keep(self, buckets: Iterable[int]) -> None:
        """Remove the series of all other buckets, unless another reader reports them now."""
        for bucket in self._buckets - set(buckets):
            self._buckets.discard(bucket)
            labels = self._topic, self._group, str(bucket)
            if self._reporters.get(labels) is self:
                del self._reporters[labels]
                _group_lag().remove(*labels)

    def remove(self) -> None:
        self.keep(())


def topic_of(folder: Path) -> str:
    """The topic of a bucket folder: of ``<topic>/bucket_<i>`` the topic, else the folder's name."""
    return folder.parent.name if folder.name.startswith("bucket_") else folder.name


def serve(port: int = 9464, host: str = "127.0.0.1") -> Any:
    """Serve ``/metrics`` from a daemon thread; ``.shutdown()`` of the returned server ends it.

    Port 0 picks a free port, ``.server_port`` of the server. By default only this machine can
    connect; ``host`` changes that.
    """
    from prometheus_client import start_http_server

    server, _ = start_http_server(port, addr=host)
    return server
