"""Topics whose queries push their conditions down, and the same queries without that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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
