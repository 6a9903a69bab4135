"""Errors of Spark as Persisting's own: one line that says why, without Java's stack traces.

Spark raises an error of our source or sink as an exception of its own, whose text contains the
traces of Python and Java. Our functions raise the error itself, and keep Spark's as its
``__cause__``.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from persisting import errors
from persisting.errors import InvalidArgument, StorageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_F = TypeVar("_F", bound=Callable[..., Any])

_QUERY_LOGS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
_CAUSE = re.compile(r"Caused by: (?:[\w.$]+: )?(.+)")
_THROWN = re.compile(r"^: (?:[\w.$]+: )?(.+)", re.MULTILINE)
_STREAM_FAILED = re.compile(
    r"^\[STREAM_FAILED\] .*? terminated with exception: (?:Job aborted.*?: )?"
)
_OWN_ERROR = re.compile(r"persisting\.errors\.(\w+): (.+)")
_SQL_STATE = re.compile(r"(?: SQLSTATE: \w+)+$")


class SparkTrace(Exception):
    """The cause of one of our errors: Spark's exception, printed as one line.

    ``error`` is Spark's exception, ``trace`` its text with all traces of Python and Java.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"{type(error).__name__} of Spark; error.__cause__.trace has its stack traces"
        )
        self.error, self.trace = error, str(error)


def silence_logs(spark: SparkSession) -> None:
    """Turn off Spark's logs: every error is raised, and need not be printed a second time."""
    from pyspark.logger import PySparkLogger

    spark.sparkContext.setLogLevel("OFF")
    for name in _QUERY_LOGS:  # a logger of the usual class would not take what Spark logs
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def readable_errors(function: _F) -> _F:
    """Let a function raise errors of Spark as our own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as exc:
            if not is_spark_error(exc):
                raise
            raise storage_error(exc) from SparkTrace(exc)

    return cast("_F", call)


@contextmanager
def as_storage_errors() -> Iterator[None]:
    """Raise errors of Spark as our own, for the length of a block."""
    try:
        yield
    except Exception as exc:
        if not is_spark_error(exc):
            raise
        raise storage_error(exc) from SparkTrace(exc)


def is_spark_error(exc: Exception) -> bool:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    return isinstance(exc, (PySparkException, Py4JJavaError))


def storage_error(exc: Exception) -> StorageError:
    """Return our error that made Spark fail, otherwise one with the line that says why."""
    from pyspark.errors import AnalysisException

    text = str(exc)
    if own := _OWN_ERROR.findall(text):
        name, message = own[-1]
        cls = getattr(errors, name, StorageError)
        return (cls if issubclass(cls, StorageError) else StorageError)(message.strip())
    cls = InvalidArgument if isinstance(exc, AnalysisException) else StorageError
    return cls(_reason(text))


def renamed(exc: StorageError, text: str) -> StorageError:
    """Return an error of the same kind with another message."""
    error = type(exc)(text)
    error.__dict__.update(getattr(exc, "__dict__", {}))
    return error


def _reason(text: str) -> str:
    """Return the innermost cause, else the first line."""
    text = _STREAM_FAILED.sub("", text.strip())
    causes = _CAUSE.findall(text) or _THROWN.findall(text) or text.splitlines()[:1] or ["unknown"]
    return _SQL_STATE.sub("", str(causes[-1]).strip())
