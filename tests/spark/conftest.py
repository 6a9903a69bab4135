"""One Spark session for all tests of a run; it starts with the first test that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from pyspark.logger import PySparkLogger
from support.spark.processes import Run, path_without_java
from support.spark.topics import put

from persisting.cli.app import run
from persisting.spark import query_errors, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with two cores and two shuffle partitions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        started = session("tests", master="local[2]", conf={"spark.sql.shuffle.partitions": 2})
    yield started
    started.stop()


@pytest.fixture
def run_pipeline(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a pipeline command on the topics of a place, in this process and in its Spark session."""
    monkeypatch.setattr(
        "persisting.spark.session", lambda *args, topics=None, **given: session(topics=topics)
    )
    monkeypatch.setattr(query_errors, "silence_logs", lambda spark: None)
    for name in query_errors._QUERY_LOGS:  # PySpark's, which the command silences for good
        monkeypatch.setattr(PySparkLogger.getLogger(name), "disabled", True)
    monkeypatch.setattr(type(spark), "stop", lambda spark: None)
    return lambda place, *words: run(["pipeline", *map(str, words), "-s", str(place)])


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program with its own session, on a machine without Java."""
    folder = tmp_path_factory.mktemp("alone")
    topic = put(tmp_path_factory.mktemp("topics"), [{"id": 1, "text": "x"}])
    with Run(folder, USES_SPARK, topic, PATH=path_without_java(folder / "bin")) as run:
        return run.finish()


USES_SPARK = """
import os
import sys
from persisting.spark import query_errors, session

topic = sys.argv[1]
spark = session(topics=os.path.dirname(topic), conf={
    "spark.persisting.pruning": "false",
    "spark.master": "local[1]",
    "spark.sql.shuffle.partitions": 5,
    "spark.executor.defaultJavaOptions": None,
    "spark.driver.extraJavaOptions": "-Dset.by=me -XX:+UseParallelGC",
})
conf = dict(spark.sparkContext.getConf().getAll())
spark.sql("CREATE DATABASE in_the_warehouse")
frames = spark.read.format("persisting").load(topic), spark.table("persisting.t")
system = spark.sparkContext._jvm.java.lang.System
result = {
    "app": spark.sparkContext.appName,
    "master": spark.sparkContext.master,
    "conf": conf,
    "arrow": spark.conf.get("spark.sql.execution.arrow.pyspark.enabled"),
    "rows": spark.range(10).repartition(3).count(),
    "plans": [
        frame.select("id")._jdf.queryExecution().optimizedPlan().treeString() for frame in frames
    ],
    "java": system.getProperty("java.home"),
    "set.by": system.getProperty("set.by"),
    "environ": [n for n in ("JAVA_HOME", "SPARK_LOCAL_IP", "PYSPARK_PYTHON") if n in os.environ],
    "folder": os.listdir(os.path.dirname(conf["spark.local.dir"])),
}
"""
