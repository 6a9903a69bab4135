"""Counts rows while they are processed, without a second pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql import Observation
from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@contextmanager
def counted(df: DataFrame) -> Iterator[tuple[DataFrame, Callable[[], int]]]:
    """Return ``df`` for one action, and a function that then returns how many rows it had."""
    observation = Observation()
    rows = df.observe(observation, sf.count(sf.lit(1)).alias("rows"))
    yield rows, lambda: int(observation.get.get("rows", 0))
