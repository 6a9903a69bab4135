"""Loads modules in the daemons from which Spark forks its Python processes, before they fork.

Only loading is safe there: Lance must not be used before a fork, and nothing here uses it. The
threads that numpy and Arrow's allocator start are stopped and started around a fork by themselves.
"""

from __future__ import annotations

import gc
import os
import warnings
from importlib import import_module

_SOURCE = ("numpy.ma", "persisting.spark.source", "persisting.spark.batch_reader", "lance")
_SINK = ("persisting.spark.source", "persisting.spark.sink", "lance")
_BY_PLANNER = {
    "pyspark.sql.worker.create_data_source": _SOURCE,
    "pyspark.sql.worker.plan_data_source_read": _SOURCE,
    "pyspark.sql.worker.write_into_data_source": _SINK,
    "pyspark.sql.worker.commit_data_source_write": _SINK,
    "pyspark.sql.worker.python_streaming_sink_runner": _SINK,
}


def preload_for_planning(planner: str) -> None:
    """Load what processes need that run the module ``planner`` of Spark; unknown ones get
    nothing."""
    if planner in _BY_PLANNER:
        from persisting.arrow_loading import load_without_pandas

        load_without_pandas()
        _preload(planner, *_BY_PLANNER[planner])


def preload_for_tasks() -> None:
    """Load what tasks need that read or write topics. They may be of users, so pandas is loaded."""
    _preload("pyspark.worker", "pandas", *_SOURCE, "persisting.spark.write_task")


def _preload(*modules: str) -> None:
    try:
        for name in modules:
            import_module(name)
    except ImportError:
        return  # the process that needs it says so
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    from persisting.spark.worker_exit import end_quietly

    os.register_at_fork(after_in_child=end_quietly)
    gc.freeze()  # else collections in every fork copy the pages of all these modules
