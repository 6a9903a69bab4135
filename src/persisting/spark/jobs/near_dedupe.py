"""Near duplicates of texts: candidates are found by MinHash-LSH, then compared exactly.

Texts that fit into memory are collected and paired by arrays (:mod:`.near_pairs`). More texts than
that are joined by Spark, which needs no more memory for more rows, but is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Observation, Window
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    AtomicType,
    DoubleType,
    FloatType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from persisting.errors import InvalidArgument
from persisting.spark.jobs import minhash
from persisting.spark.jobs.columns import checked_columns, exact_column
from persisting.spark.jobs.dedupe_job import keeps_first, ordering_columns
from persisting.spark.jobs.near_pairs import find_pairs
from persisting.spark.jobs.status_line import StatusLine
from persisting.spark.query_errors import readable_errors

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

CROWD = 1000
"""Up to this many texts that share a band are compared with each other. In a larger group each is
compared only with the first, so that boilerplate does not take quadratic time."""

LOCAL_CHARACTERS = 100_000_000
"""Texts up to this total length are paired in memory; they take about 10 bytes per character."""

SHINGLE = 5

_RANK, _TEXT = "_persisting_place", "_persisting_text"


@readable_errors
def near_duplicates(
    df: DataFrame,
    column: str,
    threshold: float = 0.8,
    *,
    order_by: str | Sequence[str] | None = None,
    columns: str | Sequence[str] = (),
    shingle: int = SHINGLE,
    quiet: bool | None = None,
) -> DataFrame:
    """Return pairs of rows whose texts in a column are nearly the same.

    A pair has ``first``, ``second`` and ``similarity``. The first two are structs of the columns
    that identify a row and order all rows: its arrival (``_time``, ``_bucket``, ``_offset``), or
    ``order_by``; followed by ``columns``, such as a key or the text. The similarity is the share of
    common runs of ``shingle`` characters (Jaccard); case and the amount of white space are ignored.
    Every pair that is returned reaches the threshold; of all pairs that do, more than 99 % are
    found. Equal texts are paired with the first of them; nulls are ignored. The texts are read
    once, during the call. Up to 100 million characters are paired in the memory of this process,
    more by Spark's executors. A line on stderr shows the progress, unless ``quiet``, which is the
    default if stderr is not a terminal.
    """
    order = ordering_columns(df, order_by)
    carried = checked_columns(df, columns, "columns") if columns else []
    shown = list(dict.fromkeys([*order, *carried]))
    with StatusLine(quiet) as status:
        pairs = _pairs(df, column, threshold, order, carried, shingle, status, first=True)
    sides = (
        sf.struct(*(exact_column(side)[name].alias(name) for name in shown)).alias(side)
        for side in ("first", "second")
    )
    return pairs.select(*sides, "similarity")


@readable_errors
def drop_near_duplicates(
    df: DataFrame,
    column: str,
    threshold: float = 0.8,
    *,
    keep: str = "first",
    order_by: str | Sequence[str] | None = None,
    shingle: int = SHINGLE,
    quiet: bool | None = None,
) -> DataFrame:
    """Return ``df`` without rows whose text in a column is nearly that of an earlier row.

    With ``keep="last"``, of a later row. No two of the remaining rows are near duplicates (as
    :func:`near_duplicates` finds them). All rows without a text stay. Of rows with equal texts and
    equal ``order_by``, any one stays.
    """
    order = ordering_columns(df, order_by)
    with StatusLine(quiet) as status:
        pairs = _pairs(df, column, threshold, order, [], shingle, status, first=keeps_first(keep))
    later = sf.col("second" if keeps_first(keep) else "first").alias("_dropped")
    dropped = pairs.where("first <> second").select(later).distinct()
    identity = _row_identity(order, [], column)
    rest = df.join(dropped, identity.eqNullSafe(sf.col("_dropped")), "left_anti")
    if order_by is None:
        return rest
    alike = Window.partitionBy(*map(exact_column, order), exact_column(column)).orderBy(sf.lit(0))
    ranked = rest.withColumn(_RANK, sf.row_number().over(alike))
    return ranked.where((sf.col(_RANK) == 1) | exact_column(column).isNull()).drop(_RANK)


def _row_identity(order: list[str], carried: list[str], column: str) -> Column:
    """Identify a row by its place in the order, which other rows may share, and its text."""
    names = dict.fromkeys([*order, *carried])
    first, rest = list(names)[: len(order)], list(names)[len(order) :]
    return sf.struct(
        *(exact_column(name).alias(name) for name in first),
        sf.xxhash64(exact_column(column)).alias(_TEXT),
        *(exact_column(name).alias(name) for name in rest),
    )


def _pairs(
    df: DataFrame,
    column: str,
    threshold: float,
    order: list[str],
    carried: list[str],
    shingle: int,
    status: StatusLine,
    *,
    first: bool,
) -> DataFrame:
    """Return ordered pairs of rows; equal texts are paired with the row that stays."""
    if not isinstance(threshold, (int, float)) or not 0 < threshold <= 1:
        raise InvalidArgument(f"threshold must be above 0 and at most 1, got {threshold!r}")
    if not isinstance(shingle, int) or shingle < 1:
        raise InvalidArgument(
            f"shingle must be a number of characters of at least 1, got {shingle!r}"
        )
    checked_columns(df, column, "column")
    dtype = df.schema[column].dataType
    if not isinstance(dtype, StringType):
        raise InvalidArgument(f"column {column!r} holds {dtype.simpleString()}, not text")
    texts = df.select(
        _row_identity(order, carried, column).alias("row"), exact_column(column).alias("text")
    ).where("text is not null")
    status.show("reading the texts")
    size = Observation()
    texts = texts.observe(size, sf.sum(sf.length("text")).alias("characters"))
    # The texts are read several times; Spark drops the checkpoint when nothing refers to it. A lazy
    # checkpoint would make Spark log errors about lost metrics.
    texts = texts.localCheckpoint()
    if (size.get["characters"] or 0) <= LOCAL_CHARACTERS and _sorts_alike(df.schema, order):
        return _paired_here(texts, order, threshold, shingle, status, first=first)
    return _paired_by_spark(texts, threshold, shingle, status, first=first)


def _sorts_alike(schema: StructType, order: list[str]) -> bool:
    """Return whether Arrow sorts these columns as Spark does: not floats (NaN), not nested ones."""
    types = [schema[name].dataType for name in order]
    return all(
        isinstance(dtype, AtomicType) and not isinstance(dtype, (FloatType, DoubleType))
        for dtype in types
    )


def _paired_here(
    texts: DataFrame,
    order: list[str],
    threshold: float,
    shingle: int,
    status: StatusLine,
    *,
    first: bool,
) -> DataFrame:
    """Return the pairs as rows of a DataFrame in memory."""
    schema = StructType(
        [
            StructField("first", texts.schema["row"].dataType),
            StructField("second", texts.schema["row"].dataType),
            StructField("similarity", DoubleType()),
        ]
    )
    table = texts.toArrow().combine_chunks()
    rows = table.column("row").combine_chunks()
    ranks = _sorted_places([rows.field(name) for name in (*order, _TEXT)])
    if not first:
        ranks = ranks[::-1]
    sorted_texts = table.column("text").take(pa.array(ranks)).to_pylist()
    pairs = find_pairs(sorted_texts, threshold, shingle, CROWD, status.show)
    one, other = ranks[pairs.first], ranks[pairs.second]
    if not first:
        one, other = other, one
    found = pa.table(
        {
            "first": rows.take(pa.array(one)),
            "second": rows.take(pa.array(other)),
            "similarity": pairs.similarity,
        }
    )
    return texts.sparkSession.createDataFrame(found, schema)


def _sorted_places(columns: list[pa.Array]) -> minhash.Numbers:
    """Return the order of rows as Spark sorts them, with nulls first."""
    keys = []
    for column in columns:
        keys += [column.is_valid(), column] if column.null_count else [column]
    names = [str(number) for number in range(len(keys))]
    order = [(name, "ascending") for name in names]
    places: minhash.Numbers = pc.sort_indices(pa.table(keys, names), sort_keys=order).to_numpy()
    return places.astype(np.int64)


def _paired_by_spark(
    texts: DataFrame, threshold: float, shingle: int, status: StatusLine, *, first: bool
) -> DataFrame:
    """Return the pairs as the plan of a join."""
    status.show("sketching the texts on the executors")
    groups = _groups(_sketches(texts, threshold, shingle), first=first)
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


def _sketches(texts: DataFrame, threshold: float, shingle: int) -> DataFrame:
    """Return the sketch of every text: ``row``, ``whole``, ``shingles``, ``bands``."""
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
        for batch in batches:
            if not batch.num_rows:
                continue
            sketches = minhash.sketch(batch.column(1).to_pylist(), shingle, rows)
            bands = sketches.bands.shape[1]
            columns = [
                batch.column(0),
                _signed(sketches.whole),
                pa.ListArray.from_arrays(
                    pa.array(sketches.starts, pa.int32()), _signed(sketches.shingles)
                ),
                pa.ListArray.from_arrays(
                    pa.array(np.arange(0, sketches.bands.size + 1, bands), pa.int32()),
                    _signed(sketches.bands.ravel()),
                ),
            ]
            yield pa.RecordBatch.from_arrays(columns, ["row", "whole", "shingles", "bands"])

    return run


def _signed(values: minhash.Hashes) -> pa.Array:
    """Reinterpret hashes as signed numbers: Spark has no unsigned ones."""
    return pa.array(values.view(np.int64))


def _groups(sketches: DataFrame, *, first: bool) -> DataFrame:
    """Group equal texts: the row that ``stays``, all ``rows`` in order, ``shingles``, ``bands``."""
    groups = sketches.groupBy("whole").agg(
        (sf.min if first else sf.max)("row").alias("stays"),
        sf.array_sort(sf.collect_list("row")).alias("rows"),
        sf.first("shingles").alias("shingles"),
        sf.first("bands").alias("bands"),
    )
    return groups.localCheckpoint()  # they are used several times


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
