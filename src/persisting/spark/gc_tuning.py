"""Garbage collection in Spark's Python workers."""

from __future__ import annotations

import gc

from persisting.spark.worker_exit import daemon_process

_frozen = False


def freeze_loaded_objects() -> None:
    """Exclude the loaded modules from garbage collection; does nothing outside Spark's workers.

    Spark's daemon runs a full collection after every task before it reuses the process. Without
    this, 40 ms of each go into scanning modules, which never become garbage.
    """
    global _frozen
    if not _frozen and daemon_process() is not None:
        gc.freeze()
        _frozen = True
