"""Letting others run: calls that never wait would keep the event loop to themselves."""

from __future__ import annotations

import asyncio

CALLS_PER_TURN = 64


class Turns:
    """Counts calls that needed no waiting, and waits for one turn of the loop now and then."""

    def __init__(self) -> None:
        self._calls = 0

    async def take(self) -> None:
        self._calls += 1
        if self._calls % CALLS_PER_TURN == 0:
            await asyncio.sleep(0)
