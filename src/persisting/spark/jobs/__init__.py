"""Jobs on topics: functions of DataFrames, and calls that do a whole step.

    from persisting.spark import jobs, read_topic, session

    spark = session()
    raw = read_topic(spark, "queue_storage/raw", includeMetadata=True)
    fresh = jobs.deduplicate(raw, "id", keep="last")
    jobs.export(fresh.drop("_bucket", "_offset", "_time"), "training", partition_by="label")
    jobs.compact(spark, "queue_storage/raw")

Importing this module does not load Spark; the first job does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persisting.spark.jobs.compact_job import compact
    from persisting.spark.jobs.dedupe_job import deduplicate
    from persisting.spark.jobs.export_job import export
    from persisting.spark.jobs.incremental_job import incremental
    from persisting.spark.jobs.index_job import build_index
    from persisting.spark.jobs.ingest_job import ingest
    from persisting.spark.jobs.near_dedupe import drop_near_duplicates, near_duplicates
    from persisting.spark.jobs.profile_job import profile
    from persisting.spark.jobs.split_job import assign_splits, split, split_topic
    from persisting.spark.jobs.stream_progress import Summary, watch

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

# No module may have the name of a job: importing it would replace the job's function.
_MODULES = {
    "Summary": "stream_progress",
    "assign_splits": "split_job",
    "build_index": "index_job",
    "compact": "compact_job",
    "deduplicate": "dedupe_job",
    "drop_near_duplicates": "near_dedupe",
    "export": "export_job",
    "incremental": "incremental_job",
    "ingest": "ingest_job",
    "near_duplicates": "near_dedupe",
    "profile": "profile_job",
    "split": "split_job",
    "split_topic": "split_job",
    "watch": "stream_progress",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
