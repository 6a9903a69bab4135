"""Places whose topics belong to another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from persisting.queue import QueueReader, QueueWriter, read_queue
from support.owner_process import OwnerProcess
from support.topic_homes import Home
from support.topic_places import Place


async def reading(folder: Path, **given: Any) -> QueueReader:
    """Return a reader of the topic ``t``."""
    return await read_queue(topic="t", storage_path=str(folder), **given)


class SocketPlace(Place):
    """A place whose buckets belong to another process, so that every call goes through its
    socket."""

    def __init__(self, kind: str, folder: Path, owner: OwnerProcess) -> None:
        super().__init__(kind, folder)
        self._owner = owner
        self._owned: set[str] = set()

    async def write(self, **given: Any) -> QueueWriter:
        writer = await super().write(**given)
        topic = given.get("topic", self.topic)
        if topic not in self._owned:
            self._owned.add(topic)
            await self._give(topic, given)
        return writer

    async def _give(self, topic: str, given: dict[str, Any]) -> None:
        """Have the other process own every bucket of a topic."""
        await self._owner.own(Path(given.get("storage_path", self.folder)), topic)

    async def close(self) -> None:
        await super().close()
        for topic in self._owned:
            await self._owner.ask("close", topic)


class SocketHome(SocketPlace, Home):
    """Tables that belong to another process."""
