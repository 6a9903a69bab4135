"""A metrics server and scrapes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from persisting import metrics
from persisting.queue import PersistingBackend


class Scraped:
    """One scrape: values by sample name, topic and bucket; types by metric."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.types: dict[str, str] = {}
        self.samples: list[Any] = []
        for family in text_string_to_metric_families(text):
            if family.name.startswith("persisting_"):
                self.types[family.name] = family.type
                self.samples += family.samples

    def value(self, name: str, topic: str, bucket: int = 0, **labels: str) -> float | None:
        expected = {"topic": topic, "bucket": str(bucket), **labels}
        found = [s.value for s in self.samples if s.name == name and s.labels == expected]
        return found[0] if found else None

    def topics(self) -> set[str]:
        return {sample.labels["topic"] for sample in self.samples}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """Share one server among the tests of a module: shutting it down takes half a second."""
    running = metrics.serve(0)
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def scrape(server: Any) -> Callable[[], Scraped]:
    def get() -> Scraped:
        with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60) as answer:
            return Scraped(answer.read().decode())

    return get


@pytest.fixture
def open_bucket(tmp_path: Path) -> Callable[..., Any]:
    """Open a bucket with metrics and a log that is flushed only on demand."""

    def opened(topic: str, bucket: int = 0, **options: Any) -> PersistingBackend:
        given = {"enable_metrics": True, "enable_wal": True, "flush_interval": None, **options}
        path = tmp_path / topic / f"bucket_{bucket}"
        return PersistingBackend(bucket_id=bucket, storage_path=str(path), **given)

    return opened
