"""What is in the columns of a topic."""

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

from persisting.spark.jobs.columns import check_times, named
from persisting.topic.scan import BUCKET

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_CUT = 64
"""Characters that are shown of the least and the greatest text."""


_FIELDS = (
    "bucket int, column string, type string, rows long, nulls long, nans long, distinct long, "
    "min string, max string, mean double, min_length long, mean_length double, max_length long"
)


def profile(df: DataFrame) -> DataFrame:
    """One row for each column of ``df``, and for each of its buckets if it has ``_bucket``.

    ``bucket`` (null: all of them), ``column``, ``type``; ``rows``, ``nulls``, ``nans``;
    ``distinct`` values, approximately (±5 %); ``min`` and ``max`` as text, cut after 64
    characters; ``mean`` of numbers; ``min_length``, ``mean_length`` and ``max_length`` of texts
    (characters), bytes, lists and maps (items). What a type does not have is null. All of it comes
    from one pass over the rows.
    """
    check_times(df, "profile")
    names = [name for name in df.columns if name != BUCKET]
    if not names:
        return df.sparkSession.createDataFrame([], _FIELDS)
    described = sf.array(*(_described(name, df.schema[name].dataType) for name in names))
    if BUCKET in df.columns:
        found = df.rollup(BUCKET).agg(described.alias("found"))
        bucket = sf.col(BUCKET)
    else:
        found = df.agg(described.alias("found"))
        bucket = sf.lit(None).cast("int")
    one = sf.posexplode("found").alias("place", "one")
    rows = found.select(bucket.alias("bucket"), one).orderBy("bucket", "place")
    return rows.select("bucket", "one.*")


def _described(name: str, dtype: DataType) -> Column:
    one = named(name)
    length = _length(one, dtype)
    least, greatest = _range(one, dtype)
    return sf.struct(
        sf.lit(name).alias("column"),
        sf.lit(dtype.simpleString()).alias("type"),
        sf.count(sf.lit(1)).alias("rows"),
        sf.count_if(one.isNull()).alias("nulls"),
        _nans(one, dtype).alias("nans"),
        _distinct(one, dtype).alias("distinct"),
        least.alias("min"),
        greatest.alias("max"),
        _mean(one, dtype).alias("mean"),
        sf.min(length).cast("long").alias("min_length"),
        sf.avg(length).alias("mean_length"),
        sf.max(length).cast("long").alias("max_length"),
    )


def _length(one: Column, dtype: DataType) -> Column:
    if isinstance(dtype, StringType):
        return sf.char_length(one)
    if isinstance(dtype, BinaryType):
        return sf.octet_length(one)
    if isinstance(dtype, (ArrayType, MapType)):
        return sf.when(one.isNotNull(), sf.size(one))
    return sf.lit(None).cast("int")


def _range(one: Column, dtype: DataType) -> tuple[Column, Column]:
    if not isinstance(dtype, AtomicType) or isinstance(dtype, (BinaryType, VariantType)):
        return sf.lit(None).cast("string"), sf.lit(None).cast("string")
    least, greatest = sf.min(one).cast("string"), sf.max(one).cast("string")
    return sf.substring(least, 1, _CUT), sf.substring(greatest, 1, _CUT)


def _mean(one: Column, dtype: DataType) -> Column:
    if isinstance(dtype, NumericType):
        return sf.avg(one.cast("double"))
    if isinstance(dtype, BooleanType):
        return sf.avg(one.cast("int"))
    return sf.lit(None).cast("double")


def _nans(one: Column, dtype: DataType) -> Column:
    if isinstance(dtype, (FloatType, DoubleType)):
        return sf.count_if(sf.isnan(one))
    return sf.lit(None).cast("long")


def _distinct(one: Column, dtype: DataType) -> Column:
    if _is_countable(dtype):
        return sf.approx_count_distinct(one)
    return sf.lit(None).cast("long")


def _is_countable(dtype: DataType) -> bool:
    """Spark tells neither maps nor variants apart."""
    if isinstance(dtype, ArrayType):
        return _is_countable(dtype.elementType)
    if isinstance(dtype, StructType):
        return all(_is_countable(field.dataType) for field in dtype)
    return not isinstance(dtype, (MapType, VariantType))
