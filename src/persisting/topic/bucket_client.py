"""What a writer or reader needs of one bucket, wherever the bucket is.

A bucket of this process is called directly (:mod:`persisting.topic.local`), a bucket on a cluster
through its owner's actor. The layers above do not depend on which it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from persisting.bucket.snapshot import Page
from persisting.records.record_columns import RecordColumns
from persisting.topic.spec import TopicConfig
from persisting.topic.table_calls import T, TableCall

Rows: TypeAlias = "list[dict[str, Any]] | pa.Table | RecordColumns"
ProducerSequence: TypeAlias = "tuple[str, int]"
"""A writer's id and the number of a put; a bucket stores each at most once."""


class BucketClient(Protocol):
    """One bucket of a topic."""

    async def put(self, rows: Rows, sequence: ProducerSequence | None = None, /) -> None:
        """Store rows, all or none; return when they are acknowledged."""

    async def read(self, offset: int, limit: int | None) -> Page:
        """Return records from ``offset`` on; 0 means the earliest."""

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        """Return records from ``offset`` on, as Arrow."""

    def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncIterator[Page]:
        """Stream records in order, in pages; with ``block``, wait for new ones.

        If the bucket's epoch is not ``epoch``, or changes, an empty page says so and ends the
        stream: the bucket was restored to an older version.
        """

    async def wait(self, offset: int, epoch: int | None = None) -> None:
        """Wait until there are records beyond ``offset``, or the epoch is not ``epoch``; None
        stands for any epoch."""

    async def call(self, call: TableCall[T]) -> T:
        """Run a call on the bucket's table."""

    async def find(self, timestamp: int) -> int:
        """Return the first offset that arrived at ``timestamp`` (µs of Unix time) or later."""

    async def last_number(self, writer: str) -> int:
        """Return the last number that is stored for a writer, -1 for none."""

    async def flush(self) -> None: ...

    async def stats(self) -> dict[str, Any]: ...


class Topic(Protocol):
    """An open topic: its configuration, and a client for each bucket."""

    @property
    def config(self) -> TopicConfig:
        """The configuration that the topic is open with."""

    @property
    def name(self) -> str: ...

    @property
    def num_buckets(self) -> int: ...

    @property
    def bucket_column(self) -> str: ...

    @property
    def batch_size(self) -> int:
        """Rows per page of reads and transfers."""

    @property
    def folder(self) -> Any:
        """The topic's folder, None for a topic in memory."""

    def bucket(self, bucket: int) -> BucketClient:
        """Return the client of a bucket."""

    async def put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> None:
        """Store rows in several buckets; return when all are acknowledged.

        ``parts`` has each bucket at most once. A bucket that has stored ``sequence`` before
        ignores its part. ``BucketClosed`` and ``BucketLocked`` mean that nothing was stored.
        """

    def must_flush(self, bucket: int) -> bool:
        """Whether a writer that has put to a bucket may not be closed if a flush fails."""

    def put_soon(self, bucket: int, record: dict[str, Any]) -> Awaitable[None] | None:
        """Queue a record and return what to wait for; None if only a client can store it."""

    def put_from_thread(self, bucket: int, record: dict[str, Any]) -> bool:
        """Store a record from a thread that may block; False if only a coroutine can."""

    async def close(self) -> None:
        """Release this handle on the topic."""
