"""The private folder of this process's Spark: scratch files and the warehouse."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Scratch:
    """One folder for all sessions of the process, removed by the process that ends last.

    That is Spark's Java: it ends after Python, cleans up even if Python was killed, and would
    write to the folder again if Python removed it earlier. Python removes the folder if Java did
    not start or was killed.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._java_removes_it = False

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Return the folder while a session is being started in it."""
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix="persisting-spark-"))
            atexit.register(self._remove, os.getpid())
        try:
            yield self._path
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        from pyspark import SparkContext

        if SparkContext._jvm is None or self._java_removes_it:
            return
        hooks = getattr(SparkContext._jvm, "org.apache.spark.util.ShutdownHookManager")
        hooks.registerShutdownDeleteDir(SparkContext._jvm.java.io.File(str(self._path)))
        self._java_removes_it = True

    def _remove(self, owner: int) -> None:
        if os.getpid() != owner or self._path is None:
            return
        if not (self._java_removes_it and java_runs()):
            shutil.rmtree(self._path, ignore_errors=True)


def java_runs() -> bool:
    """Whether the Java of this process's Spark is still running."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    # Under spark-submit Java is the parent of this process.
    return gateway is not None and (gateway.proc is None or gateway.proc.poll() is None)
