"""Jobs on topics: each a function from DataFrame to DataFrame, or one call.

    from persisting.spark import jobs, read_topic, session

    spark = session()
    raw = read_topic(spark, "queue_storage/raw", includeMetadata=True)
    fresh = jobs.deduplicate(raw, "id", keep="last")
    jobs.export(fresh.drop("_bucket", "_offset", "_time"), "training", partition_by="label")
    jobs.compact(spark, "queue_storage/raw")

Importing this loads no Spark; that happens with the first job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persisting.spark.jobs.compacting import compact
    from persisting.spark.jobs.deduplicating import deduplicate
    from persisting.spark.jobs.exporting import export
    from persisting.spark.jobs.increments import incremental
    from persisting.spark.jobs.indexing import build_index
    from persisting.spark.jobs.ingesting import ingest
    from persisting.spark.jobs.near import drop_near_duplicates, near_duplicates
    from persisting.spark.jobs.profiling import profile
    from persisting.spark.jobs.progress import Summary, watch
    from persisting.spark.jobs.splitting import assign_splits, split, split_topic

__all__ = [
    "Summary",
    "assign_splits",
    "build_index",
    "compact",
    "deduplicate",
    "drop_near_duplicates",
    "export",
    "incremental",
    "ingest",
    "near_duplicates",
    "profile",
    "split",
    "split_topic",
    "watch",
]

# No module has the name of a job: importing it would put it in the job's place.
_HOMES = {
    "Summary": "progress",
    "assign_splits": "splitting",
    "build_index": "indexing",
    "compact": "compacting",
    "deduplicate": "deduplicating",
    "drop_near_duplicates": "near",
    "export": "exporting",
    "incremental": "increments",
    "ingest": "ingesting",
    "near_duplicates": "near",
    "profile": "profiling",
    "split": "splitting",
    "split_topic": "splitting",
    "watch": "progress",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
