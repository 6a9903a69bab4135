"""The rows of the benchmark, as Parquet and as a topic, and the comparison of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from corebench.report import Run, Target
from tablebench.sizes import OURS, Turns, in_turns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARQUET = "Spark's Parquet"
COLUMNS = ["id", "value", "text", "score", "kind", "tokens"]
PRUNED = ["kind", "tokens"]
VALUE_OF_A_ROW = 96817969
"""``value`` of row 417: ``pmod(xxhash64(417L), 1000000007)``."""
_WORDS = (
    "agent answer batch bucket column context cursor dataset embedding episode feature gradient "
    "history index journal kernel label memory metric model offset packet policy prompt query "
    "record replay reward sample schema stream tensor"
)
_WORDS_PER_TEXT = 7
_KINDS = 8


@dataclass(frozen=True)
class Bench:
    """What every part of the benchmark uses."""

    spark: SparkSession
    run: Run
    parquet: str
    topic: str
    buckets: int

    def parquet_rows(self) -> DataFrame:
        return self.spark.read.parquet(self.parquet)

    def topic_rows(self, columns: list[str] | None = None) -> DataFrame:
        from persisting.spark import read_topic

        return read_topic(self.spark, self.topic, columns=columns)

    def compare(
        self,
        group: str,
        name: str,
        ours: Callable[[int], object],
        theirs: Callable[[int], object],
        at_most: float | None = None,
    ) -> None:
        """Run both alternately and add a line with the best of each; results must be equal."""
        found: Turns = asyncio.run(in_turns({OURS: ours, PARQUET: theirs}, range(self.run.repeat)))
        answers = {str(answer) for timed in found.values() for answer in timed.found}
        if len(answers) > 1:
            raise SystemExit(f"{name}: found {answers}")
        mine, beside = (min(found[who].seconds) for who in (OURS, PARQUET))
        target = None if at_most is None else Target("ratio", at_most=at_most)
        self.run.add(group, name, mine, "s", PARQUET, beside, target)


def make(spark: SparkSession, run: Run, buckets: int) -> Bench:
    """Write the rows as Parquet, and from there as a topic."""
    parquet, topic = str(run.folder / "rows.parquet"), str(run.folder / "topics" / "rows")
    Path(topic).parent.mkdir()
    _generated(spark, run.records).write.parquet(parquet)
    bench = Bench(spark, run, parquet, topic, buckets)
    append_to_topic(bench, bench.parquet_rows(), topic)
    return bench


def append_to_topic(bench: Bench, rows: DataFrame, topic: str) -> None:
    writer = rows.write.format("persisting").option("numBuckets", bench.buckets)
    writer.mode("append").save(topic)


def _generated(spark: SparkSession, count: int) -> DataFrame:
    """Generate rows; every row is a function of its number."""
    words = " || ' ' || ".join(_pick(number) for number in range(_WORDS_PER_TEXT))
    return spark.range(0, count, 1, 4).selectExpr(
        "format_string('record-%09d', id) AS id",
        "pmod(xxhash64(id), 1000000007) AS value",
        f"{words} AS text",
        "pmod(xxhash64(id, 'score'), 100000) / 100000 AS score",
        f"'kind-' || pmod(xxhash64(id, 'kind'), {_KINDS}) AS kind",
        "pmod(xxhash64(id, 'tokens'), 4096) AS tokens",
    )


def _pick(number: int) -> str:
    return f"split('{_WORDS}', ' ')[pmod(hash(id, {number}), {len(_WORDS.split())})]"
