"""What a writer or reader needs of one bucket, wherever the bucket lives.

A bucket in this process is reached directly (:mod:`persisting.topic.local`), one on a cluster
through its owner's actor; above this line nobody knows the difference.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

Rows: TypeAlias = "list[dict[str, Any]] | pa.Table"
Mark: TypeAlias = "tuple[str, int]"


class BucketPort(Protocol):
    """One bucket of a topic."""

    async def put(self, rows: Rows, mark: Mark | None = None) -> None:
        """Store rows, all or none; returns when they are acknowledged."""

    async def get(self, offset: int, limit: int | None) -> list[dict[str, Any]]:
        """Records from ``offset`` on."""

    async def get_arrow(self, offset: int, limit: int | None) -> pa.Table:
        """Records from ``offset`` on, as Arrow."""

    def pages(
        self, offset: int, limit: int | None, block: bool
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Records in order, in lists; with ``block`` it goes on with new ones."""

    async def wait(self, offset: int) -> None:
        """Return when there are records beyond ``offset``."""

    async def find(self, timestamp: int) -> int:
        """The first offset whose record arrived at ``timestamp`` (µs of Unix time) or later."""

    async def last_number(self, writer: str) -> int:
        """The last number a writer's marks reached, -1 if none."""

    async def flush(self) -> None: ...

    async def stats(self) -> dict[str, Any]: ...


class Topic(Protocol):
    """An open topic: its configuration and a port for each bucket."""

    @property
    def name(self) -> str: ...

    @property
    def num_buckets(self) -> int: ...

    @property
    def bucket_column(self) -> str: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def folder(self) -> Any:
        """Where the topic lies on disk, None for one in memory."""

    def port(self, bucket: int) -> BucketPort: ...

    async def close(self) -> None:
        """This handle is done with the topic."""
