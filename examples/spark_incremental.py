"""From a raw topic to a curated topic to a training set, in steps that take only new rows.

    python examples/spark_incremental.py [folder]

The default folder is ./queue_storage. Documents arrive through a queue. Each run of the pipeline
takes those that arrived since the last run, keeps the ones that are fit for training, and puts them
into a second topic. The training set is that topic at a tag, split by a hash of the documents' ids:
its rows never change, and a document is in the same part in every later set.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from persisting.queue import write_queue
from persisting.spark import jobs, session

WORDS = ("queue", "table", "vector", "bucket", "offset", "commit", "reader")


def document(number: int) -> dict[str, object]:
    """Return a document; every fifth has no text, every seventh only white space."""
    words = " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 9))
    text = None if number % 5 == 0 else ("  \n" if number % 7 == 0 else f"{words}   no. {number}")
    return {"id": f"doc-{number}", "text": text, "score": number % 10 / 10}


async def produce(folder: Path, count: int) -> int:
    """Put the next ``count`` documents; return how many there are now."""
    writer = await write_queue(
        topic="raw", storage_path=str(folder), num_buckets=2, backend="persisting"
    )
    async with writer:
        stats = await writer.stats()
        first = stats["total_count"]
        await writer.put([document(number) for number in range(first, first + count)])
    return first + count


def curate(raw: DataFrame) -> DataFrame:
    """Keep documents with a text, and normalize its white space."""
    tidy = raw.withColumn("text", sf.trim(sf.regexp_replace("text", r"\s+", " ")))
    return tidy.where(sf.length("text") > 0).withColumn("words", sf.size(sf.split("text", " ")))


def main(folder: Path) -> None:
    spark = session("incremental")
    raw, curated = folder / "raw", folder / "curated"

    for count in (300, 200):
        print(f"raw documents: {asyncio.run(produce(folder, count))}")
        step = jobs.incremental(spark, raw, curated, curate, num_buckets=2)
        print(f"  taken: {step.rows}, kept: {step.written}, lag: {sum(step.lag.values())}")

    step = jobs.incremental(spark, raw, curated, curate)
    print(f"nothing new, taken: {step.rows}")

    parts = jobs.split_topic(
        spark, curated, key="id", tag="train-1", shares={"train": 0.9, "validation": 0.1}
    )
    for name, part in parts.items():
        done = jobs.export(part, folder / f"{name}.parquet", mode="overwrite")
        print(f"{name}: {done['rows']} rows in {Path(done['path']).name}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "queue_storage"))
