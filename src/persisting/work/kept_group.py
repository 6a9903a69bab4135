"""A keeper with everything that it needs, on one event loop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from persisting.concurrency.pool import in_thread, within
from persisting.errors import StorageError
from persisting.topic.bucket_client import Topic
from persisting.work.dead_letters import DeadLetterWriter, OpenDeadLetters
from persisting.work.feed import Feed
from persisting.work.keeper import Keeper

log = logging.getLogger("persisting")

_READY_SECONDS = 5.0


class KeptGroup:
    """The keeper of a group, the feed of its topic and its dead letters."""

    def __init__(
        self, keeper: Keeper, topic: Topic, open_dead_letters: OpenDeadLetters, *, has_log: bool
    ) -> None:
        self.keeper, self._topic = keeper, topic
        self._feed = Feed(keeper, topic, has_log=has_log)
        self._letter_writer = DeadLetterWriter(keeper, topic, open_dead_letters)
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Follow the buckets; return when all were checked, or after a while."""
        for bucket in range(self._topic.num_buckets):
            self._tasks.append(asyncio.create_task(self._feed.follow(bucket)))
        self._tasks.append(asyncio.create_task(self._letter_writer.run()))
        self._tasks.append(asyncio.create_task(self._store_floors()))
        with suppress(asyncio.TimeoutError):
            await within(self._feed.ready.wait(), _READY_SECONDS)

    async def _store_floors(self) -> None:
        while self.keeper.failure is None:
            await asyncio.sleep(self.keeper.note_seconds)
            self.keeper.end_if_lost()
            try:
                await in_thread(self.keeper.write_status)
                await in_thread(self.keeper.write_floors)
            except StorageError as exc:
                log.warning("%s; retention keeps more than it must", exc)

    async def stop(self) -> None:
        """Give the group up; may be called again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        try:
            await in_thread(self.keeper.close)
        finally:
            await self._letter_writer.close()
            await self._topic.close()
