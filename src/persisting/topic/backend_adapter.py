"""One interface to the backend of an open bucket, whatever class it is.

A table backend has this interface itself. Any other backend needs only the methods of
:class:`~persisting.backends.protocol.StorageBackend`; :func:`adapt` adds the rest once, when the
bucket is opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeAlias

import pyarrow as pa

from persisting.backends.table_backend import TableBackend
from persisting.bucket.delays import refuse_without_log
from persisting.bucket.snapshot import Page
from persisting.errors import StorageError
from persisting.records.record_columns import RecordColumns
from persisting.topic.table_calls import MakeDurable, T, TableCall

_BLOCK_ROWS = 1000
_POLL_SECONDS = 0.05


class AdaptedBackend:
    """A backend outside of our class tree, with the interface of a table backend.

    Methods that the backend has itself are used; the others are built from the protocol's.
    """

    def __init__(self, backend: Any, batch_size: int, sequences: dict[str, int]) -> None:
        self._backend, self._batch_size, self._sequences = backend, batch_size, sequences
        # Bound once: the hot path costs no further call.
        self.put, self.put_batch = backend.put, backend.put_batch
        self.get, self.flush, self.stats = backend.get, backend.flush, backend.stats
        self.total_count = backend.total_count
        self.end_offset = getattr(backend, "end_offset", backend.total_count)
        self.close = getattr(backend, "close", backend.flush)
        self._own_put_arrow = getattr(backend, "put_arrow", None)
        self._own_put_once = getattr(backend, "put_once", None)
        self._own_last_number = getattr(backend, "last_number", None)
        self._own_get_arrow = getattr(backend, "get_arrow", None)
        self._own_wait_beyond = getattr(backend, "wait_beyond", None)
        self._own_offset_at = getattr(backend, "offset_at", None)

    async def put_arrow(self, data: pa.Table) -> None:
        """Store the rows of an Arrow table."""
        if self._own_put_arrow is not None:
            await self._own_put_arrow(data)
        else:
            await self.put_batch(data.to_pylist())

    async def put_once(
        self, rows: list[dict[str, Any]] | pa.Table | RecordColumns, writer: str, number: int
    ) -> None:
        """Store rows unless the writer has stored this number, or a later one, before.

        For a backend without sequences of its own they are remembered in memory only.
        """
        refuse_without_log((writer, number))
        if self._own_put_once is not None:
            await self._own_put_once(rows, writer, number)
        elif number > self.last_number(writer):
            await put_rows(self, rows)
            self._sequences[writer] = max(number, self.last_number(writer))

    def last_number(self, writer: str) -> int:
        """Return the last number that :meth:`put_once` stored for a writer, -1 for none."""
        if self._own_last_number is not None:
            return int(self._own_last_number(writer))
        return self._sequences.get(writer, -1)

    async def read(self, offset: int, limit: int | None) -> Page:
        """Return records from ``offset`` on."""
        return Page(offset, await self.get(offset, limit))

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        """Return records from ``offset`` on, as Arrow."""
        if self._own_get_arrow is not None:
            return Page(offset, await self._own_get_arrow(offset, limit))
        return Page(offset, pa.Table.from_pylist(await self.get(offset, limit)))

    async def get_pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncGenerator[Page]:
        """Stream records in pages of ``batch_size`` rows.

        Stored records are read by ``get``, in larger blocks if pages are small; with ``block`` the
        backend's own stream waits for new ones.
        """
        left = limit
        rows = self._batch_size * max(1, _BLOCK_ROWS // self._batch_size)
        while left is None or left > 0:
            records = await self.get(offset, rows if left is None else min(rows, left))
            if not records:
                break
            left = None if left is None else left - len(records)
            for start in range(0, len(records), self._batch_size):
                yield Page(offset + start, records[start : start + self._batch_size])
            offset += len(records)
        if block and left != 0:
            async for record in self._backend.get_stream(offset, left, True):
                yield Page(offset, [record])
                offset += 1

    async def wait_beyond(self, offset: int, epoch: int | None = None) -> None:
        """Wait until there are more than ``offset`` records."""
        if self._own_wait_beyond is not None:
            await self._own_wait_beyond(offset)
            return
        while self.total_count() <= offset:  # noqa: ASYNC110 (the protocol has no event)
            await asyncio.sleep(_POLL_SECONDS)

    async def offset_at(self, timestamp: int) -> int:
        """Return the first offset that arrived at ``timestamp`` (µs of Unix time) or later."""
        if self._own_offset_at is None:
            raise StorageError(
                f"{type(self._backend).__name__} stores no arrival times; seek by offset instead"
            )
        return int(await self._own_offset_at(timestamp))

    def rows_within(self, offset: int, nbytes: int) -> int | None:
        """Return None: the size of the records is not known."""
        return None

    def epoch(self) -> int:
        """Return 0: only tables can be restored to an older version."""
        return 0

    async def call(self, call: TableCall[T]) -> T:
        """Run a table call if the backend has a method of that name, else raise."""
        if not hasattr(self._backend, call.op):
            if isinstance(call, MakeDurable):
                return call.offset  # type: ignore[return-value]
            raise StorageError(
                f"{type(self._backend).__name__} has no table, so it offers no versions, search "
                "or maintenance; use the backend 'lance' or 'persisting'"
            )
        return await call.run(self._backend)


BucketBackend: TypeAlias = "TableBackend | AdaptedBackend"


def adapt(
    backend: Any, batch_size: int, sequences: dict[str, int] | None = None
) -> TableBackend | AdaptedBackend:
    """Give a backend the interface of a table backend.

    ``sequences`` is where the numbers of producers are remembered for a backend that stores none;
    a caller that passes it keeps them when the bucket is reopened.
    """
    if isinstance(backend, TableBackend):
        return backend
    return AdaptedBackend(backend, batch_size, {} if sequences is None else sequences)


def keeps_schema(backend: TableBackend | AdaptedBackend) -> bool:
    """Whether all records of the bucket have one schema, so that Arrow holds them exactly."""
    return isinstance(backend, TableBackend)


async def run_table_call(backend: TableBackend | AdaptedBackend, call: TableCall[T]) -> T:
    """Run a call on a table, or on a backend that offers it without being a table."""
    if isinstance(backend, AdaptedBackend):
        return await backend.call(call)
    return await call.run(backend)


async def put_rows(
    backend: TableBackend | AdaptedBackend, rows: list[dict[str, Any]] | pa.Table | RecordColumns
) -> None:
    """Store rows, all or none, with the put that suits them."""
    if isinstance(rows, RecordColumns):
        rows = rows.to_records()
    if not isinstance(rows, list):
        await backend.put_arrow(rows)
    elif len(rows) == 1:
        await backend.put(rows[0])
    else:
        await backend.put_batch(rows)
