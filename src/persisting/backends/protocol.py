"""The contract of every backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class StorageBackend(Protocol):
    """Protocol for pluggable storage backends.

    A backend stores the records of one bucket in the order in which their puts were acknowledged.
    Record *n* keeps offset *n* forever: flush, reopening and maintenance never move it.

    A backend is built as ``cls(bucket_id=…, storage_path=…, batch_size=…, **options)``, may block
    in its constructor (hosts call it in a thread), and ignores options it does not know. It may
    have an async ``close()``, which flushes and can be called twice.
    """

    async def put(self, record: dict[str, Any]) -> None:
        """Store a single record.

        The record must not be changed until this has returned; later changes do not affect what
        is stored. Raises and stores nothing if the record cannot be stored.
        """
        ...

    async def put_batch(self, records: list[dict[str, Any]]) -> None:
        """Store multiple records: all of them, or none if one cannot be stored."""
        ...

    async def get(self, offset: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """Retrieve up to ``limit`` records (None: all) from ``offset`` on, in order.

        The result is one consistent view, whatever is put or flushed meanwhile. Past the end it is
        ``[]``; negative or non-integer arguments raise.
        """
        ...

    def get_stream(
        self, offset: int = 0, limit: int | None = None, block: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream single records from ``offset`` on, in bounded memory.

        With ``block`` it waits for new records when caught up, until it has returned ``limit``
        records, the backend is closed or the consumer stops.
        """
        ...

    async def flush(self) -> None:
        """Persist buffered data; records put before the call are durable when this returns."""
        ...

    async def stats(self) -> dict[str, Any]:
        """Get storage statistics, at least ``bucket_id`` and ``total_count``."""
        ...

    def total_count(self) -> int:
        """Get total record count; cheap, and correct at any time."""
        ...
