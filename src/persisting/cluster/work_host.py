"""The work groups that a node keeps: those of topics whose bucket 0 it owns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from persisting import fs as filesystem
from persisting.cluster.cluster_topic import ClusterTopic
from persisting.cluster.transport import Transport
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, StorageError
from persisting.topic.bucket_client import Topic
from persisting.topic.local import agreed_config
from persisting.topic.spec import TopicConfig
from persisting.work import dead_letters
from persisting.work.client import CALLS, answer
from persisting.work.keeper import Keeper
from persisting.work.kept_group import KeptGroup
from persisting.work.open_group import has_log


class NodeGroups:
    """Opens keepers when members call, and closes them when bucket 0 of their topic moves."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._groups: dict[tuple[str, str], KeptGroup] = {}
        self._places: set[str] = set()
        """The topics whose bucket 0 is here."""
        self._opening = asyncio.Lock()

    def add(self, place: str) -> None:
        """Keep the groups of a topic from now on, until :meth:`close`."""
        self._places.add(place)

    async def call(
        self, place: str, config: TopicConfig, group: str, op: str, args: dict[str, Any]
    ) -> Any:
        """Call the keeper of a group as a request asks."""
        if op not in CALLS:
            raise StorageError(f"work groups have no call {op!r}")
        kept = self._groups.get((place, group))
        if kept is None or kept.keeper.failure is not None:
            kept = await asyncio.shield(self._open(place, config, group))
        return await answer(kept.keeper, op, args)

    async def _open(self, place: str, config: TopicConfig, group: str) -> KeptGroup:
        async with self._opening:
            if place not in self._places:  # bucket 0 has moved, and its new owner needs the lock
                raise BucketClosed("this node does not keep the work groups of the topic")
            kept = self._groups.get((place, group))
            if kept is not None:
                if kept.keeper.failure is None:
                    return kept
                del self._groups[place, group]
                await kept.stop()
            folder = Path(place)
            keeper = await in_thread(Keeper, folder, group, filesystem.current())
            try:
                topic = ClusterTopic(self._transport, place, str(folder.parent), config, None)
                kept = KeptGroup(
                    keeper,
                    topic,
                    lambda: open_dead_letters(self._transport, folder, config),
                    has_log=has_log(config),
                )
            except BaseException:
                await in_thread(keeper.close)
                raise
            self._groups[place, group] = kept
            await kept.start()
            return kept

    async def close(self, place: str) -> None:
        """Give up the groups of a topic."""
        self._places.discard(place)
        async with self._opening:
            for key in [key for key in self._groups if key[0] == place]:
                await self._groups.pop(key).stop()


async def open_dead_letters(transport: Transport, folder: Path, config: TopicConfig) -> Topic:
    """Open the dead letters of a topic on the cluster; create them with every put synced."""
    wanted = await dead_letters.letters_spec(folder, config)
    place, agreed, _ = await in_thread(agreed_config, wanted, str(folder.parent))
    assert place is not None
    return ClusterTopic(transport, str(place), str(place.parent), agreed, None)
