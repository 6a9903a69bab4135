"""Topics as Spark tables: source and sink of the format ``persisting``, sessions and jobs.

    from persisting.spark import session, read_topic

    spark = session()
    df = spark.read.format("persisting").load("queue_storage/events")

Importing this loads no Spark; that happens with the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persisting.spark import jobs
    from persisting.spark.reading import read_topic
    from persisting.spark.starting import session

__all__ = ["jobs", "read_topic", "session"]

_HOMES = {"read_topic": "persisting.spark.reading", "session": "persisting.spark.starting"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "jobs":
        return import_module("persisting.spark.jobs")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
