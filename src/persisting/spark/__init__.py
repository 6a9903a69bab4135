"""Topics as Spark tables: source and sink of the format ``persisting``, sessions and jobs.

    from persisting.spark import session, read_topic

    spark = session()
    df = spark.read.format("persisting").load("queue_storage/events")

Importing this module does not load Spark; the first call does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persisting.spark.worker_exit import end_quietly

if TYPE_CHECKING:
    from persisting.spark import jobs
    from persisting.spark.pruning import install_pruning
    from persisting.spark.spark_session import session
    from persisting.spark.topic_scan import read_topic

end_quietly()  # every worker that plans, reads, writes or commits for us imports this package

__all__ = ["install_pruning", "jobs", "read_topic", "session"]

_MODULES = {
    "install_pruning": "persisting.spark.pruning",
    "read_topic": "persisting.spark.topic_scan",
    "session": "persisting.spark.spark_session",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "jobs":
        return import_module("persisting.spark.jobs")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
