"""The first messages of puts that need several, kept until the last one comes."""

from __future__ import annotations

import asyncio

STAGED_SECONDS = 60.0
"""How long the messages of a put wait for the next one before they are dropped."""


class StagedUploads:
    """Messages by upload; the sender starts a new upload when some of them are missing."""

    def __init__(self) -> None:
        self._messages: dict[str, list[list[bytes]]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def add(self, upload: str, number: int, message: list[bytes]) -> None:
        """Keep a message; ignore one that was sent twice or follows a missing one."""
        if number == len(self._messages.get(upload, [])):
            self._messages.setdefault(upload, []).append(message)
            if number:
                self._timers[upload].cancel()
            loop = asyncio.get_running_loop()
            self._timers[upload] = loop.call_later(STAGED_SECONDS, self.take, upload)

    def take(self, upload: str) -> list[list[bytes]]:
        """Remove and return the messages of an upload."""
        timer = self._timers.pop(upload, None)
        if timer is not None:
            timer.cancel()
        return self._messages.pop(upload, [])
