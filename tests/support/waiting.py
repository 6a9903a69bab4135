"""Wait in tests for a state that no event announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

SECONDS = 60.0
"""A limit for tests that hang; a slow machine must not reach it."""


async def until(
    condition: Callable[[], Awaitable[Any]], seconds: float = SECONDS, interval: float = 0.01
) -> None:
    """Return once ``condition`` is true; fail if it is not after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"{condition!r} was not true within {seconds} s"
        await asyncio.sleep(interval)
