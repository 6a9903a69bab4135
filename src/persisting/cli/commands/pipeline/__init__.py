"""``pipeline``: the Spark jobs.

``job_group`` shared options and Spark session · ``job_result`` output · the other modules are the
commands, by what they work on.
"""

from persisting.cli.commands.pipeline import (
    dataset_jobs,
    duplicate_jobs,
    file_jobs,
    incremental_run,
    sql_query,
    table_jobs,
)
from persisting.cli.commands.pipeline.job_group import pipeline

__all__ = [
    "dataset_jobs",
    "duplicate_jobs",
    "file_jobs",
    "incremental_run",
    "pipeline",
    "sql_query",
    "table_jobs",
]
