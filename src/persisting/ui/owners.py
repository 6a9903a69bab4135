"""Asks the owners of buckets for records that are acknowledged but not in any file yet.

A topic with a log needs no owner: what is acknowledged is in its files. Without a log it is in the
memory of the process that owns the bucket, which answers on its local socket, or of a node of a
cluster that the console has joined. Only buckets that have an owner are asked, so viewing never
makes a process open a bucket. An owner that does not answer soon is left alone for a while: pages
show the files meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pyarrow as pa

from persisting import fs
from persisting.concurrency.pool import in_thread
from persisting.errors import StorageError
from persisting.lock import owner_of
from persisting.queue import QueueReader, read_queue
from persisting.topic import spec as topics
from persisting.topic.spec import bucket_folder
from persisting.ui.storage_view import StorageView, TopicsView

if TYPE_CHECKING:
    from persisting.cluster.cluster_reader import ClusterReader
    from persisting.work.reader import WorkReader

_ANSWER_SECONDS = 5.0
_SILENT_SECONDS = 15.0
_THREAD_SECONDS = 10.0
_STEP_GROWTH = 8
_T = TypeVar("_T")


class OwnedBucket(NamedTuple):
    """What the owner of a bucket says about it."""

    start: int
    end: int
    """The offset after the last acknowledged record."""
    epoch: int
    flushes: int = 0
    """Since the owner has opened the bucket."""
    flush_seconds: float | None = None
    """What these flushes took; None if the owner does not say."""


class Wanted(NamedTuple):
    """Records of a bucket that are in no file, by their offsets."""

    start: int
    """The end of what is in files, or an offset after it."""
    end: int | None = None
    """None: the end of the bucket."""
    newest: bool = True
    """Whether the last ones are read if there are more than the limit, or the first ones."""


class Unflushed(NamedTuple):
    """Records that are in no file yet."""

    bucket: OwnedBucket
    first: int
    records: list[dict[str, Any]]
    is_cut: bool = False
    """Whether records were left out because the others are so large."""

    @property
    def end(self) -> int:
        """The offset after the last of the records."""
        return self.first + len(self.records)

    @property
    def found(self) -> list[tuple[int, dict[str, Any]]]:
        """The records with their offsets."""
        return list(enumerate(self.records, self.first))


class Owners:
    """The owners of the buckets of a storage folder."""

    def __init__(self, view: TopicsView, cluster: ClusterReader | None) -> None:
        self._view, self.cluster = view, cluster
        self._silent: dict[tuple[str, int], float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Answer the threads too that ask from now on; call it in the event loop."""
        self._loop = asyncio.get_running_loop()

    async def open(self, topic: str, bucket: int | None = None) -> QueueReader:
        """Open a topic for calls that its owners carry out."""
        place = await self._place(topic)
        if self.cluster is not None:
            return await self.cluster.open(topic, place, bucket)
        return await read_queue(topic=topic, storage_path=place, bucket_id=bucket)

    async def open_work(self, topic: str, group: str) -> WorkReader:
        """Open a work group as a member that takes no records."""
        place = await self._place(topic)
        if self.cluster is not None:
            return await self.cluster.open_work(topic, place, group)
        return await read_queue(topic=topic, storage_path=place, group=group, mode="work")

    async def _place(self, topic: str) -> str:
        """Return where a topic is; raise if there is none."""
        await in_thread(self._view.check, topic)
        return self._view.place

    async def buckets(self, topic: str, *, all_owners: bool = False) -> dict[int, OwnedBucket]:
        """Return the buckets that have an owner to ask, as it sees them.

        Without ``all_owners`` only those whose files may lack acknowledged records.
        """
        owned = await in_thread(self.asked_buckets, topic, all_owners)
        states = await asyncio.gather(*(self._asked(topic, b, _state) for b in owned))
        return {b: state for b, state in zip(owned, states, strict=True) if state is not None}

    def buckets_now(self, topic: str, all_owners: bool) -> dict[int, OwnedBucket]:
        """Like :meth:`buckets`, but called in a thread: the event loop asks the owners."""
        if self._loop is None or not self.asked_buckets(topic, all_owners):
            return {}
        buckets = self.buckets(topic, all_owners=all_owners)
        asking = asyncio.run_coroutine_threadsafe(buckets, self._loop)
        try:
            return asking.result(_THREAD_SECONDS)
        except (StorageError, OSError, concurrent.futures.TimeoutError):
            asking.cancel()
            return {}

    async def unflushed(
        self, topic: str, wanted: Mapping[int, Wanted], most: int, nbytes: int
    ) -> dict[int, Unflushed]:
        """Return records that are in no file, at most ``most`` of each bucket, and about
        ``nbytes`` of all.

        Buckets without an owner to ask are left out.
        """
        owned = [b for b in await in_thread(self.asked_buckets, topic) if b in wanted]
        budget = nbytes // max(1, len(owned))

        async def read(bucket: int) -> Unflushed | None:
            call = lambda reader: _read(reader, wanted[bucket], most, budget)  # noqa: E731
            return await self._asked(topic, bucket, call)

        found = await asyncio.gather(*(read(bucket) for bucket in owned))
        return {b: part for b, part in zip(owned, found, strict=True) if part is not None}

    def asked_buckets(self, topic: str, all_owners: bool = False) -> list[int]:
        """Return the buckets with an owner to ask; without ``all_owners`` those whose files may
        lack acknowledged records. Blocking."""
        if not isinstance(self._view, StorageView):
            return []  # whatever is acknowledged is in the object store
        folder = self._view.folder(topic)
        config = topics.load(folder, fs.current())
        if config is None or config.backend not in ("lance", "persisting"):
            return []
        if self.cluster is None and config.options.get("enable_wal") and not all_owners:
            return []
        needed = "socket" if self.cluster is None else "node"
        owned = []
        for bucket in range(config.num_buckets):
            with suppress(StorageError):
                if (owner_of(bucket_folder(folder, bucket)) or {}).get(needed):
                    owned.append(bucket)
        return owned

    async def _asked(
        self, topic: str, bucket: int, call: Callable[[QueueReader], Awaitable[_T]]
    ) -> _T | None:
        """Return the answer of an owner, None if it gives none in time."""
        key = topic, bucket
        if self._silent.get(key, 0.0) > time.monotonic():
            return None

        async def answer() -> _T:
            async with await self.open(topic, bucket) as reader:
                return await call(reader)

        try:
            return await asyncio.wait_for(answer(), _ANSWER_SECONDS)
        except (StorageError, OSError, asyncio.TimeoutError):
            now = time.monotonic()
            self._silent = {k: until for k, until in self._silent.items() if until > now}
            self._silent[key] = now + _SILENT_SECONDS
            return None


async def _state(reader: QueueReader) -> OwnedBucket:
    stats = (await reader.stats())["buckets"][0]
    return OwnedBucket(
        stats.get("start_offset", 0),
        stats["end_offset"],
        stats.get("epoch", 0),
        stats.get("flush_count", 0),
        stats.get("flush_seconds"),
    )


async def _read(reader: QueueReader, wanted: Wanted, most: int, nbytes: int) -> Unflushed:
    """Return the first or the newest of the records that are wanted, one at first, then more at
    a time while they fit."""
    state = await _state(reader)
    end = state.end if wanted.end is None else min(wanted.end, state.end)
    low = max(wanted.start, state.start)
    if wanted.newest:
        low = max(low, end - most)
    high = min(end, low + most)
    first, stop, left, step = low, high, nbytes, 1
    parts: list[pa.Table] = []
    while low < high and left > 0:
        step = min(step, high - low)
        begin = high - step if wanted.newest else low
        part = await reader.get_arrow(offset=begin, limit=step)
        if part.num_rows < step:  # the owner has changed meanwhile
            break
        parts.append(part)
        left -= part.nbytes
        low, high = (low, begin) if wanted.newest else (begin + step, high)
        rows = sum(part.num_rows for part in parts)
        step = min(step * _STEP_GROWTH, max(1, left * rows // max(1, nbytes - left)))
    if wanted.newest:
        parts.reverse()
        first = stop - sum(part.num_rows for part in parts)
    records = await in_thread(lambda: [row for part in parts for row in part.to_pylist()])
    return Unflushed(state, first, records, low < high)
