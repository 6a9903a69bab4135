"""Building indexes on Spark's executors: one task for each bucket, which owns it meanwhile."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting.spark.bucket_owner import owner_of
from persisting.spark.jobs.distribute import run_on_executors
from persisting.spark.jobs.topic_lookup import open_topic, place_of
from persisting.spark.query_errors import readable_errors
from persisting.store_address import StoreAddress
from persisting.table import indexes
from persisting.table.indexes import IndexSpec
from persisting.topic.spec import TopicConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@readable_errors
def build_index(
    spark: SparkSession,
    path: str | Path,
    topic: str | None = None,
    *,
    column: str,
    kind: str | None = None,
    metric: str = "l2",
) -> dict[str, Any]:
    """Index a field in every bucket.

    Vectors get a ``vector`` index, words a ``text`` index and values a ``scalar`` one; without
    ``kind`` the type of the field decides. An existing index is rebuilt; later it is updated with
    new rows automatically. The topic must not be open for writing. Returns what the queue's
    ``create_index`` returns (``column``, ``kind``, ``family``, ``metric``, the ``rows`` that the
    index covers and the rows ``behind`` it), and ``buckets`` with the same for each bucket.
    """
    stored = open_topic(path, topic)
    stored.recover()
    spec = indexes.spec_for(stored.schema(), column, kind, metric)
    build = partial(_build, place_of(stored), stored.config, spec)
    parts: list[dict[str, Any]] = run_on_executors(spark, list(stored.buckets), build)
    rows, behind = (sum(part[name] for part in parts) for name in ("rows", "behind"))
    return {**parts[0], "rows": rows, "behind": behind, "buckets": dict(enumerate(parts))}


def _build(
    place: Path | StoreAddress, config: TopicConfig, spec: IndexSpec, bucket: int
) -> dict[str, Any]:
    """Build the index of one bucket; runs in an executor."""
    with owner_of(place, config, bucket, "call create_index() on its queue") as owner:
        return owner.bucket.maintenance.create_index(spec)
