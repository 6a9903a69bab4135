"""A topic that this process only reads: from the owners while they listen, else from its files.

Reading never makes this process the owner of a bucket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from persisting.bucket.snapshot import Page
from persisting.cluster.locator import Patience
from persisting.errors import BucketClosed, BucketLocked, StorageError
from persisting.local_socket.forwarding_client import ForwardingClient
from persisting.local_socket.loop_topic import LoopTopic, LoopTopics
from persisting.local_socket.owner_notes import FolderOwnerNotes
from persisting.local_socket.socket_locator import NoOwner
from persisting.lock import LOCK_FILE
from persisting.topic.address import TopicAddress
from persisting.topic.bucket_client import BucketClient, ProducerSequence, Rows
from persisting.topic.configured import ConfiguredTopic
from persisting.topic.local import LocalBucketClient, live_bucket, live_topic
from persisting.topic.readonly import ReadonlyTopic
from persisting.topic.spec import TopicConfig, bucket_folder
from persisting.topic.stream_position import StreamPosition

_T = TypeVar("_T")
_PAUSE_SECONDS = 0.01
_POLL_SECONDS = 0.05
_CLOCK_SECONDS = 0.1
"""A file that changed this short a time ago may have changed again with the same timestamp."""


class SharedReaderTopic(ConfiguredTopic):
    """A topic on disk, opened for reading."""

    def __init__(self, folder: Path, config: TopicConfig) -> None:
        self.folder, self._config = folder, config
        self.address = TopicAddress.in_folder(folder)
        self.files = ReadonlyTopic(folder, config)
        self._clients: dict[int, SharedReaderClient] = {}
        self._loops = LoopTopics(partial(LoopTopic, FolderOwnerNotes(folder), config))

    @property
    def config(self) -> TopicConfig:
        return self._config

    def bucket(self, bucket: int) -> SharedReaderClient:
        if bucket not in self._clients:
            self._clients[bucket] = SharedReaderClient(self, bucket)
        return self._clients[bucket]

    def elsewhere(self) -> LoopTopic:
        """Return the owners of the buckets as the running event loop reaches them."""
        return self._loops.here()

    async def put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> None:
        raise StorageError(f"topic {self.name!r} is open for reading only")

    async def close(self) -> None:
        await self._loops.close()
        await self.files.close()


class SharedReaderClient(ForwardingClient):
    """A bucket of this process, of another one that listens, or the files of the bucket."""

    def __init__(self, topic: SharedReaderTopic, bucket: int) -> None:
        self._topic, self._bucket = topic, bucket
        self._files = topic.files.bucket(bucket)
        self._lock = bucket_folder(topic.folder, bucket) / LOCK_FILE
        self._unowned: tuple[int, int] | None = None
        """The state of the lock file when there was no owner that listens."""
        self._is_elsewhere = False
        """Whether another process owned the bucket when this one was to open it."""

    async def put(self, rows: Rows, sequence: ProducerSequence | None = None) -> None:
        raise StorageError(f"topic {self._topic.name!r} is open for reading only")

    async def flush(self) -> None:
        raise StorageError(f"topic {self._topic.name!r} is open for reading only")

    async def _source(self) -> BucketClient:
        """Return where the bucket is read now."""
        live = live_bucket(self._topic.address, self._bucket, is_elsewhere=self._is_elsewhere)
        if live is not None:
            return LocalBucketClient(live, self._bucket)
        return await self._owner() or self._files

    async def _left(self, exc: StorageError) -> None:
        """Pause after a bucket was closed, or another process turned out to own it."""
        self._is_elsewhere = isinstance(exc, BucketLocked)
        await asyncio.sleep(_PAUSE_SECONDS)

    async def _owner(self) -> BucketClient | None:
        """Return the owner in another process, None if there is none that listens."""
        topic = self._topic.elsewhere()
        state = _state(self._lock)
        if state is None or state == self._unowned:
            return None
        try:
            await topic.locator(self._bucket).locate(Patience())
        except (NoOwner, StorageError):
            self._unowned = state if _is_settled(state) else None
            return None
        self._unowned = None
        return topic.bucket(self._bucket)

    async def _call(self, call: Callable[[Any], Awaitable[_T]]) -> _T:
        while True:
            source = await self._source()
            try:
                return await call(source)
            except NoOwner:
                continue  # the owner is gone, and has no successor
            except (BucketClosed, BucketLocked) as exc:
                if source is self._files and live_topic(self._topic.address) is None:
                    raise
                await self._left(exc)  # opened or closed by this process just now

    async def wait(self, offset: int, epoch: int | None = None) -> None:
        while True:
            source = await self._source()
            if source is not self._files:
                try:
                    return await source.wait(offset, epoch)
                except (NoOwner, BucketClosed, BucketLocked) as exc:
                    await self._left(exc)
            elif await self._files_grow(offset, epoch):
                return

    async def _files_grow(self, offset: int, epoch: int | None) -> bool:
        """Wait until the files have more; False if the bucket has got an owner first."""
        growth = asyncio.ensure_future(self._files.wait(offset, epoch))
        try:
            while not (await asyncio.wait([growth], timeout=_POLL_SECONDS))[0]:
                if await self._source() is not self._files:
                    return False
            growth.result()
            return True
        except (BucketClosed, BucketLocked):
            return False
        finally:
            if not growth.done():
                growth.cancel()
                await asyncio.wait([growth])

    async def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncGenerator[Page]:
        position = StreamPosition(offset, limit, epoch)
        while not position.at_limit:
            source = await self._source()
            waits = block and source is not self._files
            try:
                async with aclosing(source.pages(*position.window(waits))) as pages:  # type: ignore[type-var]
                    async for page in pages:
                        yield page
                        if not position.advance(page):
                            return
            except NoOwner:
                continue
            except (BucketClosed, BucketLocked) as exc:
                if source is self._files:
                    raise
                await self._left(exc)
                continue
            if not block:
                return
            if not position.at_limit:
                await self.wait(position.offset, position.epoch)


def _state(lock: Path) -> tuple[int, int] | None:
    try:
        status = lock.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _is_settled(state: tuple[int, int]) -> bool:
    """Whether a later change of the file is certain to show in its timestamp."""
    return time.time() - state[1] / 1e9 > _CLOCK_SECONDS
