"""Spark and Python's threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def activate(spark: SparkSession) -> None:
    """Make the session the one of this thread.

    Spark looks for the format of a *write* in the session of the Java thread that asks, and a new
    Python thread has one of its own, without a session.
    """
    session, java = getattr(spark, "_jsparkSession", None), getattr(spark, "_jvm", None)
    if session is not None and java is not None:  # Spark Connect asks on the server
        java.SparkSession.setActiveSession(session)
