"""Put records into several buckets of one log: one conversion, one entry, all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from persisting.backends.bucket_writer import conversion, enqueued, make_room, prepared_for
from persisting.bucket.bucket import Bucket
from persisting.bucket.delays import is_delay
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.records.record_columns import RecordColumns

Part: TypeAlias = "tuple[Bucket, list[dict[str, Any]] | pa.Table | RecordColumns]"
"""Rows for one bucket."""


def share_log(buckets: Sequence[Bucket]) -> bool:
    """Whether these buckets write to one log, so that one entry can hold records of all."""
    first = buckets[0].group_commit
    return first is not None and all(bucket.group_commit is first for bucket in buckets)


async def put_to_log(parts: Sequence[Part], producer: ProducerSequence | None = None) -> None:
    """Store rows in buckets that share a log; return when they are acknowledged.

    After a crash all of them are there, or none. If the put is numbered, buckets that have already
    stored the number store nothing.
    """
    acknowledged = await queue_for_log(parts, producer)
    if acknowledged is not None:
        # A retry may wait for the same put: cancelling one must not cancel the other.
        await (acknowledged if producer is None else asyncio.shield(acknowledged))


async def queue_for_log(
    parts: Sequence[Part], producer: ProducerSequence | None
) -> asyncio.Future[None] | None:
    """Give a put its place in the log; return the future of its acknowledgement, None if there is
    nothing to wait for."""
    while True:
        left = [
            (bucket, rows)
            for bucket, rows in parts
            if producer is None or not bucket.puts.producers.has(producer)
        ]
        if not left:
            return None
        buckets = [bucket for bucket, _ in left]
        for bucket in buckets:
            if is_delay(producer):
                bucket.delays.check_room()
            if bucket.puts.is_full:
                await make_room(bucket)
        convert, small = conversion(_joined([rows for _, rows in left]))
        prepared = await prepared_for(buckets, convert, small=small)
        if prepared is None:
            continue
        if not prepared.chunks:
            return None
        targets = [(bucket, len(rows)) for bucket, rows in left]
        queued = await enqueued(targets, prepared, producer)
        if queued is True:
            return None
        if queued is not False:
            return queued


def _joined(parts: list[Any]) -> list[dict[str, Any]] | pa.Table | RecordColumns:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], list):
        return [record for rows in parts for record in rows]
    if isinstance(parts[0], RecordColumns):
        return RecordColumns.joined(parts)
    return pa.concat_tables(parts)
