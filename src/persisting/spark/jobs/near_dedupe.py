"""Near duplicates of texts: candidates are found by MinHash-LSH, then compared exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from persisting.errors import InvalidArgument
from persisting.spark.jobs import minhash
from persisting.spark.jobs.columns import checked_columns, exact_column
from persisting.spark.jobs.dedupe_job import keeps_first, ordering_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

CROWD = 1000
"""Up to this many texts that share a band are compared with each other. In a larger group each is
compared only with the first, so that boilerplate does not take quadratic time."""

SHINGLE = 5

_RANK, _TEXT = "_persisting_place", "_persisting_text"


def near_duplicates(
    df: DataFrame,
    column: str,
    threshold: float = 0.8,
    *,
    order_by: str | Sequence[str] | None = None,
    shingle: int = SHINGLE,
) -> DataFrame:
    """Return pairs of rows whose texts in a column are nearly the same.

    A pair has ``first``, ``second`` and ``similarity``. The first two are structs of the columns
    that identify a row and order all rows: its arrival (``_time``, ``_bucket``, ``_offset``), or
    ``order_by``. The similarity is the share of common runs of ``shingle`` characters (Jaccard);
    case and the amount of white space are ignored. Every pair that is returned reaches the
    threshold; of all pairs that do, more than 99 % are found. Equal texts are paired with the first
    of them; nulls are ignored. The texts are read once, during the call.
    """
    order = ordering_columns(df, order_by)
    pairs = _pairs(df, column, threshold, order, shingle, first=True)
    sides = (
        sf.struct(*(exact_column(side)[name].alias(name) for name in order)).alias(side)
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
    """Return ``df`` without rows whose text in a column is nearly that of an earlier row.

    With ``keep="last"``, of a later row. No two of the remaining rows are near duplicates (as
    :func:`near_duplicates` finds them). All rows without a text stay. Of rows with equal texts and
    equal ``order_by``, any one stays.
    """
    order = ordering_columns(df, order_by)
    pairs = _pairs(df, column, threshold, order, shingle, first=keeps_first(keep))
    later = sf.col("second" if keeps_first(keep) else "first").alias("_dropped")
    dropped = pairs.where("first <> second").select(later).distinct()
    identity = _row_identity(order, column)
    rest = df.join(dropped, identity.eqNullSafe(sf.col("_dropped")), "left_anti")
    if order_by is None:
        return rest
    alike = Window.partitionBy(*map(exact_column, order), exact_column(column)).orderBy(sf.lit(0))
    ranked = rest.withColumn(_RANK, sf.row_number().over(alike))
    return ranked.where((sf.col(_RANK) == 1) | exact_column(column).isNull()).drop(_RANK)


def _row_identity(order: list[str], column: str) -> Column:
    """Identify a row by its place in the order, which other rows may share, and its text."""
    return sf.struct(
        *(exact_column(name).alias(name) for name in order),
        sf.xxhash64(exact_column(column)).alias(_TEXT),
    )


def _pairs(
    df: DataFrame, column: str, threshold: float, order: list[str], shingle: int, *, first: bool
) -> DataFrame:
    """Return ordered pairs of rows; equal texts are paired with the row that stays."""
    if not isinstance(threshold, (int, float)) or not 0 < threshold <= 1:
        raise InvalidArgument(f"threshold must be above 0 and at most 1, got {threshold!r}")
    if not isinstance(shingle, int) or shingle < 1:
        raise InvalidArgument(
            f"shingle must be a number of characters of at least 1, got {shingle!r}"
        )
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
    """Return the sketch of every text: ``row``, ``whole``, ``shingles``, ``bands``."""
    checked_columns(df, column, "column")
    dtype = df.schema[column].dataType
    if not isinstance(dtype, StringType):
        raise InvalidArgument(f"column {column!r} holds {dtype.simpleString()}, not text")
    texts = df.select(
        _row_identity(order, column).alias("row"), exact_column(column).alias("text")
    ).where("text is not null")
    numbers = ArrayType(LongType())
    schema = StructType(
        [
            texts.schema["row"],
            StructField("whole", LongType()),
            StructField("shingles", numbers),
            StructField("bands", numbers),
        ]
    )
    return texts.mapInArrow(_sketch_task(shingle, minhash.rows_per_band(threshold)), schema)


def _sketch_task(
    shingle: int, rows: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that sketches texts in an executor."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        names = ["row", *minhash.Sketch._fields]
        for batch in batches:
            texts = batch.column(1).to_pylist()
            sketches = [minhash.sketch(text, shingle, rows) for text in texts]
            columns = [
                pa.array([sketch.whole for sketch in sketches], pa.int64()),
                pa.array([sketch.shingles for sketch in sketches], pa.list_(pa.int64())),
                pa.array([sketch.bands for sketch in sketches], pa.list_(pa.int64())),
            ]
            yield pa.RecordBatch.from_arrays([batch.column(0), *columns], names)

    return run


def _groups(sketches: DataFrame, *, first: bool) -> DataFrame:
    """Group equal texts: the row that ``stays``, all ``rows`` in order, ``shingles``, ``bands``."""
    groups = sketches.groupBy("whole").agg(
        (sf.min if first else sf.max)("row").alias("stays"),
        sf.array_sort(sf.collect_list("row")).alias("rows"),
        sf.first("shingles").alias("shingles"),
        sf.first("bands").alias("bands"),
    )
    # The groups are used several times and expensive to compute; Spark drops the checkpoint when
    # nothing refers to it. A lazy checkpoint would make Spark log errors about lost metrics.
    return groups.localCheckpoint()


def _candidates(groups: DataFrame, *, first: bool) -> DataFrame:
    """Return the distinct pairs of groups that share a band."""
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
    """Return the candidates that reach the threshold, with their similarity."""
    for side in ("one", "other"):
        sets = groups.select(sf.col("stays").alias(side), sf.col("shingles").alias(f"in_{side}"))
        candidates = candidates.join(sets, side)
    common = sf.size(sf.array_intersect("in_one", "in_other"))
    either = sf.size("in_one") + sf.size("in_other") - common
    found = candidates.withColumn("similarity", common / either)
    return found.where(sf.col("similarity") >= threshold).select("one", "other", "similarity")
