"""Writing to a topic."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persisting.bucket.delayed_puts import DelayedPutNames
from persisting.bucket.producer_sequences import ANONYMOUS, GENERATED, check_number, check_writer
from persisting.errors import InvalidArgument, OwnershipLost, StorageError
from persisting.topic.bucket_client import ProducerSequence, Rows, Topic
from persisting.topic.routing import by_bucket, route, table_by_bucket
from persisting.topic.stats import summed
from persisting.topic.topic_table import TopicTable

if TYPE_CHECKING:
    from persisting.topic.synchronous import SyncQueue

_ROWS_PER_TURN = 2000
_MOST_DELAY = 366 * 24 * 3600.0


def check_writer_id(name: Any) -> None:
    """Raise if ``name`` cannot be the id of a writer, which outlives its connection."""
    if name is not None:
        check_writer(name)
        if name.startswith(ANONYMOUS) and not name.startswith(GENERATED):
            raise InvalidArgument(f"writer_id must not start with {ANONYMOUS!r}, got {name!r}")


class QueueWriter(TopicTable):
    """Puts records into the buckets of a topic.

    A put returns when every record is acknowledged by its bucket; whether it is durable then
    depends on the backend's settings. Within a bucket the order of puts is kept. Of a list, each
    bucket stores its part as one unit.
    """

    def __init__(self, topic: Topic, *, writer_id: str | None = None) -> None:
        super().__init__(topic, list(range(topic.num_buckets)), "writer")
        check_writer_id(writer_id)
        # Both are fixed when a topic is created; every put needs them.
        self._routing = topic.bucket_column, topic.num_buckets
        self._writer_id = writer_id or uuid.uuid4().hex
        self._numbering = asyncio.Lock()
        self._numbered_puts: dict[int, asyncio.Task[None]] = {}
        """By bucket: the last numbered put to it. The next one waits for it."""
        self._delayed = DelayedPutNames()
        self._touched: set[int] = set()

    @property
    def writer_id(self) -> str:
        """The name under which sequences are stored, so that a retried put is stored once."""
        return self._writer_id

    @property
    def bucket_column(self) -> str:
        """The field that decides the bucket of a record."""
        return self._routing[0]

    def bucket_of(self, record: dict[str, Any]) -> int:
        """Return the bucket that a record goes to."""
        return route(record, *self._routing)

    def divided(self, data: pa.Table) -> dict[int, pa.Table]:
        """Divide the rows of an Arrow table by the bucket that they go to. Blocking."""
        return table_by_bucket(data, *self._routing)

    async def put(
        self,
        record: dict[str, Any] | list[dict[str, Any]],
        *,
        sequence: int | None = None,
        delay: float | None = None,
    ) -> None:
        """Store a record or a list of records.

        ``sequence`` is a whole number that rises from put to put. A put that is retried with the
        same sequence after an error, or after a restart with the same ``writer_id``, is stored
        once. With ``delay``, work groups get the records that many seconds later at the earliest;
        the delay is stored beside the records, and other readers see them immediately.
        """
        self._buckets.check_open()
        if isinstance(record, list):
            await self.put_batch(record, sequence=sequence, delay=delay)
        elif delay is not None:
            await self._put_delayed([record], sequence, delay)
        elif sequence is None:
            bucket = self.bucket_of(record)
            acknowledged = self._topic.put_soon(bucket, record)
            if acknowledged is not None:
                await acknowledged
            else:
                await self._topic.bucket(bucket).put([record])
            self._touched.add(bucket)
        else:
            await self._put_all(lambda: self._grouped([record]), sequence)

    async def _put_delayed(
        self, records: list[dict[str, Any]], sequence: int | None, delay: float
    ) -> None:
        if sequence is not None:
            raise InvalidArgument("put takes either sequence or delay, not both")
        if isinstance(delay, bool) or not isinstance(delay, (int, float)):
            raise InvalidArgument(f"delay must be a number of seconds, got {delay!r}")
        if not 0 <= delay <= _MOST_DELAY:
            raise InvalidArgument(f"delay must be from 0 to {_MOST_DELAY:g} seconds, got {delay!r}")
        if self._topic.folder is None and self._buckets.store is None:
            raise InvalidArgument("put(delay=…) needs a topic on disk; this one is in memory")
        due = time.time_ns() // 1000 + round(delay * 1e6)
        parts: list[tuple[int, Rows]] = list((await self._grouped(records)).items())
        with self._delayed.put(due) as name:
            await self._put_parts(parts, name)

    def put_from_thread(
        self, record: Any, *, sequence: int | None = None, delay: float | None = None
    ) -> bool:
        """Store a plain record from a thread without an event loop, and wait for it.

        Returns False, without having stored anything, if only :meth:`put` can store it.
        """
        self._buckets.check_open()
        if sequence is not None or delay is not None or type(record) is not dict:
            return False
        bucket = self.bucket_of(record)
        stored = self._topic.put_from_thread(bucket, record)
        if stored:
            self._touched.add(bucket)
        return stored

    async def put_batch(
        self,
        records: list[dict[str, Any]],
        *,
        sequence: int | None = None,
        delay: float | None = None,
    ) -> None:
        """Store a list of records; see :meth:`put`."""
        self._buckets.check_open()
        if not isinstance(records, (list, tuple)):
            raise InvalidArgument(
                f"put_batch takes a list of records, got a {type(records).__name__}"
            )
        if delay is not None:
            await self._put_delayed(list(records), sequence, delay)
            return
        await self._put_all(lambda: self._grouped(records), sequence)

    async def put_arrow(
        self, data: pa.Table | pa.RecordBatch, *, sequence: int | None = None
    ) -> None:
        """Store the rows of an Arrow table or batch."""
        self._buckets.check_open()
        if isinstance(data, pa.RecordBatch):
            data = pa.Table.from_batches([data])
        if not isinstance(data, pa.Table):
            raise InvalidArgument(
                f"put_arrow takes a pyarrow Table or RecordBatch, got {type(data).__name__}"
            )
        await self._put_all(lambda: asyncio.to_thread(self.divided, data), sequence)

    async def _grouped(self, records: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
        if len(records) <= _ROWS_PER_TURN:
            return by_bucket(records, *self._routing)
        groups: dict[int, list[dict[str, Any]]] = {}
        for start in range(0, len(records), _ROWS_PER_TURN):
            part = records[start : start + _ROWS_PER_TURN]
            for bucket, rows in by_bucket(part, *self._routing).items():
                groups.setdefault(bucket, []).extend(rows)
            await asyncio.sleep(0)
        return groups

    async def _put_all(
        self, divide: Callable[[], Awaitable[dict[int, Any]]], sequence: int | None
    ) -> None:
        if sequence is None:
            await self._put_parts(list((await divide()).items()))
            return
        numbered = self._writer_id, check_number(sequence, "sequence")
        # In the order of the calls: once a later number is stored, an earlier one is ignored.
        async with self._numbering:
            groups = await divide()
            earlier = {self._numbered_puts[b] for b in groups if b in self._numbered_puts}
            put = asyncio.create_task(self._put_after(earlier, list(groups.items()), numbered))
            self._numbered_puts |= dict.fromkeys(groups, put)
        put.add_done_callback(_retrieve_failure)
        # A put that is cancelled continues: the next one must not overtake it.
        await asyncio.shield(put)

    async def _put_after(
        self,
        earlier: set[asyncio.Task[None]],
        parts: list[tuple[int, Rows]],
        sequence: ProducerSequence,
    ) -> None:
        """Put rows when earlier puts have ended."""
        if earlier:
            await asyncio.wait(earlier)
        await self._put_parts(parts, sequence)

    async def _put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> None:
        if parts:
            await self._topic.put_parts(parts, sequence)
            self._touched.update(bucket for bucket, _ in parts)

    async def last_sequence(self) -> int:
        """Return the highest sequence of this ``writer_id`` that any bucket has stored, or -1."""
        return max((await self.last_sequences()).values())

    async def last_sequences(self) -> dict[int, int]:
        """Return, by bucket, the highest stored sequence of this ``writer_id``, or -1."""
        self._buckets.check_open()
        buckets = self._buckets.numbers
        numbers = await asyncio.gather(
            *(self._topic.bucket(bucket).last_number(self._writer_id) for bucket in buckets)
        )
        return dict(zip(buckets, numbers, strict=True))

    async def flush(self) -> None:
        """Write everything put so far to the tables of all buckets."""
        self._buckets.check_open()
        await asyncio.gather(*(self._topic.bucket(b).flush() for b in self._buckets.numbers))

    async def stats(self) -> dict[str, Any]:
        """Return counts summed over the buckets, and each bucket's own in ``buckets``."""
        self._buckets.check_open()
        buckets = await asyncio.gather(
            *(self._topic.bucket(b).stats() for b in self._buckets.numbers)
        )
        return {
            "topic": self._topic.name,
            "num_buckets": self._topic.num_buckets,
            **summed(buckets),
            "buckets": list(buckets),
        }

    def sync(self) -> SyncQueue:
        """Return the same writer for code without an event loop: every method blocks."""
        from persisting.topic.synchronous import SyncQueue

        return SyncQueue(self, self._loop)

    async def close(self) -> None:
        """Flush what was put and release the topic; the last handle closes its buckets.

        If the flush fails, the error is raised and the writer stays open.
        """
        if not self._buckets.closed:
            self._buckets.closed = True
            try:
                await asyncio.gather(*(self._flush_if_owned(bucket) for bucket in self._touched))
                await self._topic.close()
            except BaseException:
                self._buckets.closed = False
                raise

    async def _flush_if_owned(self, bucket: int) -> None:
        try:
            await self._topic.bucket(bucket).flush()
        except OwnershipLost:
            pass  # what was acknowledged is in the log, for the next owner
        except StorageError:
            if self._topic.must_flush(bucket):
                raise


def _retrieve_failure(put: asyncio.Task[None]) -> None:
    """Keep asyncio from reporting the failure of a put whose caller was cancelled."""
    if not put.cancelled():
        put.exception()
