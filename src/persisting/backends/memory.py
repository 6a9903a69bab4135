"""MemoryBackend: the protocol in its plainest form, and the model the others are tested against."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persisting.bucket.chunk import prepare
from persisting.bucket.fairness import Queues, Turns
from persisting.bucket.producer_sequences import check_number, check_writer
from persisting.bucket.put_cost import check_records
from persisting.bucket.waiters import Waiters
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, SchemaError
from persisting.options import check_window
from persisting.records import RecordEncoder, Rules, arrow
from persisting.records.encoder import EMPTY
from persisting.records.field_names import check_name
from persisting.records.values import Values

if TYPE_CHECKING:
    from typing_extensions import Self

_ROWS_PER_TURN = 1000
_MOST_SHAPES = 1024
_LEAST_INT, _GREATEST_INT = -(2**63), 2**63 - 1
_ALWAYS = frozenset({float, bool, type(None)})


class MemoryBackend:
    """In-memory storage: fast, unbounded, gone with the process.

    It takes every record that the other backends could store, each with a schema of its own, and
    returns it in the same canonical form.
    """

    def __init__(
        self, bucket_id: int = 0, storage_path: str = "", batch_size: int = 100, **kwargs: Any
    ) -> None:
        self._bucket_id, self._storage_path = bucket_id, str(storage_path)
        self._records: list[dict[str, Any]] = []
        self._arrivals: list[int] = []
        self._last_numbers: dict[str, int] = {}
        self._shapes: set[tuple[str, ...]] = set()
        self._values = Values(evolving=True, vector=pa.float64())
        self._waiters = Waiters()
        self._turns, self._writers = Turns(), Queues()
        self._closed = False

    async def put(self, record: dict[str, Any]) -> None:
        """Store a single record."""
        self._add([self._canonical(record)])
        await self._turns.take()

    async def put_batch(self, records: list[dict[str, Any]]) -> None:
        """Store multiple records, all or none."""
        self._add(await self._taken(check_records(records)))
        await self._turns.take()

    async def _taken(self, records: list[Any]) -> list[dict[str, Any]]:
        taken = []
        for number, record in enumerate(records):
            taken.append(self._canonical(record))
            if number % _ROWS_PER_TURN == _ROWS_PER_TURN - 1:
                await asyncio.sleep(0)
        return taken

    async def put_arrow(self, data: pa.Table | pa.RecordBatch) -> None:
        """Store the rows of an Arrow table or batch."""
        self._add(await in_thread(_rows_of, data))

    async def put_once(
        self, rows: list[dict[str, Any]] | pa.Table, writer: str, number: int
    ) -> None:
        """Store rows unless the writer has stored this number, or a later one, before."""
        check_writer(writer)
        number = check_number(number)
        async with self._writers.of(writer):
            if number > self.last_number(writer):
                listed = isinstance(rows, list)
                taken = self._taken(list(rows)) if listed else in_thread(_rows_of, rows)
                self._add(await taken)
                self._last_numbers[writer] = number

    def last_number(self, writer: str) -> int:
        """The last number that :meth:`put_once` stored for a writer, -1 if none is known."""
        return self._last_numbers.get(writer, -1)

    async def offset_at(self, timestamp: int) -> int:
        """The first offset whose record arrived at ``timestamp`` (µs of Unix time) or later."""
        return bisect_left(self._arrivals, timestamp)

    async def wait_beyond(self, offset: int) -> None:
        """Return when there are records beyond ``offset``; raises once closed."""
        while len(self._records) <= offset:
            self._check_open()
            with self._waiters.waiting() as waiter:
                if len(self._records) <= offset and not self._closed:
                    await waiter

    async def get(self, offset: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """Retrieve records in order."""
        check_window(offset, limit)
        self._check_open()
        await self._turns.take()
        stop = None if limit is None else offset + limit
        found = self._records[offset:stop]
        for start in range(0, len(found), _ROWS_PER_TURN):
            if start:
                await asyncio.sleep(0)
            part = found[start : start + _ROWS_PER_TURN]
            found[start : start + len(part)] = [_copied(record) for record in part]
        return found

    async def get_arrow(self, offset: int = 0, limit: int | None = None) -> pa.Table:
        """Retrieve records as an Arrow table."""
        rows = await self.get(offset, limit)
        found = await in_thread(prepare, RecordEncoder(EMPTY, Rules(evolving=True)), rows)
        batches = [chunk.batch for chunk in found.chunks]
        return pa.Table.from_batches(batches, schema=found.shaper.schema)

    async def get_stream(
        self, offset: int = 0, limit: int | None = None, block: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream single records; with ``block`` wait for new ones when caught up."""
        check_window(offset, limit)
        self._check_open()
        end = None if limit is None else offset + limit
        while end is None or offset < end:
            if offset < len(self._records):
                offset += 1
                await self._turns.take()
                yield _copied(self._records[offset - 1])
            elif self._closed or not block:
                return
            else:
                with self._waiters.waiting() as waiter:
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
        """End every waiting stream; may be called twice."""
        self._closed = True
        self._waiters.wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _canonical(self, record: Any) -> dict[str, Any]:
        if not isinstance(record, dict):
            raise SchemaError(f"a record is a dict of fields, got a {type(record).__name__}")
        names = tuple(record)
        if names not in self._shapes:
            for name in names:
                check_name(name)
            if len(self._shapes) < _MOST_SHAPES:
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
    """Whether a value is certainly stored as it is; most are, and need no closer look."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii())
    if kind is int:
        return _LEAST_INT <= value <= _GREATEST_INT
    return kind in _ALWAYS


def _copied(value: Any) -> Any:
    """A copy of a canonical value, so that no reader can change what is stored."""
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    if type(value) is list:
        return [_copied(item) for item in value]
    return value


def _rows_of(data: Any) -> list[dict[str, Any]]:
    batches = arrow.accept(data, EMPTY).to_batches(max_chunksize=_ROWS_PER_TURN)
    return [row for batch in batches for row in batch.to_pylist()]
