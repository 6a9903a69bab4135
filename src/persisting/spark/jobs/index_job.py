"""Building indexes on Spark's executors: each bucket is a task, which owns it meanwhile."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting.spark.bucket_owner import owner_of
from persisting.spark.jobs.distribute import spread
from persisting.spark.jobs.topic_lookup import opened
from persisting.table import indexes
from persisting.table.indexes import IndexSpec
from persisting.topic.spec import TopicConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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

    Vectors get a ``vector`` index, words a ``text`` and values a ``scalar`` one; without ``kind``
    the field's type decides. An index that is there is built anew, and follows new rows by itself
    afterwards. Nobody may have the topic open for writing. What is returned is as the queue's
    ``create_index`` has it (``column``, ``kind``, ``family``, ``metric``, the ``rows`` it covers
    and those ``behind``, which it does not), and ``buckets`` with the same of each.
    """
    stored = opened(path, topic)
    stored.recover()
    wanted = indexes.spec_for(stored.schema(), column, kind, metric)
    build = partial(_build, str(stored.folder), stored.config, wanted)
    parts: list[dict[str, Any]] = spread(spark, list(stored.buckets), build)
    rows, behind = (sum(part[name] for part in parts) for name in ("rows", "behind"))
    return {**parts[0], "rows": rows, "behind": behind, "buckets": dict(enumerate(parts))}


def _build(folder: str, config: TopicConfig, wanted: IndexSpec, bucket: int) -> dict[str, Any]:
    """Runs in an executor."""
    with owner_of(Path(folder), config, bucket, "call create_index() on its queue") as owner:
        return owner.bucket.maintenance.create_index(wanted)
