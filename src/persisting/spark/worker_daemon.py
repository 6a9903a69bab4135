"""The process that forks Spark's Python workers for tasks: Spark's own, with workers that end
quietly and have their modules loaded. Spark runs it as a program (``spark.python.daemon.module``)
on masters on this machine."""

from __future__ import annotations

from pyspark import daemon

from persisting.spark.preloading import preload_for_tasks
from persisting.spark.worker_exit import QuietTraceback

if __name__ == "__main__":
    vars(daemon)["traceback"] = QuietTraceback()
    preload_for_tasks()
    daemon.manager()
