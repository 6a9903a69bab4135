"""Exact duplicates: rows that are equal in some columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from persisting.errors import InvalidArgument
from persisting.spark.jobs.columns import existing, named
from persisting.topic.scan import BUCKET, OFFSET, TIME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ARRIVAL = (TIME, BUCKET, OFFSET)
"""What ``includeMetadata`` says of a row: together they name it, and they order all rows."""

_PLACE = "_persisting_place"


def deduplicate(
    df: DataFrame,
    keys: str | Sequence[str],
    *,
    keep: str = "first",
    order_by: str | Sequence[str] | None = None,
) -> DataFrame:
    """The rows of ``df`` without those that repeat the ``keys`` of another one.

    ``keep="first"`` or ``"last"`` says which one stays, in the order of arrival: (``_time``,
    ``_bucket``, ``_offset``), as ``includeMetadata`` gives them. Rows from elsewhere need
    ``order_by``; where that is equal, any one stays. Nulls in keys count as equal.
    """
    by = [named(key) for key in existing(df, keys, "keys")]
    order = [named(name) for name in order_of(df, order_by)]
    if is_first(keep):
        order = [one.asc_nulls_first() for one in order]
    else:
        order = [one.desc_nulls_last() for one in order]
    window = Window.partitionBy(*by).orderBy(*order)
    ranked = df.withColumn(_PLACE, sf.row_number().over(window))
    return ranked.where(sf.col(_PLACE) == 1).drop(_PLACE)


def is_first(keep: str) -> bool:
    if keep not in ("first", "last"):
        raise InvalidArgument(f"keep must be 'first' or 'last', got {keep!r}")
    return keep == "first"


def order_of(df: DataFrame, order_by: str | Sequence[str] | None) -> list[str]:
    """The columns that order rows: those that were named, else their arrival."""
    if order_by is not None:
        return existing(df, order_by, "order_by")
    if not set(ARRIVAL) <= set(df.columns):
        raise InvalidArgument(
            "the rows do not say when they arrived: read the topic with includeMetadata=True, or "
            "name columns in order_by"
        )
    return list(ARRIVAL)
