"""A client of a bucket that finds out with each call where the bucket is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from persisting.bucket.snapshot import Page
from persisting.topic.bucket_client import BucketClient
from persisting.topic.table_calls import T, TableCall

_T = TypeVar("_T")


class ForwardingClient(ABC):
    """The calls that are the same wherever the bucket is."""

    @abstractmethod
    async def _call(self, call: Callable[[BucketClient], Awaitable[_T]]) -> _T:
        """Make a call where the bucket is now."""

    async def read(self, offset: int, limit: int | None) -> Page:
        return await self._call(lambda bucket: bucket.read(offset, limit))

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        return await self._call(lambda bucket: bucket.read_arrow(offset, limit))

    async def call(self, call: TableCall[T]) -> T:
        return await self._call(lambda bucket: bucket.call(call))

    async def find(self, timestamp: int) -> int:
        return await self._call(lambda bucket: bucket.find(timestamp))

    async def last_number(self, writer: str) -> int:
        return await self._call(lambda bucket: bucket.last_number(writer))

    async def stats(self) -> dict[str, Any]:
        stats = await self._call(lambda bucket: bucket.stats())
        stats.pop("node", None)
        return stats
