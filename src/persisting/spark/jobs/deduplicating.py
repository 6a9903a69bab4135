"""Exact duplicates: rows that are equal in some columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 (Spark's own name for it)

from persisting.errors import InvalidArgument
from persisting.spark.jobs.stored import existing
from persisting.spark.reading import BUCKET, OFFSET, TIME

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ORDER = (TIME, BUCKET, OFFSET)
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
    keys = existing(tuple([keys] if isinstance(keys, str) else keys), df.columns, "keys")
    window = Window.partitionBy(*(F.col(_quoted(key)) for key in keys)).orderBy(
        *ordering(df, keep, order_by)
    )
    ranked = df.withColumn(_PLACE, F.row_number().over(window))
    return ranked.where(F.col(_PLACE) == 1).drop(_PLACE)


def ordering(df: DataFrame, keep: str, order_by: str | Sequence[str] | None) -> list[Column]:
    """The columns that put the row to keep first."""
    if keep not in ("first", "last"):
        raise InvalidArgument(f"keep must be 'first' or 'last', got {keep!r}")
    if order_by is None:
        if not set(ORDER) <= set(df.columns):
            raise InvalidArgument(
                "the rows do not say when they arrived: read the topic with includeMetadata=True, "
                "or name columns in order_by"
            )
        order_by = ORDER
    names = existing(
        tuple([order_by] if isinstance(order_by, str) else order_by), df.columns, "order_by"
    )
    columns = [F.col(_quoted(name)) for name in names]
    return [c.asc_nulls_first() if keep == "first" else c.desc_nulls_last() for c in columns]


def _quoted(name: str) -> str:
    return f"`{name}`"
