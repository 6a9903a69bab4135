"""Texts that are nearly the same, found by MinHash-LSH and compared exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from persisting.errors import InvalidArgument
from persisting.spark.jobs import minhash
from persisting.spark.jobs.columns import existing, named
from persisting.spark.jobs.dedupe_job import is_first, order_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

CROWD = 1000
"""So many texts that share a band are compared each with each; a larger crowd with its first one
only, so that boilerplate does not cost the square of its number."""

SHINGLE = 5

_PLACE, _TEXT = "_persisting_place", "_persisting_text"


def near_duplicates(
    df: DataFrame,
    column: str,
    threshold: float = 0.8,
    *,
    order_by: str | Sequence[str] | None = None,
    shingle: int = SHINGLE,
) -> DataFrame:
    """Pairs of rows whose texts in a column are nearly the same.

    A pair is ``first``, ``second`` and ``similarity``. The first two are structs of the columns
    that name a row and order all rows: its arrival (``_time``, ``_bucket``, ``_offset``), or
    ``order_by``. The similarity is the share of common runs of ``shingle`` characters (Jaccard),
    where case and white space do not count. Every pair that is given has at least the threshold;
    of the pairs that have it, more than 99 % are found. Equal texts are paired with the first of
    them; nulls are no text. The texts are read once, at the call.
    """
    order = order_of(df, order_by)
    pairs = _pairs(df, column, threshold, order, shingle, first=True)
    sides = (
        sf.struct(*(named(side)[one].alias(one) for one in order)).alias(side)
        for side in ("first", "second")
    )
    return pairs.select(*sides, "similarity")


def drop_near_duplicates(
    df: DataFrame,
    column: str,
    threshold: float = 0.8,
    *,
    keep: str = "first",
    order_by: str | Sequence[str] | None = None,
    shingle: int = SHINGLE,
) -> DataFrame:
    """The rows of ``df`` without those whose text in a column is nearly that of an earlier row.

    With ``keep="last"``, of a later one. No two of the rows that stay are near duplicates (as
    :func:`near_duplicates` finds them); rows without a text all stay. Of rows with equal texts and
    equal ``order_by`` any one does.
    """
    order = order_of(df, order_by)
    pairs = _pairs(df, column, threshold, order, shingle, first=is_first(keep))
    later = sf.col("second" if is_first(keep) else "first").alias("_going")
    going = pairs.where("first <> second").select(later).distinct()
    name = _name(order, column)
    rest = df.join(going, name.eqNullSafe(sf.col("_going")), "left_anti")
    if order_by is None:
        return rest
    alike = Window.partitionBy(*(named(one) for one in order), named(column)).orderBy(sf.lit(0))
    ranked = rest.withColumn(_PLACE, sf.row_number().over(alike))
    return ranked.where((sf.col(_PLACE) == 1) | named(column).isNull()).drop(_PLACE)


def _name(order: list[str], column: str) -> Column:
    """What tells a row from others: its place in the order, which may be shared, and its text."""
    return sf.struct(
        *(named(one).alias(one) for one in order), sf.xxhash64(named(column)).alias(_TEXT)
    )


def _pairs(
    df: DataFrame, column: str, threshold: float, order: list[str], shingle: int, *, first: bool
) -> DataFrame:
    """Pairs by their rows in order; texts that are equal are paired with the one that stays."""
    if not isinstance(threshold, (int, float)) or not 0 < threshold <= 1:
        raise InvalidArgument(f"threshold must lie above 0 and up to 1, got {threshold!r}")
    if not isinstance(shingle, int) or shingle < 1:
        raise InvalidArgument(f"shingle must be a number of characters from 1, got {shingle!r}")
    groups = _groups(_sketches(df, column, threshold, order, shingle), first=first)
    found = _compared(_candidates(groups, first=first), groups, threshold)
    count = sf.size("rows")
    others = sf.slice("rows", 2, count) if first else sf.slice("rows", 1, count - 1)
    equal = groups.select(sf.col("stays").alias("one"), sf.explode(others).alias("other"))
    every = found.unionByName(equal.withColumn("similarity", sf.lit(1.0)))
    return every.select(
        sf.least("one", "other").alias("first"),
        sf.greatest("one", "other").alias("second"),
        "similarity",
    )


def _sketches(
    df: DataFrame, column: str, threshold: float, order: list[str], shingle: int
) -> DataFrame:
    """The sketch of every text: ``row``, ``whole``, ``shingles``, ``bands``."""
    existing(df, column, "column")
    dtype = df.schema[column].dataType
    if not isinstance(dtype, StringType):
        raise InvalidArgument(f"column {column!r} holds {dtype.simpleString()}, no text")
    texts = df.select(_name(order, column).alias("row"), named(column).alias("text")).where(
        "text is not null"
    )
    numbers = ArrayType(LongType())
    schema = StructType(
        [
            texts.schema["row"],
            StructField("whole", LongType()),
            StructField("shingles", numbers),
            StructField("bands", numbers),
        ]
    )
    return texts.mapInArrow(_sketching(shingle, minhash.rows_per_band(threshold)), schema)


def _sketching(
    shingle: int, rows: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Runs in an executor."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        names = ["row", *minhash.Sketch._fields]
        for batch in batches:
            made = [minhash.sketch(one, shingle, rows) for one in batch.column(1).to_pylist()]
            columns = [
                pa.array([one.whole for one in made], pa.int64()),
                pa.array([one.shingles for one in made], pa.list_(pa.int64())),
                pa.array([one.bands for one in made], pa.list_(pa.int64())),
            ]
            yield pa.RecordBatch.from_arrays([batch.column(0), *columns], names)

    return run


def _groups(sketches: DataFrame, *, first: bool) -> DataFrame:
    """Equal texts as one: ``stays``, all its ``rows`` in order, ``shingles``, ``bands``."""
    groups = sketches.groupBy("whole").agg(
        (sf.min if first else sf.max)("row").alias("stays"),
        sf.array_sort(sf.collect_list("row")).alias("rows"),
        sf.first("shingles").alias("shingles"),
        sf.first("bands").alias("bands"),
    )
    # They are needed several times, and are dear; Spark forgets them when nobody refers to them.
    # A lazy checkpoint would have it log errors for metrics that it forgot too early.
    return groups.localCheckpoint()


def _candidates(groups: DataFrame, *, first: bool) -> DataFrame:
    """Pairs of groups, each once, that share a band."""
    band = Window.partitionBy("band")
    shared = (
        groups.select(sf.col("stays").alias("one"), sf.explode("bands").alias("band"))
        .withColumn("many", sf.count(sf.lit(1)).over(band))
        .withColumn("head", (sf.min if first else sf.max)("one").over(band))
        .where("many > 1")
    )
    few = shared.where(sf.col("many") <= CROWD).select("band", "one")
    each = few.join(few.withColumnRenamed("one", "other"), "band").where("one < other")
    crowd = shared.where((sf.col("many") > CROWD) & (sf.col("one") != sf.col("head")))
    with_head = crowd.select(sf.col("head").alias("one"), sf.col("one").alias("other"))
    return each.select("one", "other").unionByName(with_head).distinct()


def _compared(candidates: DataFrame, groups: DataFrame, threshold: float) -> DataFrame:
    """The candidates that are similar enough, with their similarity."""
    for side in ("one", "other"):
        sets = groups.select(sf.col("stays").alias(side), sf.col("shingles").alias(f"in_{side}"))
        candidates = candidates.join(sets, side)
    common = sf.size(sf.array_intersect("in_one", "in_other"))
    either = sf.size("in_one") + sf.size("in_other") - common
    found = candidates.withColumn("similarity", common / either)
    return found.where(sf.col("similarity") >= threshold).select("one", "other", "similarity")
