"""Removal of exact duplicates: rows that are equal in some columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from persisting.errors import InvalidArgument
from persisting.spark.jobs.columns import checked_columns, exact_column
from persisting.spark.query_errors import readable_errors
from persisting.topic.scan import BUCKET, OFFSET, TIME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ARRIVAL = (TIME, BUCKET, OFFSET)
"""The columns of ``includeMetadata``: they identify a row, and they order all rows."""

_RANK = "_persisting_place"


@readable_errors
def deduplicate(
    df: DataFrame,
    keys: str | Sequence[str],
    *,
    keep: str = "first",
    order_by: str | Sequence[str] | None = None,
) -> DataFrame:
    """Return ``df`` with one row for each value of ``keys``.

    ``keep`` says which of several rows stays, ``"first"`` or ``"last"``, by order of arrival:
    (``_time``, ``_bucket``, ``_offset``), as ``includeMetadata`` gives them. Rows from other
    sources need ``order_by``; among rows that are equal in it, any one may stay. Nulls in keys
    count as equal.
    """
    by = [exact_column(key) for key in checked_columns(df, keys, "keys")]
    order = [exact_column(name) for name in ordering_columns(df, order_by)]
    if keeps_first(keep):
        order = [column.asc_nulls_first() for column in order]
    else:
        order = [column.desc_nulls_last() for column in order]
    window = Window.partitionBy(*by).orderBy(*order)
    ranked = df.withColumn(_RANK, sf.row_number().over(window))
    return ranked.where(sf.col(_RANK) == 1).drop(_RANK)


def keeps_first(keep: str) -> bool:
    if keep not in ("first", "last"):
        raise InvalidArgument(f"keep must be 'first' or 'last', got {keep!r}")
    return keep == "first"


def ordering_columns(df: DataFrame, order_by: str | Sequence[str] | None) -> list[str]:
    """Return the columns that order rows: those in ``order_by``, else their arrival."""
    if order_by is not None:
        return checked_columns(df, order_by, "order_by")
    if not set(ARRIVAL) <= set(df.columns):
        raise InvalidArgument(
            "the rows lack the columns of their arrival: read the topic with includeMetadata=True, "
            "or name columns in order_by"
        )
    return list(ARRIVAL)
