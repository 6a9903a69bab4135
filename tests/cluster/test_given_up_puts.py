"""Puts that their sender gave up: an owner never carries them out, however late they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from persisting.cluster import wire
from persisting.cluster.wire import Reply, Request
from persisting.local_socket.open_buckets import OpenBuckets
from persisting.local_socket.quick_puts import QuickPuts
from persisting.queue import QueueWriter, write_queue


async def opened(folder: Path) -> tuple[QueueWriter, OpenBuckets]:
    writer = await write_queue(
        topic="t", storage_path=str(folder), durable=True, num_buckets=1, local_socket=False
    )
    await writer.put({"id": 0})
    topic: Any = writer._topic
    return writer, OpenBuckets(topic._topic)


def put(number: int) -> Request:
    pieces, is_arrow = wire.pack_parts([{"id": number}])
    return Request("put", {"mark": ["~sender", number]}, pieces, is_arrow)


async def answered(buckets: OpenBuckets, request: Request) -> Reply:
    service = buckets.service(0)
    assert service is not None
    reply = await service.answer(request)
    assert isinstance(reply, Reply)
    return reply


async def ids(buckets: OpenBuckets) -> list[int]:
    return [row["id"] for row in (await buckets.handle.bucket(0).read(0, None)).rows]


async def test_put_that_was_given_up_is_refused_and_later_ones_are_stored(tmp_path: Path) -> None:
    writer, buckets = await opened(tmp_path)
    give_up = Request("give_up", {"writer": "~sender", "number": 1})
    assert (await answered(buckets, give_up)).value == -1
    late = await answered(buckets, put(1))
    assert late.error is not None
    assert "was given up by its sender" in late.error[1]
    quick: Any = QuickPuts(buckets.handle._topic, buckets)
    assert not quick.enqueue(0, put(1), None)
    assert (await answered(buckets, put(2))).error is None
    assert await ids(buckets) == [0, 2]
    await writer.close()


async def test_giving_up_waits_for_a_put_in_progress_and_reports_that_it_is_stored(
    tmp_path: Path,
) -> None:
    writer, buckets = await opened(tmp_path)
    under_way = asyncio.ensure_future(answered(buckets, put(1)))
    while not under_way.done():
        service = buckets.service(0)
        assert service is not None
        if ("~sender", 1) in service.numbered_puts._under_way:
            break
        await asyncio.sleep(0)
    given_up = await answered(buckets, Request("give_up", {"writer": "~sender", "number": 1}))
    assert given_up.value == 1
    assert (await under_way).error is None
    assert await ids(buckets) == [0, 1]
    await writer.close()


class Waiting:
    """Waits for a put that is queued for the log."""

    def __init__(self) -> None:
        self.sink = self
        self.outcomes: list[BaseException | None] = []

    def deliver(self, waiters: Sequence[Any], exc: BaseException | None) -> None:
        self.outcomes.append(exc)


def put_columns(number: int, rows: int = 100, **more: Any) -> Request:
    packed = wire.pack_lists([[{"id": 1000 * number + n} for n in range(rows)]])
    assert packed is not None
    args = {"mark": ["~sender", number], "columns": packed.schema, **more}
    return Request("put_parts" if more else "put", args, packed.pieces)


async def test_columns_are_queued_once_and_not_if_they_were_given_up(tmp_path: Path) -> None:
    writer, buckets = await opened(tmp_path)
    quick = QuickPuts(buckets.handle._topic, buckets)
    await answered(buckets, Request("give_up", {"writer": "~sender", "number": 1}))
    refused, waiting = Waiting(), Waiting()
    assert not quick.enqueue(0, put_columns(1), refused)
    assert quick.enqueue(0, put_columns(2), waiting, alone=True)
    while not waiting.outcomes:  # noqa: ASYNC110 (set by a thread)
        await asyncio.sleep(0.001)
    assert waiting.outcomes == [None]
    assert not quick.enqueue(0, put_columns(2), refused)
    assert (await answered(buckets, put_columns(2))).value == "stored"
    assert refused.outcomes == []
    assert await ids(buckets) == [0, *range(2000, 2100)]
    await writer.close()


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [[0, 99, False]],
        [[0, 101, False]],
        [[0, -1, False], [0, 101, False]],
        [[0, 50, False], [7, 50, False]],
        [[0, "100", False]],
        [[0]],
        7,
    ],
    ids=repr,
)
async def test_columns_with_wrong_record_counts_are_refused(tmp_path: Path, parts: Any) -> None:
    writer, buckets = await opened(tmp_path)
    quick = QuickPuts(buckets.handle._topic, buckets)
    request = put_columns(1, buckets=parts)
    assert not quick.enqueue(0, request, Waiting())
    reply = await answered(buckets, request)
    if parts != [[0, 50, False], [7, 50, False]]:  # another node may own bucket 7
        assert reply.error is not None
    assert await ids(buckets) == [0]
    await writer.close()
