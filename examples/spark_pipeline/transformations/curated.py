"""Divides a raw topic into rows that are fit for training and rejected rows with the reason."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import pipelines as dp
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    spark: SparkSession  # set by Spark

# Spark runs this in the pipeline's own folder.
STORAGE = Path(os.environ.get("QUEUE_STORAGE", "queue_storage")).absolute()

SHORTEST = 10

dp.create_sink("curated", "persisting", {"path": str(STORAGE / "curated"), "numBuckets": "2"})
dp.create_sink("rejected", "persisting", {"path": str(STORAGE / "rejected"), "numBuckets": "1"})


@dp.temporary_view()
def judged() -> DataFrame:
    """Normalize every new raw row, and add the reason to reject it (null: none)."""
    raw = spark.readStream.format("persisting").option("includeMetadata", True)
    text = sf.trim(sf.regexp_replace("text", r"\s+", " "))
    return (
        raw.load(str(STORAGE / "raw"))
        .withColumn("text", text)
        .withColumn(
            "reason",
            sf.when(sf.col("text").isNull(), "no text").when(
                sf.length("text") < SHORTEST, "too short"
            ),
        )
    )


@dp.append_flow(target="curated")
def curate() -> DataFrame:
    good = spark.readStream.table("judged").where("reason is null")
    return good.select("id", "text", sf.col("_time").alias("arrived"))


@dp.append_flow(target="rejected")
def reject() -> DataFrame:
    return spark.readStream.table("judged").where("reason is not null").select("id", "reason")
