"""Spark's active session, which belongs to a Java thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def activate(spark: SparkSession) -> None:
    """Make ``spark`` the active session of the calling thread.

    Spark looks up the format of a *write* in the active session of the Java thread that makes the
    call. A new Python thread gets a Java thread of its own, which has no session yet.
    """
    session, java = getattr(spark, "_jsparkSession", None), getattr(spark, "_jvm", None)
    if session is not None and java is not None:  # Spark Connect looks it up on the server
        java.SparkSession.setActiveSession(session)
