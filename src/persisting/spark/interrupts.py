"""Handling of Ctrl-C while Spark starts and works."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block; a second Ctrl-C raises immediately.

    Interrupting Spark while its Java starts would leave that Java running forever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is defer:  # Spark may have installed its own
            signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


@contextmanager
def preserved_interrupt_handler() -> Iterator[None]:
    """Restore the handler of Ctrl-C at the end of the block.

    Spark installs a handler that asks Java to cancel jobs. It may run in the middle of another
    call to Java, which breaks the connection.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
