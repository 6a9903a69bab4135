"""Topics whose queries push their conditions down, and the same queries without that."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting.spark import pruning, read_topic
from support.spark import random_queries
from support.spark.topics import writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextmanager
def pruned(spark: SparkSession, on: bool) -> Iterator[None]:
    """Turn pruning on or off while the block runs."""
    spark.conf.set(pruning.SETTING, str(on).lower())
    try:
        yield
    finally:
        spark.conf.unset(pruning.SETTING)


def catalog_of(spark: SparkSession, home: Path) -> str:
    """Give the topics of a folder names in SQL; return the name of their catalog."""
    name = f"catalog_{hashlib.sha256(str(home).encode()).hexdigest()[:16]}"
    spark.conf.set(f"spark.sql.catalog.{name}", "persisting.spark.TopicCatalog")
    spark.conf.set(f"spark.sql.catalog.{name}.path", str(home))
    return name


@contextmanager
def logged_by_java(spark: SparkSession) -> Iterator[Any]:
    """Collect what our Java classes say once at debug level; forget that they have said it."""
    logger = "persisting.spark.Pruning"
    jvm: Any = spark.sparkContext._jvm
    log4j = jvm.org.apache.logging.log4j
    said = pruning._loader().loadClass("persisting.spark.Fallback").getDeclaredField("reported")
    said.setAccessible(True)
    said.setBoolean(None, False)
    writer = jvm.java.io.StringWriter()
    layout = log4j.core.layout.PatternLayout.createDefaultLayout()
    appender = log4j.core.appender.WriterAppender.createAppender(
        layout, None, writer, "test", False, True
    )
    appender.start()
    log4j.core.config.Configurator.setLevel(logger, log4j.Level.DEBUG)
    log4j.LogManager.getLogger(logger).addAppender(appender)
    try:
        yield writer
    finally:
        log4j.LogManager.getLogger(logger).removeAppender(appender)
        log4j.core.config.Configurator.setLevel(logger, log4j.Level.ERROR)


def explained(df: DataFrame) -> str:
    """Return the plan that Spark executes."""
    plan: str = df._jdf.queryExecution().executedPlan().treeString()
    return plan


def put_all_types(home: Path, count: int, indexed: Iterable[str] = ()) -> Path:
    """Make a topic of ``count`` rows with all types, in two buckets with several fragments each;
    return its folder."""
    table = random_queries.table(count)
    with writer(home, buckets=2) as queue:
        for start in range(0, count, 100):
            queue.put_arrow(table.slice(start, 100))
            queue.flush()
        for field in indexed:
            queue.create_index(field, kind="scalar")
    return home / "t"


def make_views(spark: SparkSession, folder: Path, topic: str, copy: str) -> tuple[str, str]:
    """Make views of the same rows, a topic and a copy in Parquet that is written without pruning;
    return their names."""
    parquet = str(folder.parent / "copy.parquet")
    with pruned(spark, False):
        read_topic(spark, folder).write.parquet(parquet)
    read_topic(spark, folder).createOrReplaceTempView(topic)
    spark.read.parquet(parquet).createOrReplaceTempView(copy)
    return topic, copy
