"""The work groups that a node keeps: those of topics whose bucket 0 it owns."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from persisting.cluster.cluster_topic import ClusterTopic
from persisting.cluster.store_host import NodeStores
from persisting.cluster.transport import Transport
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, StorageError
from persisting.store_address import is_store_address
from persisting.topic.bucket_client import Topic
from persisting.topic.spec import TopicConfig
from persisting.work import dead_letters
from persisting.work.group_client import CALLS, answer
from persisting.work.group_place import FolderPlace, GroupPlace, StorePlace
from persisting.work.group_storage import KeptElsewhere
from persisting.work.keeper import Keeper
from persisting.work.kept_group import KeptGroup
from persisting.work.open_group import has_log


class NodeGroups:
    """Opens keepers when members call, and closes them when bucket 0 of their topic moves."""

    def __init__(self, transport: Transport, stores: NodeStores) -> None:
        self._transport, self._stores = transport, stores
        self._groups: dict[tuple[str, str], KeptGroup] = {}
        self._places: set[str] = set()
        """The topics whose bucket 0 is here."""
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}
        """By place and group: a store that does not answer must not hold back other groups."""
        self._refused: dict[tuple[str, str], tuple[float, KeptElsewhere]] = {}
        """Groups that another process keeps, and until when this is not checked again."""

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
        async with self._opening.setdefault((place, group), asyncio.Lock()):
            if place not in self._places:  # bucket 0 has moved, and its new owner needs the lock
                raise BucketClosed("this node does not keep the work groups of the topic")
            kept = self._groups.get((place, group))
            if kept is not None:
                if kept.keeper.failure is None:
                    return kept
                del self._groups[place, group]
                await kept.stop()
            until, refusal = self._refused.get((place, group), (0.0, None))
            if refusal is not None and time.monotonic() < until:
                raise refusal.with_traceback(None)
            stored = self._stored(place, config)
            try:
                keeper = await in_thread(lambda: Keeper(stored.keep(group)))
            except KeptElsewhere as exc:
                self._refused[place, group] = time.monotonic() + stored.pause_seconds, exc
                raise
            try:
                kept = KeptGroup(
                    keeper,
                    topic_at(self._transport, stored),
                    lambda: open_dead_letters(self._transport, stored),
                    has_log=has_log(config),
                )
            except BaseException:
                await in_thread(keeper.close)
                raise
            self._groups[place, group] = kept
            await kept.start()
            return kept

    def _stored(self, place: str, config: TopicConfig) -> GroupPlace:
        if is_store_address(place):
            return StorePlace(self._stores.of(place), config)
        return FolderPlace(Path(place), config)

    async def close(self, place: str) -> None:
        """Give up the groups of a topic."""
        self._places.discard(place)
        for key in [key for key in self._opening if key[0] == place]:
            async with self._opening[key]:
                kept = self._groups.pop(key, None)
                if kept is not None:
                    await kept.stop()


def topic_at(transport: Transport, place: GroupPlace) -> ClusterTopic:
    """Return the topic of a place as one on the cluster."""
    if isinstance(place, StorePlace):
        return ClusterTopic.in_store(transport, place.store, place.config)
    assert isinstance(place, FolderPlace)
    folder = place.folder
    return ClusterTopic(transport, str(folder), str(folder.parent), place.config, None)


async def open_dead_letters(transport: Transport, place: GroupPlace) -> Topic:
    """Open the dead letters of a topic on the cluster; create them with every put synced."""
    wanted = await dead_letters.letters_spec(place)
    config = await in_thread(place.create_letters, wanted)
    return topic_at(transport, place.letters_place(config))
