"""A Prometheus exporter that reads the files of topics at every scrape, outside their owners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from persisting.topic import work_metrics

_BUCKET = ["topic", "bucket"]


class TopicsCollector(Collector):
    """Collects the topics of one storage folder without disturbing their owners."""

    def __init__(self, storage: str) -> None:
        self._storage = storage

    def describe(self) -> list[Any]:
        """Describe nothing: reading the files at registration would cost too much."""
        return []

    def collect(self) -> Iterator[Any]:
        from persisting.topic.inspect import overviews

        families = _families()
        for facts, buckets, groups in overviews(self._storage):
            families["up"].add_metric([facts.topic], 0 if facts.problem else 1)
            for bucket in buckets:
                labels = [facts.topic, str(bucket.bucket)]
                families["records"].add_metric(labels, bucket.rows)
                families["start"].add_metric(labels, bucket.start_offset)
                families["end"].add_metric(labels, bucket.end_offset)
                families["bytes"].add_metric(labels, bucket.bytes)
                families["log"].add_metric(labels, bucket.log_bytes)
                families["owned"].add_metric(labels, bucket.owner is not None)
            for group in groups:
                for place in group.buckets:
                    labels = [facts.topic, group.group, str(place.bucket)]
                    families["lag"].add_metric(labels, place.lag)
                if group.work is not None:
                    work_metrics.add(families, facts.topic, group.group, group.work)
        yield from families.values()


def _families() -> dict[str, Any]:
    def gauge(name: str, text: str, labels: list[str]) -> Any:
        return GaugeMetricFamily(name, text, labels=labels)

    return {
        "up": gauge("persisting_topic_up", "Whether all buckets can be read", ["topic"]),
        "records": gauge("persisting_topic_records", "Records in the table", _BUCKET),
        "start": gauge("persisting_topic_start_offset", "First offset that is left", _BUCKET),
        "end": gauge("persisting_topic_end_offset", "Offset after the last record", _BUCKET),
        "bytes": gauge("persisting_topic_bytes", "Bytes on disk, all versions", _BUCKET),
        "log": gauge("persisting_topic_log_bytes", "Bytes of the write-ahead log", _BUCKET),
        "owned": gauge("persisting_topic_owned", "Whether a process writes it", _BUCKET),
        "lag": gauge(
            "persisting_group_lag_records",
            "Records that a consumer group has not committed yet",
            ["topic", "group", "bucket"],
        ),
        **work_metrics.families(),
    }


def serve(storage: str, port: int, host: str) -> Any:
    """Serve ``/metrics`` of a storage folder from a daemon thread; return the server."""
    from prometheus_client import CollectorRegistry, start_http_server

    from persisting.errors import StorageError

    registry = CollectorRegistry(auto_describe=False)
    registry.register(TopicsCollector(storage))
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as exc:
        raise StorageError(
            f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --port"
        ) from exc
    return server
