"""Columns by their names, whatever characters these have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from persisting.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def existing(df: DataFrame, names: str | Sequence[str], what: str) -> list[str]:
    """The names as a list; raises for one that ``df`` does not have."""
    found = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in found if name not in df.columns]
    if unknown or not found:
        there = ", ".join(map(repr, df.columns))
        said = f"{unknown[0]!r}, which is no column" if unknown else "no column"
        raise InvalidArgument(f"{what} names {said}; the columns are: {there}")
    return found


def named(name: str) -> Column:
    """The column of exactly this name."""
    return sf.col("`" + name.replace("`", "``") + "`")
