"""Writing to a topic."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persisting.bucket.producer_sequences import ANONYMOUS, check_number, check_writer
from persisting.errors import BucketClosed, InvalidArgument
from persisting.topic.bucket_client import ProducerSequence, Rows, Topic
from persisting.topic.routing import by_bucket, route, table_by_bucket
from persisting.topic.stats import summed
from persisting.topic.topic_table import TopicTable

if TYPE_CHECKING:
    from typing_extensions import Self

    from persisting.topic.synchronous import SyncQueue

_ROUTED_PER_TURN = 2000


def check_writer_id(name: Any) -> None:
    """Raise if it cannot be the name of a writer that outlives its connection."""
    if name is not None:
        check_writer(name)
        if name.startswith(ANONYMOUS):
            raise InvalidArgument(f"writer_id must not begin with {ANONYMOUS!r}, got {name!r}")


class QueueWriter(TopicTable):
    """Puts records into the buckets of a topic.

    A put returns when every record is acknowledged by its bucket, with what that means for the
    backend's settings. Within a bucket the order of puts is kept. A list goes to each of its
    buckets as one unit; the buckets are independent of each other.
    """

    def __init__(self, topic: Topic, *, writer_id: str | None = None) -> None:
        self._topic = topic
        check_writer_id(writer_id)
        self._writer_id = writer_id or uuid.uuid4().hex
        self._numbering = asyncio.Lock()
        self._in_order: dict[int, asyncio.Lock] = {}
        self._touched: set[int] = set()
        self._closed = False
        self._all = list(range(topic.num_buckets))
        self._loop = asyncio.get_running_loop()

    @property
    def topic(self) -> str:
        return self._topic.name

    @property
    def writer_id(self) -> str:
        """Under this name puts are remembered, so that a retry is stored once."""
        return self._writer_id

    def bucket_of(self, record: dict[str, Any]) -> int:
        """The bucket that a record goes to."""
        return route(record, self._topic.bucket_column, self._topic.num_buckets)

    def divided(self, data: pa.Table) -> dict[int, pa.Table]:
        """The rows of an Arrow table by the buckets that they go to. Blocks."""
        return table_by_bucket(data, self._topic.bucket_column, self._topic.num_buckets)

    async def put(
        self, record: dict[str, Any] | list[dict[str, Any]], *, sequence: int | None = None
    ) -> None:
        """Store a record or a list of records.

        With ``sequence``, a whole number that rises from put to put, a put that is repeated after
        an error or a restart (with the same ``writer_id``) is stored once.
        """
        self._check_open()
        if isinstance(record, list):
            await self.put_batch(record, sequence=sequence)
        elif sequence is None:
            await self._put(self.bucket_of(record), [record])
        else:
            await self._put_all(lambda: self._grouped([record]), sequence)

    async def put_batch(
        self, records: list[dict[str, Any]], *, sequence: int | None = None
    ) -> None:
        """Store a list of records."""
        self._check_open()
        if not isinstance(records, (list, tuple)):
            raise InvalidArgument(
                f"put_batch takes a list of records, got a {type(records).__name__}"
            )
        await self._put_all(lambda: self._grouped(records), sequence)

    async def put_arrow(
        self, data: pa.Table | pa.RecordBatch, *, sequence: int | None = None
    ) -> None:
        """Store the rows of an Arrow table or batch."""
        self._check_open()
        if isinstance(data, pa.RecordBatch):
            data = pa.Table.from_batches([data])
        if not isinstance(data, pa.Table):
            raise InvalidArgument(
                f"put_arrow takes a pyarrow Table or RecordBatch, got {type(data).__name__}"
            )
        await self._put_all(lambda: asyncio.to_thread(self.divided, data), sequence)

    async def _grouped(self, records: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
        groups: dict[int, list[dict[str, Any]]] = {}
        for start in range(0, len(records), _ROUTED_PER_TURN):
            part = records[start : start + _ROUTED_PER_TURN]
            for bucket, rows in by_bucket(
                part, self._topic.bucket_column, self._topic.num_buckets
            ).items():
                groups.setdefault(bucket, []).extend(rows)
            if len(records) > _ROUTED_PER_TURN:
                await asyncio.sleep(0)
        return groups

    async def _put_all(
        self, divide: Callable[[], Awaitable[dict[int, Any]]], sequence: int | None
    ) -> None:
        if sequence is None:
            groups = await divide()
            puts = [asyncio.ensure_future(self._put(*one)) for one in groups.items()]
        else:
            mark = self._writer_id, check_number(sequence, "sequence")
            # In the order of the calls: a later number would make an earlier one look stored.
            async with self._numbering:
                groups = await divide()
                puts = [asyncio.ensure_future(self._put(*one, mark)) for one in groups.items()]
        results = await asyncio.gather(*puts, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _put(self, bucket: int, rows: Rows, mark: ProducerSequence | None = None) -> None:
        port = self._topic.port(bucket)
        if mark is not None:
            async with self._in_order.setdefault(bucket, asyncio.Lock()):
                await port.put(rows, mark)
        else:
            await port.put(rows)
        self._touched.add(bucket)

    async def last_sequence(self) -> int:
        """The highest sequence of this ``writer_id`` that any bucket has stored, -1 for none."""
        return max((await self.last_sequences()).values())

    async def last_sequences(self) -> dict[int, int]:
        """By bucket, the highest sequence of this ``writer_id`` that is stored, -1 for none."""
        self._check_open()
        numbers = await asyncio.gather(
            *(self._topic.port(bucket).last_number(self._writer_id) for bucket in self._all)
        )
        return dict(zip(self._all, numbers, strict=True))

    async def flush(self) -> None:
        """Bring everything put so far into the tables of all buckets."""
        self._check_open()
        await asyncio.gather(*(self._topic.port(b).flush() for b in range(self._topic.num_buckets)))

    async def stats(self) -> dict[str, Any]:
        """Counts summed over the buckets, and each bucket's own in ``buckets``."""
        self._check_open()
        buckets = await asyncio.gather(
            *(self._topic.port(b).stats() for b in range(self._topic.num_buckets))
        )
        return {
            "topic": self._topic.name,
            "num_buckets": self._topic.num_buckets,
            **summed(buckets),
            "buckets": list(buckets),
        }

    def sync(self) -> SyncQueue:
        """The same writer for code without an event loop: every method blocks."""
        from persisting.topic.synchronous import SyncQueue

        return SyncQueue(self, self._loop)

    async def close(self) -> None:
        """Flush what was put and let go of the topic; the last handle closes its buckets.

        If the flush fails the error is raised and the writer stays open.
        """
        if not self._closed:
            self._closed = True
            try:
                await asyncio.gather(*(self._topic.port(b).flush() for b in self._touched))
                await self._topic.close()
            except BaseException:
                self._closed = False
                raise

    def _check_open(self) -> None:
        if self._closed:
            raise BucketClosed(f"the writer of topic {self._topic.name!r} is closed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
