"""Columns by their names, whatever characters these have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import TimeType

from persisting.errors import InvalidArgument
from persisting.spark.types import parts_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

TIMES = "spark.sql.timeType.enabled"


def existing(df: DataFrame, names: str | Sequence[str], what: str) -> list[str]:
    """The names as a list; raises for one that ``df`` does not have."""
    found = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in found if name not in df.columns]
    if unknown or not found:
        there = ", ".join(map(repr, df.columns))
        said = f"{unknown[0]!r}, which is no column" if unknown else "no column"
        raise InvalidArgument(f"{what} names {said}; the columns are: {there}")
    return found


def check_times(df: DataFrame, what: str) -> None:
    """Raise if ``df`` has times of day and its session does not let Spark work with them."""
    names = [
        field.name
        for field in df.schema
        if any(isinstance(one, TimeType) for one in parts_of(field.dataType))
    ]
    if names and df.sparkSession.conf.get(TIMES, "false") != "true":
        raise InvalidArgument(
            f"{what}: field {names[0]!r} holds times of day, which this session does not allow; "
            f"set {TIMES}=true, as persisting.spark.session() does, or leave the field out"
        )


def named(name: str) -> Column:
    """The column of exactly this name."""
    return sf.col("`" + name.replace("`", "``") + "`")
