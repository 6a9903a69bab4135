"""What is done for buckets that are still open when their process ends."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import weakref
from typing import Protocol


class Settled(Protocol):
    """Something that keeps what it can, in whatever state it is; it does not raise."""

    def settle(self) -> None: ...


_open: weakref.WeakSet[Settled] = weakref.WeakSet()
_process = 0
"""Whose end is waited for."""


def at_exit(one: Settled) -> None:
    """Have ``one`` settle at the end of the process, if it is alive by then.

    To be called when it has a finalizer: what is registered later comes first, and finalizers give
    files and locks back.
    """
    global _process
    _open.add(one)
    if _process != os.getpid():
        _process = os.getpid()
        atexit.register(_settle)
        if multiprocessing.parent_process() is not None:  # such a child runs finalizers of its own
            multiprocessing.util.Finalize(None, _settle, exitpriority=0)


def _settle() -> None:
    for one in list(_open):
        one.settle()
