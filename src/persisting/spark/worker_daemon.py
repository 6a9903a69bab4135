"""The process that forks Spark's Python workers for tasks: Spark's own, with workers that end
quietly. Spark runs it as a program (``spark.python.daemon.module``) on masters on this machine."""

from __future__ import annotations

from pyspark import daemon

from persisting.spark.worker_exit import QuietTraceback

if __name__ == "__main__":
    vars(daemon)["traceback"] = QuietTraceback()
    daemon.manager()
