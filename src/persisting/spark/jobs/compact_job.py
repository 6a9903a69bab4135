"""Compaction on Spark's executors; it never moves a row.

The driver owns each bucket, plans which neighbours become one fragment, and commits once per
bucket. The executors only write files, which nothing refers to before that commit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting import fs as filesystem
from persisting.bucket.bucket import Bucket
from persisting.errors import InvalidArgument
from persisting.spark.bucket_owner import owner_of
from persisting.spark.jobs.distribute import spread
from persisting.spark.jobs.topic_lookup import opened
from persisting.table import compaction, operations
from persisting.table.lance_errors import translated
from persisting.topic.spec import bucket_folder
from persisting.topic.topic_files import TopicFolder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_AT_ONCE = 8
"""Buckets that are open, with a job of Spark's each."""


def compact(
    spark: SparkSession,
    path: str | Path,
    topic: str | None = None,
    *,
    buckets: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Rewrite all small fragments of a topic as larger ones; offsets, order and content stay.

    Readers and streams go on meanwhile. Nobody may have the topic open for writing; a queue that
    does compacts by itself. What is returned says ``fragments_before``, ``fragments_after``,
    ``versions_removed``, the ``rows`` that were rewritten in how many ``tasks``, ``seconds``, and
    the same of each of the ``buckets``. If it fails at a bucket the others may be done; run it
    again.
    """
    began = time.monotonic()
    stored = opened(path, topic)
    chosen = _chosen(stored, buckets)
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(chosen)))) as pool:
        done = list(pool.map(partial(_compact_bucket, spark, stored), chosen))
    names = ("fragments_before", "fragments_after", "versions_removed", "rows", "tasks")
    totals = {name: sum(one[name] for one in done) for name in names}
    return {
        **totals,
        "seconds": time.monotonic() - began,
        "buckets": dict(zip(chosen, done, strict=True)),
    }


def _chosen(stored: TopicFolder, buckets: Sequence[int] | None) -> list[int]:
    chosen = sorted(set(stored.buckets if buckets is None else buckets))
    unknown = [bucket for bucket in chosen if bucket not in stored.buckets]
    if unknown:
        raise InvalidArgument(
            f"bucket {unknown[0]!r} does not exist; the topic has 0 to {len(stored.buckets) - 1}"
        )
    return [bucket for bucket in chosen if bucket_folder(stored.folder, bucket).is_dir()]


def _compact_bucket(spark: SparkSession, stored: TopicFolder, number: int) -> dict[str, int]:
    with owner_of(stored.folder, stored.config, number, "call compact() on its queue") as owner:
        bucket = owner.bucket
        before = len(bucket.table.view.sizes)
        with bucket.table_lock:
            try:
                rows, tasks = _rewrite(spark, bucket)
            finally:
                bucket.publish_table()
        # By hand: nothing is left to rewrite, and versions that are too old are removed.
        left = bucket.maintenance.compact()
    return {**left, "fragments_before": before, "rows": rows, "tasks": tasks}


def _rewrite(spark: SparkSession, bucket: Bucket) -> tuple[int, int]:
    """(rows, tasks) that were rewritten; the caller holds the table."""
    table, limit = bucket.table, bucket.maintenance.limit
    count = compaction.everything(table.view.sizes, limit)
    if not count:
        return 0, 0
    rows, tasks = sum(size.rows for size in table.view.sizes[-count:]), 0

    def run(planned: list[str]) -> list[dict[str, Any]]:
        nonlocal tasks
        tasks = len(planned)
        return spread(spark, planned, partial(_execute, str(table.root), table.view.version))

    operations.compact(table, table.fs, count, limit, whole=True, run=run)
    return rows, tasks


def _execute(root: str, version: int, task: str) -> dict[str, Any]:
    """Runs in an executor."""
    import lance

    with translated("compact", root):
        dataset = lance.dataset(root, version=version)
        return compaction.execute(dataset, task, Path(root), filesystem.current())
