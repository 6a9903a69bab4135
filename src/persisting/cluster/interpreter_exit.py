"""Leaving the interpreter without a crash.

Pulsing's threads touch Python objects while the interpreter is finalized, which can crash a
program that has already done its work. Collecting the objects they hold and giving them a short
time before finalization lets the program end with its own exit code.
"""

from __future__ import annotations

import atexit
import gc
import time

_GRACE_SECONDS = 0.2
_installed = False


def install() -> None:
    """Have the interpreter wait for Pulsing's threads when it exits; once per process."""
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_let_threads_finish)


def _let_threads_finish() -> None:
    gc.collect()
    time.sleep(_GRACE_SECONDS)
