"""The buckets of an open writer or reader, and calls to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from persisting import fs as filesystem
from persisting.errors import BucketClosed, InvalidArgument, StorageError
from persisting.store.object_store import ObjectStore
from persisting.topic.bucket_client import Topic
from persisting.topic.store_tags import StoreTags
from persisting.topic.table_calls import T, TableCall
from persisting.topic.tags import TagFiles


class BucketSet:
    """Some or all buckets of a topic, until their writer or reader is closed."""

    def __init__(self, topic: Topic, numbers: list[int], user: str) -> None:
        """``user`` is "writer" or "reader", for error messages."""
        self.topic, self.numbers = topic, numbers
        self.closed = False
        self._user = user

    def check_open(self) -> None:
        """Raise once the writer or reader is closed."""
        if self.closed:
            raise BucketClosed(f"the {self._user} of topic {self.topic.name!r} is closed")

    async def call(self, bucket: int, call: TableCall[T]) -> T:
        """Run a call on one bucket."""
        return await self.topic.bucket(bucket).call(call)

    async def call_each(
        self, call: TableCall[T], buckets: Sequence[int] | None = None
    ) -> dict[int, T]:
        """Run the same call on every bucket, or on some, concurrently."""
        self.check_open()
        return await self.call_all(
            dict.fromkeys(self.numbers if buckets is None else buckets, call)
        )

    async def call_all(self, calls: dict[int, TableCall[T]]) -> dict[int, T]:
        """Run a call on each of some buckets, concurrently."""
        results = await all_results([self.call(b, call) for b, call in calls.items()])
        return dict(zip(calls, results, strict=True))

    def require_all(self, operation: str) -> None:
        """Raise unless these are all buckets of the topic."""
        if len(self.numbers) != self.topic.num_buckets:
            raise InvalidArgument(
                f"{operation} needs the whole topic; this reader has only the buckets "
                f"{self.numbers}"
            )

    @property
    def store(self) -> ObjectStore | None:
        """The objects of a topic in an object store; None for all others."""
        store: ObjectStore | None = getattr(self.topic, "store", None)
        return store

    def tag_files(self, operation: str) -> TagFiles:
        """Return the tags of the topic, or raise for a topic in memory."""
        if self.store is not None:
            return StoreTags(self.store)
        return TagFiles(self._require_folder(operation), filesystem.current())

    def _require_folder(self, operation: str) -> Path:
        folder: Path | None = self.topic.folder
        if folder is None:
            raise StorageError(
                f"topic {self.topic.name!r} is in memory and does not support {operation!r}; use "
                "the backend 'lance' or 'persisting'"
            )
        return folder


async def all_results(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently; raise the first error only after all of them have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
