"""Calls in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a call in a thread; its result or error gets into the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as exc:
            results.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results
