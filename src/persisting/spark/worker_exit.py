"""Lets Spark's Python workers end quietly.

With Unix sockets, a worker whose socket Java has closed fails to write its last bytes, and Spark's
daemon prints a traceback for each. Nothing is lost: Java closes the socket of a worker that it no
longer needs.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

DAEMONS = ("pyspark.daemon", "persisting.spark.worker_daemon")


class QuietTraceback:
    """The module ``traceback``, except that it does not print that a socket was closed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
            traceback.print_exc()


def daemon_process() -> Any | None:
    """Return the main module of this process if it is a worker that Spark's daemon forked."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return main if spec is not None and spec.name in DAEMONS else None


def is_planner() -> bool:
    """Return whether this process plans or commits queries, one at a time."""
    return daemon_process() is not None and sys.argv[-1].startswith("pyspark.sql.worker.")


def end_quietly() -> None:
    """Do not print that Java closed the socket; does nothing outside of Spark's workers."""
    main = daemon_process()
    if main is not None and hasattr(main, "traceback"):
        main.traceback = QuietTraceback()
