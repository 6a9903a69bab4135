"""A topic that this process shares with others: it owns some buckets, other processes the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from persisting.bucket.snapshot import Page
from persisting.cluster.locator import Patience
from persisting.errors import BucketLocked, OwnershipLost
from persisting.local_socket.forwarding_client import ForwardingClient
from persisting.local_socket.loop_topic import LoopTopic, LoopTopics
from persisting.local_socket.owner_notes import FolderOwnerNotes, OwnerNotes, StoreOwnerNotes
from persisting.store.object_store import ObjectStore
from persisting.topic.bucket_client import BucketClient, ProducerSequence, Rows
from persisting.topic.configured import ConfiguredTopic
from persisting.topic.local import BucketsTaken, LocalHandle
from persisting.topic.spec import TopicConfig
from persisting.topic.stream_position import StreamPosition

_T = TypeVar("_T")
_PAUSE_SECONDS = 0.01


class SharedTopic(ConfiguredTopic):
    """A writer's or reader's handle on a topic of several processes.

    A bucket that nobody owns is opened here when it is used. Buckets of this process are called
    directly, as if no other process existed.
    """

    def __init__(self, handle: LocalHandle) -> None:
        self._handle, self._local = handle, handle.topic
        self._clients: dict[int, SharedBucketClient] = {}
        self._sent: set[int] = set()
        """Buckets to which puts may be on their way to another owner, or wait for it."""
        notes, local = notes_of(handle), handle.topic
        self._loops = LoopTopics(lambda: LoopTopic(notes, handle.config, local))

    @property
    def config(self) -> TopicConfig:
        return self._handle.config

    @property
    def folder(self) -> Path | None:
        return self._handle.folder

    @property
    def store(self) -> ObjectStore | None:
        return self._handle.store

    def bucket(self, bucket: int) -> SharedBucketClient:
        if bucket not in self._clients:
            self._clients[bucket] = SharedBucketClient(self, self._handle, bucket)
        return self._clients[bucket]

    def is_direct(self, bucket: int) -> bool:
        """Whether this process owns a bucket, and a put to it may go there immediately: no earlier
        one is on its way to another owner, or waits until the owner is found."""
        if not self._owns(bucket):
            return False
        return bucket not in self._sent or not self._is_under_way(bucket)

    def _owns(self, bucket: int) -> bool:
        return self._local.open_backend(bucket) is not None and not self._local.is_lost(bucket)

    def must_flush(self, bucket: int) -> bool:
        """What is acknowledged in an object store is stored, whoever owns it now."""
        return self.store is None or self.is_direct(bucket)

    def _is_under_way(self, bucket: int) -> bool:
        if self._is_busy(bucket):
            return True
        if any(topic.is_waited_for(bucket) for topic in self._loops.all()):
            return True
        self._sent.discard(bucket)
        return False

    def _is_busy(self, bucket: int) -> bool:
        return any(topic.is_busy(bucket) for topic in self._loops.all())

    async def put_elsewhere(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None
    ) -> None:
        """Store rows wherever the owners of their buckets are."""
        self._sent.update(bucket for bucket, _ in parts)
        await self.elsewhere().put_parts(parts, sequence)

    def elsewhere(self) -> LoopTopic:
        """Return the owners of the buckets as the running event loop reaches them."""
        return self._loops.here()

    async def locate(self, bucket: int) -> bool:
        """Find the owner of a bucket; open it here if it has none. Return :meth:`is_direct`."""
        if not self.is_direct(bucket):
            await self.elsewhere().locator(bucket).locate(Patience())
        return self.is_direct(bucket)

    async def find_for_put(self, buckets: list[int]) -> bool:
        """Find the owners of buckets for a put, which continues after those that waited before it.

        Buckets without an owner are opened here. Return whether this process owns all of them.
        """
        self._sent.update(buckets)  # later puts see that this one waits
        await self.elsewhere().find_in_turn(buckets)
        return all(self._owns(bucket) and not self._is_busy(bucket) for bucket in buckets)

    def put_soon(self, bucket: int, record: dict[str, Any]) -> Awaitable[None] | None:
        if bucket in self._sent and not self.is_direct(bucket):
            return self.elsewhere().put_soon(bucket, record)
        if self._local.is_lost(bucket):
            return None
        return self._handle.put_soon(bucket, record)

    def put_from_thread(self, bucket: int, record: dict[str, Any]) -> bool:
        return self.is_direct(bucket) and self._handle.put_from_thread(bucket, record)

    async def put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> None:
        """Store rows in several buckets; each owner stores its part as a whole."""
        remote = [bucket for bucket, _ in parts if not self.is_direct(bucket)]
        if remote:
            topic = self.elsewhere()
            unknown = [
                bucket
                for bucket in remote
                if topic.locator(bucket).remote_node is None or topic.is_waited_for(bucket)
            ]
            is_here = not unknown or await self.find_for_put(unknown)
            if len(unknown) < len(remote) or not is_here:
                await self.put_elsewhere(parts, sequence)
                return
        try:
            await self._handle.put_parts(parts, sequence)
        except OwnershipLost:
            raise  # it may be stored
        except BucketLocked as exc:  # reopened with other options, and another process was faster
            left = exc.left if isinstance(exc, BucketsTaken) else parts
            await self.put_elsewhere(left, sequence)

    async def close(self) -> None:
        """Finish the puts of this event loop that are under way, then release the topic."""
        await self._loops.close()
        await self._handle.close()


class SharedBucketClient(ForwardingClient):
    """A bucket of this process or of another one; which, can change at any time."""

    def __init__(self, topic: SharedTopic, handle: LocalHandle, bucket: int) -> None:
        self._topic, self._bucket = topic, bucket
        self._local = handle.bucket(bucket)

    async def put(self, rows: Rows, sequence: ProducerSequence | None = None) -> None:
        topic, bucket = self._topic, self._bucket
        if topic.is_direct(bucket) or await topic.find_for_put([bucket]):
            try:
                await self._local.put(rows, sequence)
                return
            except OwnershipLost:
                raise  # it may be stored
            except BucketLocked:
                pass  # reopened with other options, and another process was faster
        await topic.put_elsewhere([(bucket, rows)], sequence)

    async def _call(self, call: Callable[[BucketClient], Awaitable[_T]]) -> _T:
        if await self._topic.locate(self._bucket):
            try:
                return await call(self._local)
            except BucketLocked:
                pass
        return await call(self._topic.elsewhere().bucket(self._bucket))

    async def wait(self, offset: int, epoch: int | None = None) -> None:
        await self._call(lambda bucket: bucket.wait(offset, epoch))

    async def flush(self) -> None:
        await self._call(lambda bucket: bucket.flush())

    async def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncGenerator[Page]:
        position = StreamPosition(offset, limit, epoch)
        while not position.at_limit:
            source: BucketClient = self._local
            if not await self._topic.locate(self._bucket):
                source = self._topic.elsewhere().bucket(self._bucket)
            try:
                async with aclosing(source.pages(*position.window(block))) as pages:  # type: ignore[type-var]
                    async for page in pages:
                        yield page
                        if not position.advance(page):
                            return
                return
            except BucketLocked:  # reopened with other options, and another process was faster
                await asyncio.sleep(_PAUSE_SECONDS)


def as_shared(handle: LocalHandle) -> SharedTopic | LocalHandle:
    """Return a topic that this process has open; if it listens, as one that others share."""
    return handle if handle.topic.listener is None else SharedTopic(handle)


def notes_of(handle: LocalHandle) -> OwnerNotes:
    """Return where it is noted who owns the buckets of a topic."""
    if handle.store is not None:
        return StoreOwnerNotes(handle.store)
    assert handle.folder is not None
    return FolderOwnerNotes(handle.folder)
