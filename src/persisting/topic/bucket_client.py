"""What a writer or reader needs of one bucket, wherever the bucket lives.

A bucket in this process is reached directly (:mod:`persisting.topic.local`), one on a cluster
through its owner's actor; above this line nobody knows the difference.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from persisting.bucket.snapshot import Page

TABLE_READS = frozenset(
    {
        "versions",
        "tags",
        "resolve",
        "restores",
        "read_at",
        "arrow_at",
        "rankings",
        "indexes",
        "take",
        "query",
        "verify",
    }
)
TABLE_CHANGES = frozenset(
    {"tag", "delete_tag", "restore", "create_index", "drop_index", "compact", "retain"}
)
TABLE_CALLS = TABLE_READS | TABLE_CHANGES
"""What a bucket offers as a table; the changes need its owner."""

Rows: TypeAlias = "list[dict[str, Any]] | pa.Table"
ProducerSequence: TypeAlias = "tuple[str, int]"


class BucketClient(Protocol):
    """One bucket of a topic."""

    async def put(self, rows: Rows, mark: ProducerSequence | None = None) -> None:
        """Store rows, all or none; returns when they are acknowledged."""

    async def read(self, offset: int, limit: int | None) -> Page:
        """Records from ``offset`` on; 0 means the earliest."""

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        """Records from ``offset`` on, as Arrow."""

    def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncIterator[Page]:
        """Records in order; with ``block`` it goes on with new ones.

        An empty page says that the bucket's epoch is not ``epoch`` (any more): it was restored to
        an older version. It is the last.
        """

    async def wait(self, offset: int, epoch: int) -> None:
        """Return when there are records beyond ``offset``, or the epoch has changed."""

    async def do(self, op: str, **args: Any) -> Any:
        """One of :data:`TABLE_CALLS` on the bucket's backend."""

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

    def port(self, bucket: int) -> BucketClient: ...

    async def close(self) -> None:
        """This handle is done with the topic."""
