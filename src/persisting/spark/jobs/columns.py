"""Columns of DataFrames by name, whatever characters the names contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import TimeType

from persisting.errors import InvalidArgument
from persisting.spark.types import nested_types

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

TIMES = "spark.sql.timeType.enabled"


def checked_columns(df: DataFrame, names: str | Sequence[str], what: str) -> list[str]:
    """Return the names as a list; raise if ``df`` lacks one, or if there is none."""
    listed = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in listed if name not in df.columns]
    if unknown or not listed:
        columns = ", ".join(map(repr, df.columns))
        named = f"{unknown[0]!r}, which is not a column" if unknown else "no column"
        raise InvalidArgument(f"{what} names {named}; the columns are: {columns}")
    return listed


def check_times(df: DataFrame, what: str) -> None:
    """Raise if ``df`` has times of day and its session does not enable them."""
    names = [
        field.name
        for field in df.schema
        if any(isinstance(dtype, TimeType) for dtype in nested_types(field.dataType))
    ]
    if names and df.sparkSession.conf.get(TIMES, "false") != "true":
        raise InvalidArgument(
            f"{what}: field {names[0]!r} holds times of day, which this session does not enable; "
            f"set {TIMES}=true, as persisting.spark.session() does, or leave the field out"
        )


def exact_column(name: str) -> Column:
    """Return the column of exactly this name; Spark would parse dots and backticks in it."""
    return sf.col("`" + name.replace("`", "``") + "`")
