"""Put records that need checking or conversion, and wait for room in the buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from persisting.backends.fairness import FairYield, KeyedLocks
from persisting.bucket.bucket import Bucket
from persisting.bucket.chunk import ROWS_AT_ONCE, Prepared, prepare, prepare_arrow, prepare_columns
from persisting.bucket.producer_sequences import ProducerSequence, check_number, check_writer
from persisting.bucket.put_cost import check_records, is_light
from persisting.bucket.vector_fields import check_vectors
from persisting.concurrency.loop_bridge import LoopWaiter
from persisting.concurrency.pool import in_thread
from persisting.errors import SchemaError
from persisting.records import RecordEncoder
from persisting.records.record_columns import RecordColumns

_FROZEN_PAUSE = 0.005
_LIGHT_BYTES = 256 * 1024
"""Columns that become records of another schema in about a millisecond."""

Prepare = Callable[[RecordEncoder], Prepared]
"""Checks and converts the records of one put against a schema."""

Targets = Sequence[tuple[Bucket, int]]
"""Buckets of one log, and how many of the rows, which are sorted by bucket, belong to each."""


class BucketWriter:
    """Brings prepared records into a bucket. Leaves it consistent wherever a task is cancelled."""

    def __init__(self, bucket: Bucket, fairness: FairYield) -> None:
        self._bucket, self._fairness = bucket, fairness
        self._producer_locks = KeyedLocks()

    async def store(self, prepare: Prepare, *, small: bool) -> None:
        """Put records and wait until they are acknowledged; convert on the loop if ``small``."""
        acknowledged = await self._accept(prepare, small=small)
        if acknowledged is not None:
            await acknowledged

    async def store_once(
        self, rows: list[dict[str, Any]] | pa.Table | RecordColumns, writer: str, number: int
    ) -> None:
        """Put rows unless the producer has stored this number, or a later one, before."""
        check_writer(writer)
        producer = writer, check_number(number)
        # Hold the lock only until the put has its place in the log, so that the producer's next
        # put can share its sync.
        async with self._producer_locks.of(writer):
            if self._bucket.puts.is_full:
                await self.make_room()
            acknowledged = self._enqueue_single(rows, producer)
            if acknowledged is None:
                convert, small = conversion(rows)
                acknowledged = await self._accept(convert, small=small, producer=producer)
        if acknowledged is not None:
            await acknowledged

    def _enqueue_single(
        self, rows: list[dict[str, Any]] | pa.Table | RecordColumns, producer: ProducerSequence
    ) -> asyncio.Future[None] | None:
        """Queue a put of a single plain record; None if it is another put, or its number is not
        new."""
        group_commit = self._bucket.puts.group_commit
        if not isinstance(rows, list) or len(rows) != 1 or group_commit is None:
            return None
        waiter = group_commit.enqueue_row(self._bucket, rows[0], LoopWaiter, producer)
        return None if waiter is None else waiter.future

    async def _accept(
        self, prepare: Prepare, *, small: bool, producer: ProducerSequence | None = None
    ) -> asyncio.Future[None] | None:
        """Prepare records until the schema they were checked against is still the current one.

        Return the future of the log's acknowledgement, None if there is nothing to wait for.
        """
        bucket = self._bucket
        while True:
            prepared = await prepared_for([bucket], prepare, small=small)
            if prepared is None:
                continue
            if not prepared.chunks:
                return None
            if bucket.puts.group_commit is None:
                if bucket.puts.add_prepared(prepared, producer):
                    await self._fairness.checkpoint()
                    return None
            else:
                queued = await enqueued([(bucket, prepared.rows)], prepared, producer)
                if queued is not False:
                    return None if queued is True else queued

    async def make_room(self) -> None:
        """Wait until the bucket takes records again: for a flush, or the end of a restore."""
        await make_room(self._bucket)


def conversion(rows: list[dict[str, Any]] | pa.Table | RecordColumns) -> tuple[Prepare, bool]:
    """Return how to prepare these rows, and whether that is quick enough for an event loop."""
    if isinstance(rows, list):
        records = check_records(rows)
        return (lambda encoder: prepare(encoder, records)), is_light(records)
    if isinstance(rows, RecordColumns):
        small = len(rows) <= ROWS_AT_ONCE and rows.nbytes <= _LIGHT_BYTES
        return (lambda encoder: prepare_columns(encoder, rows)), small
    return (lambda encoder: prepare_arrow(encoder, rows)), False


async def prepared_for(
    buckets: Sequence[Bucket], prepare: Prepare, *, small: bool
) -> Prepared | None:
    """Check and convert records for buckets of one schema; None if that has to be repeated."""
    for bucket in buckets:
        bucket.lifecycle.check_writable()
        if bucket.puts.frozen:
            await make_room(bucket)
    state = buckets[0].schema_state
    encoder = state.encoder
    try:
        prepared = prepare(encoder) if small else await in_thread(prepare, encoder)
    except pa.ArrowException as exc:
        raise SchemaError(f"the records cannot be converted: {exc}") from exc
    if prepared.widened:
        for bucket in buckets:
            await in_thread(bucket.large_ints.scan, prepared.widened, bucket.snapshot)
    if prepared.loosened:
        for bucket in buckets:
            await in_thread(check_vectors, bucket, prepared)
    if prepared.chunks and state.must_propose(prepared):
        if not await in_thread(state.propose, prepared):
            return None
    return prepared


async def enqueued(
    targets: Targets, prepared: Prepared, producer: ProducerSequence | None
) -> asyncio.Future[None] | bool:
    """Queue records for the log of these buckets.

    Return the future of the acknowledgement, True if the producer's number is stored in all of
    them, False if the records must be prepared again.
    """
    group_commit = targets[0][0].puts.group_commit
    assert group_commit is not None
    waiter = LoopWaiter()
    put = group_commit.enqueue(prepared, targets, waiter, producer)
    if isinstance(put, bool):
        return put
    group_commit.start(waiter.sink)
    if put.waiter is waiter:
        return waiter.future
    # A put of the same number is under way: wait for its outcome. Its future belongs to another
    # caller, who may be cancelled.
    await asyncio.wrap_future(group_commit.drain())
    return False


async def make_room(bucket: Bucket) -> None:
    """Wait until a bucket takes records again: for a flush, or the end of a restore."""
    bucket.lifecycle.check_writable()
    while bucket.puts.is_full:
        if bucket.puts.frozen:
            await asyncio.sleep(_FROZEN_PAUSE)
        else:
            flushes = [asyncio.wrap_future(future) for future in bucket.puts.make_room()]
            await asyncio.gather(*flushes)
