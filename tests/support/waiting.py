"""Wait in tests for a state that no event announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

SECONDS = 60.0
"""A limit for tests that hang; a slow machine must not reach it."""


async def until(
    condition: Callable[[], Awaitable[Any]],
    seconds: float = SECONDS,
    interval: float = 0.01,
    explain: Callable[[], object] = lambda: "",
) -> None:
    """Wait until ``condition`` is true; fail if it is not after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not await condition():
        failure = f"{condition!r} was not true within {seconds} s"
        assert time.monotonic() < deadline, f"{failure}: {explain()}"
        await asyncio.sleep(interval)


def until_true(
    condition: Callable[[], Any],
    explain: Callable[[], object] = lambda: "",
    tries: int = 6000,
    interval: float = 0.02,
) -> None:
    """Wait until ``condition`` is true. The tries are counted, not the seconds: the whole machine
    may stop for a while."""
    for _ in range(tries):
        if condition():
            return
        time.sleep(interval)
    raise AssertionError(f"{condition!r} was never true: {explain()}")
