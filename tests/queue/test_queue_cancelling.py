"""Readers of this process that are cancelled, closed or shared while they wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.topic_places import WAL, Place, ids, numbered, streamed
from support.waiting import SECONDS

from persisting.errors import StorageError
from persisting.queue import write_queue


async def test_closing_a_reader_ends_its_waiting_calls(place: Place) -> None:
    await place.filled(10)
    for use in (lambda r: r.get(wait=True), lambda r: streamed(r, block=True)):
        reader = await place.read()
        await reader.get(limit=100)
        task = asyncio.ensure_future(use(reader))
        await asyncio.sleep(0.2)
        await asyncio.wait_for(reader.close(), SECONDS)
        await asyncio.wait([task], timeout=SECONDS)
        done = task.done()
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        assert done
        assert result == [] or isinstance(result, StorageError)


async def test_short_wait_returns_while_a_long_one_continues(place: Place, spawned: Any) -> None:
    writer = await place.filled(10)
    reader = await place.read()
    await reader.get(limit=100)
    long = spawned(reader.get(wait=True))
    await asyncio.sleep(0.05)
    assert await asyncio.wait_for(reader.get(wait=True, timeout=0.2), SECONDS) == []
    assert await asyncio.wait_for(reader.get(), SECONDS) == []
    await writer.put({"id": 10})
    assert ids(await asyncio.wait_for(long, SECONDS)) == [10]


async def test_stream_and_gets_of_one_reader_share_the_records(place: Place) -> None:
    writer = await place.filled(2000)
    await writer.flush()
    reader = await place.read()
    found: list[int] = []

    async def stream() -> None:
        async for record in reader.get_stream():
            found.append(record["id"])
            if len(found) % 50 == 0:
                await asyncio.sleep(0)

    async def gets() -> None:
        for _ in range(30):
            found.extend(ids(await reader.get(limit=7)))
            await asyncio.sleep(0)

    await asyncio.gather(stream(), gets())
    found += ids(await streamed(reader))
    assert set(found) == set(range(2000))
    assert len(found) == 2000


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.002, 0.004, 0.008])
async def test_upgrade_concurrent_with_the_first_puts_reaches_every_bucket(
    tmp_path: Path, delay: float
) -> None:
    old = await write_queue(topic="t", storage_path=str(tmp_path), backend="lance", num_buckets=8)
    putting = asyncio.ensure_future(old.put(numbered(100)))
    await asyncio.sleep(delay)
    new = await write_queue(
        topic="t", storage_path=str(tmp_path), backend="persisting", backend_options=WAL
    )
    await putting
    await new.put([{"id": number, "new": 1} for number in range(100, 200)])
    stats = await new.stats()
    await old.close()
    await new.close()
    assert [bucket.get("wal_enabled") for bucket in stats["buckets"]] == [True] * 8
    assert stats["total_count"] == 200


async def test_a_later_number_does_not_overtake_when_one_between_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = await write_queue(
        topic="t", storage_path=str(tmp_path), backend="persisting", backend_options=WAL
    )
    first_may_go = asyncio.Event()
    stored: list[int] = []
    put_parts = writer._topic.put_parts

    async def held(parts: Any, sequence: Any) -> None:
        if sequence[1] == 1:
            await first_may_go.wait()
        await put_parts(parts, sequence)
        stored.append(sequence[1])

    monkeypatch.setattr(writer._topic, "put_parts", held)
    puts = [asyncio.create_task(writer.put(numbered(20), sequence=n)) for n in (1, 2, 3)]
    await asyncio.sleep(0.01)
    puts[1].cancel()
    await asyncio.sleep(0.05)
    assert stored == []
    first_may_go.set()
    await asyncio.gather(*puts, return_exceptions=True)
    assert stored == [1, 2, 3]
    await writer.close()
