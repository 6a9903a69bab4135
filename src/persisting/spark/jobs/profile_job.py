"""Profiles: statistics of the columns of a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    AtomicType,
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    NumericType,
    StringType,
    StructType,
    VariantType,
)

from persisting.spark.jobs.columns import check_times, exact_column
from persisting.spark.query_errors import readable_errors
from persisting.topic.scan import BUCKET

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_CUT = 64
"""Characters of the smallest and the largest text that are kept."""


_FIELDS = (
    "bucket int, column string, type string, rows long, nulls long, nans long, distinct long, "
    "min string, max string, mean double, min_length long, mean_length double, max_length long"
)


@readable_errors
def profile(df: DataFrame) -> DataFrame:
    """Return one row for each column of ``df``, and for each of its buckets if it has ``_bucket``.

    ``bucket`` (null: all of them), ``column``, ``type``; ``rows``, ``nulls``, ``nans``;
    ``distinct`` values, approximately (±5 %); ``min`` and ``max`` as text, cut after 64
    characters; ``mean`` of numbers; ``min_length``, ``mean_length`` and ``max_length`` of texts
    (characters), bytes, lists and maps (items). Statistics that a type does not have are null. All
    are computed in one pass over the rows.
    """
    check_times(df, "profile")
    names = [name for name in df.columns if name != BUCKET]
    if not names:
        return df.sparkSession.createDataFrame([], _FIELDS)
    described = sf.array(*(_described(name, df.schema[name].dataType) for name in names))
    if BUCKET in df.columns:
        profiles = df.rollup(BUCKET).agg(described.alias("profiles"))
        bucket = sf.col(BUCKET)
    else:
        profiles = df.agg(described.alias("profiles"))
        bucket = sf.lit(None).cast("int")
    profile = sf.posexplode("profiles").alias("place", "profile")
    rows = profiles.select(bucket.alias("bucket"), profile).orderBy("bucket", "place")
    return rows.select("bucket", "profile.*")


def _described(name: str, dtype: DataType) -> Column:
    column = exact_column(name)
    length = _length(column, dtype)
    least, greatest = _range(column, dtype)
    return sf.struct(
        sf.lit(name).alias("column"),
        sf.lit(dtype.simpleString()).alias("type"),
        sf.count(sf.lit(1)).alias("rows"),
        sf.count_if(column.isNull()).alias("nulls"),
        _nans(column, dtype).alias("nans"),
        _distinct(column, dtype).alias("distinct"),
        least.alias("min"),
        greatest.alias("max"),
        _mean(column, dtype).alias("mean"),
        sf.min(length).cast("long").alias("min_length"),
        sf.avg(length).alias("mean_length"),
        sf.max(length).cast("long").alias("max_length"),
    )


def _length(column: Column, dtype: DataType) -> Column:
    if isinstance(dtype, StringType):
        return sf.char_length(column)
    if isinstance(dtype, BinaryType):
        return sf.octet_length(column)
    if isinstance(dtype, (ArrayType, MapType)):
        return sf.when(column.isNotNull(), sf.size(column))
    return sf.lit(None).cast("int")


def _range(column: Column, dtype: DataType) -> tuple[Column, Column]:
    if not isinstance(dtype, AtomicType) or isinstance(dtype, (BinaryType, VariantType)):
        return sf.lit(None).cast("string"), sf.lit(None).cast("string")
    least, greatest = sf.min(column).cast("string"), sf.max(column).cast("string")
    return sf.substring(least, 1, _CUT), sf.substring(greatest, 1, _CUT)


def _mean(column: Column, dtype: DataType) -> Column:
    if isinstance(dtype, NumericType):
        return sf.avg(column.cast("double"))
    if isinstance(dtype, BooleanType):
        return sf.avg(column.cast("int"))
    return sf.lit(None).cast("double")


def _nans(column: Column, dtype: DataType) -> Column:
    if isinstance(dtype, (FloatType, DoubleType)):
        return sf.count_if(sf.isnan(column))
    return sf.lit(None).cast("long")


def _distinct(column: Column, dtype: DataType) -> Column:
    if _is_countable(dtype):
        return sf.approx_count_distinct(column)
    return sf.lit(None).cast("long")


def _is_countable(dtype: DataType) -> bool:
    """Whether Spark can compare values of a type: not maps and variants."""
    if isinstance(dtype, ArrayType):
        return _is_countable(dtype.elementType)
    if isinstance(dtype, StructType):
        return all(_is_countable(field.dataType) for field in dtype)
    return not isinstance(dtype, (MapType, VariantType))
