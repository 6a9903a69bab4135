"""Compaction on Spark's executors; every row keeps its offset.

The driver owns each bucket, plans which adjacent fragments become one, and commits once per bucket.
The executors only write files, to which nothing refers before that commit.
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
from persisting.spark.jobs.distribute import run_on_executors
from persisting.spark.jobs.topic_lookup import open_topic, place_of
from persisting.spark.query_errors import readable_errors
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress
from persisting.table import compaction, operations
from persisting.table.lance_errors import scrubbed, translated
from persisting.topic.spec import bucket_folder
from persisting.topic.topic_files import TopicFolder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PARALLEL_BUCKETS = 8
"""Buckets that are open at the same time, with a Spark job each."""


@readable_errors
def compact(
    spark: SparkSession,
    path: str | Path,
    topic: str | None = None,
    *,
    buckets: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Rewrite all small fragments of a topic as larger ones; offsets, order and content stay.

    Readers and streams are not affected. The topic must not be open for writing; a queue that has
    it open compacts it itself. Returns ``fragments_before``, ``fragments_after``,
    ``versions_removed``, the ``rows`` that were rewritten and by how many ``tasks``, ``seconds``,
    and under ``buckets`` the same for each bucket. If it fails at one bucket, others may be done;
    run it again.
    """
    began = time.monotonic()
    stored = open_topic(path, topic)
    chosen = _checked_buckets(stored, buckets)
    with ThreadPoolExecutor(min(_PARALLEL_BUCKETS, max(1, len(chosen)))) as pool:
        done = list(pool.map(partial(_compact_bucket, spark, stored), chosen))
    names = ("fragments_before", "fragments_after", "versions_removed", "rows", "tasks")
    totals = {name: sum(bucket[name] for bucket in done) for name in names}
    return {
        **totals,
        "seconds": time.monotonic() - began,
        "buckets": dict(zip(chosen, done, strict=True)),
    }


def _checked_buckets(stored: TopicFolder, buckets: Sequence[int] | None) -> list[int]:
    chosen = sorted(set(stored.buckets if buckets is None else buckets))
    unknown = [bucket for bucket in chosen if bucket not in stored.buckets]
    if unknown:
        raise InvalidArgument(
            f"bucket {unknown[0]!r} does not exist; the topic has 0 to {len(stored.buckets) - 1}"
        )
    place = place_of(stored)
    if isinstance(place, StoreAddress):
        return chosen
    return [bucket for bucket in chosen if bucket_folder(place, bucket).is_dir()]


def _compact_bucket(spark: SparkSession, stored: TopicFolder, number: int) -> dict[str, int]:
    with owner_of(place_of(stored), stored.config, number, "call compact() on its queue") as owner:
        bucket = owner.bucket
        before = len(bucket.table.view.sizes)
        with bucket.table_writer.exclusive():
            rows, tasks = _rewrite(spark, bucket)
        # Finds nothing left to rewrite, and removes versions that are too old.
        result = bucket.maintenance.compact()
    return {**result, "fragments_before": before, "rows": rows, "tasks": tasks}


def _rewrite(spark: SparkSession, bucket: Bucket) -> tuple[int, int]:
    """Return (rows, tasks) that were rewritten; the caller has exclusive access to the table."""
    table, limit = bucket.table, bucket.maintenance.limit
    count = compaction.everything(table.view.sizes, limit)
    if not count:
        return 0, 0
    rows, tasks = sum(size.rows for size in table.view.sizes[-count:]), 0

    def run(planned: list[str]) -> list[dict[str, Any]]:
        nonlocal tasks
        tasks = len(planned)
        execute = partial(_execute, table.root, table.view.version)
        return run_on_executors(spark, planned, execute)

    operations.compact(table, bucket.fs, count, limit, whole=True, run=run)
    return rows, tasks


def _execute(root: Path | StoreAddress, version: int, task: str) -> dict[str, Any]:
    """Execute one compaction task; runs in an executor."""
    import lance

    if isinstance(root, StoreAddress):
        options = StorageOptions().for_scheme(root.scheme)
        with scrubbed("compact", root, options.scrub):
            dataset = lance.dataset(str(root), version=version, storage_options=options.for_lance)
            return compaction.write(dataset, task)
    with translated("compact", root):
        dataset = lance.dataset(str(root), version=version)
        return compaction.execute(dataset, task, root, filesystem.current())
