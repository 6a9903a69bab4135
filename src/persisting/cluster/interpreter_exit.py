"""Leaving the interpreter cleanly.

Pulsing's threads touch Python objects while the interpreter is taken down, which ends a program
that has done its work with a crash. Collecting what they hold and giving them a moment before
that ends it with the exit code the program meant.
"""

from __future__ import annotations

import atexit
import gc
import time

_MOMENT = 0.2
_installed = False


def install() -> None:
    """Let the interpreter wait a moment at its end; once per process."""
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_settle)


def _settle() -> None:
    gc.collect()
    time.sleep(_MOMENT)
