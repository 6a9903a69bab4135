"""Flush buckets that are still open when their process ends."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import weakref
from contextlib import suppress
from typing import Protocol


class FlushesAtExit(Protocol):
    """An object that makes acknowledged records durable at exit, as far as it can."""

    def flush_at_exit(self) -> None:
        """Flush, whatever state the object is in; must not raise."""
        ...


_open: weakref.WeakSet[FlushesAtExit] = weakref.WeakSet()
_registered_process = 0
"""The process in which :func:`_flush_all` is registered; a fork registers its own."""


def register(bucket: FlushesAtExit) -> None:
    """Flush ``bucket`` at the end of the process if it is still alive then.

    Call this after the bucket has created its finalizers, which release files and locks: exit
    handlers run in reverse order of registration.
    """
    global _registered_process
    _open.add(bucket)
    if _registered_process != os.getpid():
        _registered_process = os.getpid()
        atexit.register(_flush_all)
        if multiprocessing.parent_process() is not None:  # multiprocessing skips atexit handlers
            multiprocessing.util.Finalize(None, _flush_all, exitpriority=0)


def _flush_all() -> None:
    buckets = list(_open)
    for bucket in buckets:
        bucket.flush_at_exit()
    if buckets and _died_of_interrupt():
        _restore_interrupt_status()


def _died_of_interrupt() -> bool:
    """Whether an unhandled KeyboardInterrupt ended the program, and not an interactive session."""
    return getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1")


def _restore_interrupt_status() -> None:
    """Have CPython end the process by SIGINT, as it does after an unhandled KeyboardInterrupt.

    It keeps that in a flag, which every ``exec`` of source text resets: also those of modules that
    a flush imports, so that the process would exit with status 1. An ``exec`` that ends with
    KeyboardInterrupt sets the flag again.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")  # noqa: S102 (sets the flag, see above)
