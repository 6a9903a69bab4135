"""The Prometheus metrics of work groups: what their keepers noted last.

``prometheus_client`` is imported when the first of them is needed.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from persisting.errors import StorageError
from persisting.topic.work_status import WorkStatus

log = logging.getLogger("persisting")

_LABELS = ["topic", "group"]


def families() -> dict[str, Any]:
    """Return empty families of all metrics of work groups."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def gauge(name: str, text: str) -> Any:
        return GaugeMetricFamily(f"persisting_work_{name}", text, labels=_LABELS)

    def counter(name: str, text: str) -> Any:
        return CounterMetricFamily(f"persisting_work_{name}", text, labels=_LABELS)

    return {
        "members": gauge("members", "Readers that asked for records within a minute"),
        "in_flight": gauge("in_flight_records", "Records that are leased to members"),
        "retrying": gauge("retrying_records", "Delivered records that wait for another delivery"),
        "unacknowledged": gauge("unacknowledged_records", "Records that are not acknowledged"),
        "oldest": gauge(
            "oldest_unacknowledged_seconds",
            "Time that the oldest record that is not acknowledged could have been delivered",
        ),
        "pending_letters": gauge("pending_dead_letters", "Dead letters that are not written yet"),
        "breaker": gauge("breaker_open", "Whether the group is slowed down: deliveries fail"),
        "delivered": counter("deliveries", "Deliveries to members"),
        "redelivered": counter("redeliveries", "Deliveries that were not a record's first"),
        "expired": counter("expired_leases", "Leases that ended without an outcome"),
        "acknowledged": counter("acknowledged_records", "Records that were acknowledged"),
        "dead": counter("dead_records", "Records that went to the dead letters"),
        "redriven": counter("redriven_records", "Dead letters that were re-driven"),
        "removed": counter("removed_records", "Unacknowledged records that retention removed"),
    }


def add(into: dict[str, Any], topic: str, group: str, work: WorkStatus) -> None:
    """Add the numbers of a group to families."""
    values = {
        "members": work.members if work.kept else 0,
        "in_flight": work.in_flight,
        "retrying": work.retrying,
        "unacknowledged": work.unacknowledged,
        "oldest": work.oldest_seconds or 0.0,
        "pending_letters": work.dying,
        "breaker": work.breaker_open,
        "delivered": work.delivered,
        "redelivered": work.redelivered,
        "expired": work.expired,
        "acknowledged": work.acknowledged,
        "dead": work.dead,
        "redriven": work.redriven,
        "removed": work.removed,
    }
    for name, value in values.items():
        into[name].add_metric([topic, group], value)


class WorkMetrics:
    """The series of a group in the default registry while a reader with metrics is open."""

    def __init__(self, topic: str, group: str, place: str, read: Callable[[], WorkStatus]) -> None:
        """``place`` is that of the topic; ``read`` returns the numbers that were noted last."""
        self._key = topic, place, group
        collector = _collector()
        with collector.guard:
            collector.open[self._key] += 1
            collector.reads[self._key] = read

    def remove(self) -> None:
        """Remove the series, unless another reader of the group reports them."""
        collector = _collector()
        with collector.guard:
            collector.open[self._key] -= 1
            if not collector.open[self._key]:
                del collector.open[self._key]
                del collector.reads[self._key]


class _Collector:
    """Reads at every scrape what the keepers of the open groups have noted."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.open: Counter[tuple[str, str, str]] = Counter()
        self.reads: dict[tuple[str, str, str], Callable[[], WorkStatus]] = {}

    def describe(self) -> list[Any]:
        return list(families().values())

    def collect(self) -> Iterator[Any]:
        collected = families()
        with self.guard:
            groups = dict(self.reads)
        for (topic, place, group), read in groups.items():
            try:
                add(collected, topic, group, read())
            except StorageError as exc:  # the other series must not be missing, too
                log.warning("cannot read the numbers of work group %r of %s: %s", group, place, exc)
        yield from collected.values()


@cache
def _collector() -> _Collector:
    from prometheus_client import REGISTRY

    collector = _Collector()
    REGISTRY.register(collector)
    return collector
