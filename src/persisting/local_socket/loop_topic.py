"""The owners of a topic's buckets, as one event loop reaches them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from persisting.cluster.client import RemoteTopic
from persisting.cluster.locator import Patience
from persisting.errors import BucketLocked
from persisting.local_socket.connection import Connections
from persisting.local_socket.open_buckets import OpenBuckets
from persisting.local_socket.owner_notes import OwnerNotes
from persisting.local_socket.put_turns import PutTurns
from persisting.local_socket.socket_locator import OwningLocator, SocketLocator
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.bucket_set import all_results
from persisting.topic.local import BucketsTaken, LocalTopic
from persisting.topic.spec import TopicConfig


class LoopTopic(RemoteTopic):
    """A topic whose buckets other processes own, or, with ``local``, this one too.

    It belongs to the event loop in which it was created.
    """

    def __init__(
        self, notes: OwnerNotes, config: TopicConfig, local: LocalTopic | None = None
    ) -> None:
        # Whether a put was stored is unknown if a bucket in an object store is lost meanwhile.
        in_store = local is not None and local.store is not None
        super().__init__(as_columns=True, puts_directly=not in_store)
        self._notes, self._config, self._local = notes, config, local
        self._connections = Connections(notes.silent_checks)
        self._buckets = OpenBuckets(local) if local is not None else None
        self._turns = PutTurns()

    @property
    def config(self) -> TopicConfig:
        return self._config

    def _new_locator(self, bucket: int) -> SocketLocator:
        if self._local is None or self._buckets is None:
            return SocketLocator(self._notes, bucket, self._connections)
        return OwningLocator(self._notes, bucket, self._connections, self._local, self._buckets)

    def is_waited_for(self, bucket: int) -> bool:
        """Whether a put waits until the bucket's owner is found."""
        return self._turns.is_waited_for(bucket)

    def put_soon(self, bucket: int, record: dict[str, Any]) -> Awaitable[None] | None:
        return None if self.is_waited_for(bucket) else super().put_soon(bucket, record)

    async def find_in_turn(self, buckets: list[int]) -> None:
        """Find the owners of buckets, and return after all earlier puts that wait for them."""
        found = all_results([self.locator(bucket).locate(Patience()) for bucket in buckets])
        async with self._turns.after(found, buckets):
            pass

    async def _put_here(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None
    ) -> list[tuple[int, Rows]]:
        assert self._local is not None
        try:
            await self._local.put_parts(parts, sequence)
        except BucketsTaken as exc:
            return exc.left
        except BucketLocked:
            return parts  # reopened with other options, and another process was faster
        return []

    async def close(self) -> None:
        """Finish the puts that are under way and close the connections."""
        await super().close()
        self.disconnect()

    def disconnect(self) -> None:
        self._connections.close()


class LoopTopics:
    """The owners of a topic's buckets, as each event loop reaches them."""

    def __init__(self, new: Callable[[], LoopTopic]) -> None:
        self._new = new
        self._topics: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopTopic] = WeakKeyDictionary()
        self._recent: tuple[ref[asyncio.AbstractEventLoop], LoopTopic] | None = None
        """What was returned last: the lookup is a noticeable part of a put."""

    def here(self) -> LoopTopic:
        """Return the owners as the running event loop reaches them."""
        loop, recent = asyncio.get_running_loop(), self._recent
        if recent is not None and recent[0]() is loop:
            return recent[1]
        topic = self._topics.get(loop)
        if topic is None:
            topic = self._topics[loop] = self._new()
        self._recent = ref(loop), topic
        return topic

    def all(self) -> list[LoopTopic]:
        return list(self._topics.values())

    async def close(self) -> None:
        """Finish the puts of the running event loop that are under way; disconnect all loops."""
        running = asyncio.get_running_loop()
        for loop, topic in list(self._topics.items()):
            if loop is running:
                await topic.close()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(topic.disconnect)
        self._topics.clear()
        self._recent = None
