"""What Spark fails with, for people who did not write it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from persisting.errors import InvalidArgument, StorageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_QUERY_LOGS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
_CAUSE = re.compile(r"Caused by: (?:[\w.$]+: )?(.+)")
_THROWN = re.compile(r"^: (?:[\w.$]+: )?(.+)", re.MULTILINE)
_OURS = re.compile(r"persisting\.errors\.\w+: (.+)")


def quiet(spark: SparkSession) -> None:
    """Let errors be told once, by who raises them."""
    spark.sparkContext.setLogLevel("OFF")
    for name in _QUERY_LOGS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def in_short() -> Iterator[None]:
    """Errors of Spark as ours, with the line that says why."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except AnalysisException as exc:
        raise InvalidArgument(_reason(str(exc))) from exc
    except (PySparkException, Py4JJavaError) as exc:
        raise StorageError(_reason(str(exc))) from exc


def _reason(text: str) -> str:
    """Our own message, if one is in it; the innermost cause, else the first line."""
    for pattern in (_OURS, _CAUSE, _THROWN):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip()
    return text.strip().splitlines()[0]
