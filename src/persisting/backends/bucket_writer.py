"""Put records that need checking or conversion, and wait for room in the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from persisting.bucket.bucket import Bucket
from persisting.bucket.chunk import Prepared, prepare, prepare_arrow
from persisting.bucket.fairness import FairYield, KeyedLocks
from persisting.bucket.producer_sequences import ProducerSequence, check_number, check_writer
from persisting.bucket.put_cost import check_records, is_light
from persisting.concurrency.loop_bridge import mailbox
from persisting.concurrency.pool import in_thread
from persisting.errors import SchemaError
from persisting.records import RecordEncoder

_FROZEN_PAUSE = 0.005

Prepare = Callable[[RecordEncoder], Prepared]
"""Checks and converts the records of one put against a schema."""


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
        self, rows: list[dict[str, Any]] | pa.Table, writer: str, number: int
    ) -> None:
        """Put rows unless the producer has stored this number, or a later one, before."""
        check_writer(writer)
        producer = writer, check_number(number)
        records = check_records(rows) if isinstance(rows, list) else []
        # Hold the lock only until the put has its place in the log, so that the producer's next
        # put can share its sync.
        async with self._producer_locks.of(writer):
            if self._bucket.is_full:
                await self.make_room()
            if isinstance(rows, list):
                acknowledged = await self._accept(
                    lambda encoder: prepare(encoder, records),
                    small=is_light(records),
                    producer=producer,
                )
            else:
                acknowledged = await self._accept(
                    lambda encoder: prepare_arrow(encoder, rows), small=False, producer=producer
                )
        if acknowledged is not None:
            # A retry may wait for the same put: cancelling one must not cancel the other.
            await asyncio.shield(acknowledged)

    async def _accept(
        self, prepare: Prepare, *, small: bool, producer: ProducerSequence | None = None
    ) -> asyncio.Future[None] | None:
        """Prepare records until the schema they were checked against is still the current one.

        Return the future of the log's acknowledgement, None if there is nothing to wait for.
        """
        bucket = self._bucket
        while True:
            bucket.check_writable()
            if bucket.frozen:
                await self.make_room()
            encoder = bucket.encoder
            try:
                prepared = prepare(encoder) if small else await in_thread(prepare, encoder)
            except pa.ArrowException as exc:
                raise SchemaError(f"the records cannot be converted: {exc}") from exc
            if not prepared.chunks:
                return None
            if prepared.widened:
                await in_thread(bucket.scan_large_ints, prepared.widened)
            if bucket.must_propose_schema(prepared) and not await in_thread(
                bucket.propose_schema, prepared
            ):
                continue
            if bucket.group_commit is None:
                if bucket.add_prepared(prepared, producer):
                    await self._fairness.checkpoint()
                    return None
            else:
                pending = bucket.enqueue_prepared(prepared, producer)
                if pending is not None and pending.box is not mailbox():
                    # Another loop has queued the same producer sequence: wait for its outcome.
                    await asyncio.wrap_future(bucket.group_commit.drain())
                elif pending is not None:
                    return pending.future

    async def make_room(self) -> None:
        """Wait until the bucket takes records again: for a flush, or the end of a restore."""
        self._bucket.check_writable()
        while self._bucket.is_full:
            if self._bucket.frozen:
                await asyncio.sleep(_FROZEN_PAUSE)
            else:
                await asyncio.wrap_future(self._bucket.request_flush())
