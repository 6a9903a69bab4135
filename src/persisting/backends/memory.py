"""MemoryBackend: the protocol in its simplest form, and the model for testing the others."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa

from persisting.backends.fairness import FairYield, KeyedLocks
from persisting.bucket.chunk import prepare
from persisting.bucket.producer_sequences import check_number, check_writer
from persisting.bucket.put_cost import check_records
from persisting.bucket.waiters import Waiters
from persisting.concurrency.closing import AsyncClosing
from persisting.concurrency.loop_bridge import next_wake
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, InvalidArgument, SchemaError
from persisting.options import check_window
from persisting.records import RecordEncoder, Rules, arrow
from persisting.records.encoder import EMPTY
from persisting.records.field_names import check_name
from persisting.records.values import Values

_ROWS_PER_TURN = 1000
_MAX_SHAPES = 1024
_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1
_ALWAYS_CANONICAL = frozenset({float, bool, type(None)})


class MemoryBackend(AsyncClosing):
    """In-memory storage: fast, unbounded, lost when the process ends.

    It takes every record that the other backends could store, each with a schema of its own, and
    returns it in the same canonical form. Streams copy pages of ``batch_size`` records.
    """

    def __init__(
        self, bucket_id: int = 0, storage_path: str = "", batch_size: int = 100, **kwargs: Any
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidArgument(f"batch_size must be a whole number from 1, got {batch_size!r}")
        self._bucket_id, self._storage_path = bucket_id, str(storage_path)
        self._page_rows = min(batch_size, _ROWS_PER_TURN)
        self._records: list[dict[str, Any]] = []
        self._arrivals: list[int] = []
        self._last_numbers: dict[str, int] = {}
        self._shapes: set[tuple[str, ...]] = set()
        self._values = Values(evolving=True, vector=pa.float64())
        self._waiters = Waiters()
        self._fairness, self._producer_locks = FairYield(), KeyedLocks()
        self._closed = False

    async def put(self, record: dict[str, Any]) -> None:
        """Store a single record."""
        self._add([self._canonical(record)])
        await self._fairness.checkpoint()

    async def put_batch(self, records: list[dict[str, Any]]) -> None:
        """Store multiple records, all or none."""
        self._add(await self._canonical_rows(check_records(records)))
        await self._fairness.checkpoint()

    async def _canonical_rows(self, records: list[Any]) -> list[dict[str, Any]]:
        rows = []
        for number, record in enumerate(records):
            rows.append(self._canonical(record))
            if number % _ROWS_PER_TURN == _ROWS_PER_TURN - 1:
                await asyncio.sleep(0)
        return rows

    async def put_arrow(self, data: pa.Table | pa.RecordBatch) -> None:
        """Store the rows of an Arrow table or batch."""
        self._add(await in_thread(_rows_of, data))

    async def put_once(
        self, rows: list[dict[str, Any]] | pa.Table, writer: str, number: int
    ) -> None:
        """Store rows unless the writer has stored this number, or a later one, before."""
        check_writer(writer)
        number = check_number(number)
        async with self._producer_locks.of(writer):
            if number > self.last_number(writer):
                if isinstance(rows, list):
                    self._add(await self._canonical_rows(list(rows)))
                else:
                    self._add(await in_thread(_rows_of, rows))
                self._last_numbers[writer] = number

    def last_number(self, writer: str) -> int:
        """Return the last number that :meth:`put_once` stored for a writer, -1 if none."""
        return self._last_numbers.get(writer, -1)

    async def offset_at(self, timestamp: int) -> int:
        """Return the first offset whose record arrived at ``timestamp`` (µs of Unix time) or
        later."""
        return bisect_left(self._arrivals, timestamp)

    async def wait_beyond(self, offset: int) -> None:
        """Wait until there are records beyond ``offset``; raise once the backend is closed."""
        while len(self._records) <= offset:
            self._check_open()
            with next_wake(self._waiters) as waiter:
                if len(self._records) <= offset and not self._closed:
                    await waiter

    async def get(self, offset: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """Retrieve records in order."""
        check_window(offset, limit)
        self._check_open()
        await self._fairness.checkpoint()
        stop = None if limit is None else offset + limit
        rows = self._records[offset:stop]
        for start in range(0, len(rows), _ROWS_PER_TURN):
            if start:
                await asyncio.sleep(0)
            part = rows[start : start + _ROWS_PER_TURN]
            rows[start : start + len(part)] = [_copied(record) for record in part]
        return rows

    async def get_arrow(self, offset: int = 0, limit: int | None = None) -> pa.Table:
        """Retrieve records as an Arrow table."""
        rows = await self.get(offset, limit)
        prepared = await in_thread(prepare, RecordEncoder(EMPTY, Rules(evolving=True)), rows)
        batches = [chunk.batch for chunk in prepared.chunks]
        return pa.Table.from_batches(batches, schema=prepared.encoder.schema)

    async def get_stream(
        self, offset: int = 0, limit: int | None = None, block: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream single records; with ``block`` wait for new ones when caught up."""
        check_window(offset, limit)
        self._check_open()
        end = None if limit is None else offset + limit
        while end is None or offset < end:
            stop = offset + self._page_rows if end is None else min(end, offset + self._page_rows)
            page = [_copied(record) for record in self._records[offset:stop]]
            if page:
                await self._fairness.checkpoint(len(page))
                for record in page:
                    yield record
                offset += len(page)
            elif self._closed or not block:
                return
            else:
                with next_wake(self._waiters) as waiter:
                    if offset >= len(self._records) and not self._closed:
                        await waiter

    async def flush(self) -> None:
        """Nothing to persist."""
        self._check_open()

    async def stats(self) -> dict[str, Any]:
        """Get storage statistics."""
        count = len(self._records)
        return {
            "bucket_id": self._bucket_id,
            "backend": type(self).__name__,
            "total_count": count,
            "buffer_count": count,
            "persisted_count": 0,
            "start_offset": 0,
            "end_offset": count,
            "storage_path": self._storage_path,
        }

    def total_count(self) -> int:
        """Get total record count."""
        return len(self._records)

    async def close(self) -> None:
        """End all streams that wait for records; may be called twice."""
        self._closed = True
        self._waiters.wake()

    def _canonical(self, record: Any) -> dict[str, Any]:
        if not isinstance(record, dict):
            raise SchemaError(f"a record is a dict of fields, got a {type(record).__name__}")
        names = tuple(record)
        if names not in self._shapes:
            for name in names:
                check_name(name)
            if len(self._shapes) < _MAX_SHAPES:
                self._shapes.add(names)
        if all(map(_is_canonical, record.values())):
            return dict(record)
        return {n: self._values.describe(v, n, top=True)[0] for n, v in record.items()}

    def _add(self, rows: list[dict[str, Any]]) -> None:
        self._check_open()
        self._records += rows
        arrival = max(time.time_ns() // 1000, self._arrivals[-1] if self._arrivals else 0)
        self._arrivals += [arrival] * len(rows)
        self._waiters.wake()

    def _check_open(self) -> None:
        if self._closed:
            raise BucketClosed("the backend is closed; open a new one")


def _is_canonical(value: Any) -> bool:
    """Whether a value needs no conversion; a quick check that most values pass."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii())
    if kind is int:
        return _MIN_INT <= value <= _MAX_INT
    return kind in _ALWAYS_CANONICAL


def _copied(value: Any) -> Any:
    """Copy a canonical value, so that no reader can change what is stored."""
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    if type(value) is list:
        return [_copied(item) for item in value]
    return value


def _rows_of(data: Any) -> list[dict[str, Any]]:
    batches = arrow.accept(data, EMPTY).to_batches(max_chunksize=_ROWS_PER_TURN)
    return [row for batch in batches for row in batch.to_pylist()]
