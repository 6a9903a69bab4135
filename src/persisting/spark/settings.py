"""The defaults of a session: Spark's settings and environment variables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from persisting.spark import java

_LOG_CONFIG = Path(__file__).with_name("log4j2.properties")
_QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
_QUICK_COLLECTOR = "-XX:+UseSerialGC"
_ANY_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")


def defaults(master: str, folder: Path, conf: Mapping[str, str | None]) -> dict[str, str]:
    """Return settings for a session on ``master`` with scratch space in ``folder``.

    ``conf`` has the caller's settings, on which some of ours depend. Flags for Java go to Spark's
    ``defaultJavaOptions``, so that the caller's ``extraJavaOptions`` come later and win.
    """
    log = f"-Dlog4j2.configurationFile={_LOG_CONFIG.as_uri()}"
    chosen = {
        "spark.driver.defaultJavaOptions": log,
        "spark.local.dir": str(folder / "local"),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.timeType.enabled": "true",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    cores = local_cores(master)
    if cores is not None:
        if not conf.get("spark.pyspark.python"):  # else it may lack persisting
            chosen["spark.python.daemon.module"] = "persisting.spark.worker_daemon"
            chosen["spark.python.unix.domain.socket.enabled"] = "true"
        chosen["spark.sql.shuffle.partitions"] = str(max(2, cores))
        for role in ("driver", "executor"):
            flags = (log, *_quick_flags(conf.get(f"spark.{role}.extraJavaOptions")))
            chosen[f"spark.{role}.defaultJavaOptions"] = " ".join(flags)
    return chosen


def variables(master: str, conf: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment variables to start a session on ``master`` with."""
    python = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    chosen = {
        "PYSPARK_PYTHON": python or sys.executable,
        "PYSPARK_DRIVER_PYTHON": conf.get("spark.pyspark.driver.python") or sys.executable,
    }
    if "utf" not in _locale().lower():
        # Otherwise Java cannot open files whose names are not ASCII.
        chosen["LC_ALL"] = "C.UTF-8"
    if local_cores(master) is not None:
        # Otherwise Spark looks for an address in the network and prints a warning.
        chosen["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    return chosen


def java_variables() -> dict[str, str]:
    """Return the environment variables to start Spark's Java with."""
    # Spark starts a first Java that only computes the command line of the second.
    launcher = os.environ.get("SPARK_LAUNCHER_OPTS", " ".join(_quick_flags(None)))
    return {"JAVA_HOME": str(java.java_home()), "SPARK_LAUNCHER_OPTS": launcher}


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change environment variables for the length of a block; Spark copies them when it starts."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def local_cores(master: str) -> int | None:
    """Return how many cores a master on this machine uses; None if it is elsewhere."""
    if master == "local":
        return 1
    if match := re.fullmatch(r"local\[(\d+|\*)(?:\s*,\s*\d+)?\]", master):
        return _cores() if match[1] == "*" else int(match[1])
    if match := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(match[1]) * int(match[2])
    return None


def _locale() -> str:
    names = ("LC_ALL", "LC_CTYPE", "LANG")
    return next((value for name in names if (value := os.environ.get(name))), "")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quick_flags(callers: str | None) -> list[str]:
    """Return flags that make Java start faster, but no collector if the caller names one.

    Java refuses to start with two collectors.
    """
    flags = (callers, os.environ.get("JAVA_TOOL_OPTIONS"), os.environ.get("JDK_JAVA_OPTIONS"))
    if _ANY_COLLECTOR.search(" ".join(filter(None, flags))):
        return [_QUICK_COMPILER]
    return [_QUICK_COMPILER, _QUICK_COLLECTOR]
