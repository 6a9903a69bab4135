"""Numbered puts that are stored once, and arrival times of records."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from support.buckets import Bucket, read_all

from persisting.queue import InvalidArgument


async def test_put_once_stores_a_number_once(bucket: Bucket) -> None:
    backend = bucket.open()
    for number in (0, 0, 7, 3, 2**63 - 1):
        await backend.put_once([{"n": number}], "writer", number)
    backend = await bucket.reopen(backend)
    assert [one["n"] for one in await backend.get()] == [0, 7, 2**63 - 1]
    assert backend.last_number("writer") == 2**63 - 1


async def test_put_once_accepts_numpy_integers(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put_once([{"n": 1}], "writer", np.int64(3))
    await backend.put_once([{"n": 2}], "writer", 3)
    backend = await bucket.reopen(backend)
    assert await backend.get() == [{"n": 1}]
    assert backend.last_number("writer") == 3


async def test_concurrent_numbered_puts_are_stored_in_call_order(
    bucket: Bucket,
) -> None:
    backend = bucket.open()
    large = [{"n": n} for n in range(5000)]
    await asyncio.gather(
        backend.put_once(large, "writer", 1),
        backend.put_once([{"n": -1}], "writer", 2),
        backend.put_once(large, "writer", 1),
    )
    assert [one["n"] for one in await backend.get()] == [*range(5000), -1]


async def test_retry_of_a_cancelled_numbered_put_is_stored_once(bucket: Bucket) -> None:
    backend = bucket.open()
    rows = [{"n": n} for n in range(3000)]
    for number in range(30):
        put = asyncio.ensure_future(backend.put_once(rows, "writer", number))
        for _ in range(number):
            await asyncio.sleep(0)
        put.cancel()
        await asyncio.wait([put])
        await backend.put_once(rows, "writer", number)
    assert backend.total_count() == 30 * len(rows)


@pytest.mark.parametrize("number", [-1, 1.5, True, "1", None, 2**63, np.float64(2)])
async def test_put_once_refuses_an_invalid_number_and_quotes_it(
    bucket: Bucket, number: Any
) -> None:
    backend = bucket.open()
    with pytest.raises(InvalidArgument, match="number must be a whole number from 0"):
        await backend.put_once([{"n": 1}], "writer", number)
    await backend.put({"n": 2})
    backend = await bucket.reopen(backend)
    assert await backend.get() == [{"n": 2}]


@pytest.mark.parametrize("writer", ["", None, 7, "\ud800"])
async def test_put_once_refuses_an_invalid_writer(bucket: Bucket, writer: Any) -> None:
    backend = bucket.open()
    with pytest.raises(InvalidArgument, match="writer_id"):
        await backend.put_once([{"n": 1}], writer, 1)
    assert await read_all(backend) == []


async def test_offset_at_follows_the_time_of_the_put(bucket: Bucket) -> None:
    backend = bucket.open(flush_interval=None) if bucket.kind.persistent else bucket.open()
    between = []
    for n in range(4):
        await backend.put({"n": n})
        between.append(time.time_ns() // 1000 + 1)
        while time.time_ns() // 1000 < between[-1]:
            pass
    assert [await backend.offset_at(timestamp) for timestamp in [0, *between]] == [0, 1, 2, 3, 4]
    backend = await bucket.reopen(backend)
    assert [await backend.offset_at(timestamp) for timestamp in [0, *between]] == [0, 1, 2, 3, 4]


async def test_stream_started_after_a_restore_reads_the_restored_records(stored: Bucket) -> None:
    owner = stored.open()
    await owner.put({"n": 0})
    await owner.flush()
    await owner.tag("one")
    await owner.put({"n": 1})
    await owner.flush()
    reader = stored.open(read_only=True)
    assert len(await reader.get()) == 2
    await owner.restore("one")
    reader.bucket.expire_view()
    assert await read_all(reader) == [{"n": 0}]
