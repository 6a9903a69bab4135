"""Python runs this when it starts one of Spark's processes: sessions put this folder on their path.

Spark forks a process that plans scans or writes from a daemon, and ends it when it was idle for a
minute. Such a process would first load Spark's modules, Arrow and Lance, which takes longer than a
plan. So the daemon loads them, once. Another module of this name, which this one hides, runs as
usual.
"""

import os
import sys


def _run_hidden() -> None:
    """Run the module that Python would have found without this folder."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def _is_planning_daemon() -> bool:
    command = getattr(sys, "orig_argv", [])
    planner = bool(command) and command[-1].startswith("pyspark.sql.worker.")
    return planner and "pyspark.daemon" in command


_run_hidden()
if _is_planning_daemon():
    try:
        from persisting.spark.preloading import preload_for_planning
    except ImportError:
        pass  # this Python lacks persisting: the process that needs it says so
    else:
        preload_for_planning(sys.orig_argv[-1])
