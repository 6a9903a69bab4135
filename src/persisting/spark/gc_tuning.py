"""What a process that Spark runs our tasks in is spared."""

from __future__ import annotations

import gc
import sys

_DAEMON = "pyspark.daemon"
_settled = False


def settle() -> None:
    """Leave what is loaded by now out of garbage collections; for Spark's own processes only.

    Spark's daemon collects all garbage after every task, before the process takes another: 40 ms
    that go into modules, which never become garbage.
    """
    global _settled
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if not _settled and main is not None and main.name == _DAEMON:
        gc.freeze()
        _settled = True
