"""Errors of Spark as errors of ours: one line that says why, without Java's stack traces."""

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
_OWN_ERROR = re.compile(r"persisting\.errors\.\w+: (.+)")


def silence_logs(spark: SparkSession) -> None:
    """Turn off Spark's logs: every error is raised, and need not be printed a second time."""
    spark.sparkContext.setLogLevel("OFF")
    for name in _QUERY_LOGS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def as_storage_errors() -> Iterator[None]:
    """Raise errors of Spark as errors of ours that carry the line that says why."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except AnalysisException as exc:
        raise InvalidArgument(_reason(str(exc))) from exc
    except (PySparkException, Py4JJavaError) as exc:
        raise StorageError(_reason(str(exc))) from exc


def _reason(text: str) -> str:
    """Return our own message if there is one, else the innermost cause, else the first line."""
    for pattern in (_OWN_ERROR, _CAUSE, _THROWN):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip()
    return text.strip().splitlines()[0]
