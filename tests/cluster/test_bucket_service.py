"""The owner's side of one bucket, without a network: pages bounded by bytes, streams, uploads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.topic_places import ids

from persisting.bucket.snapshot import Page
from persisting.cluster import service, wire
from persisting.cluster.owned_topic import OwnedTopic
from persisting.cluster.page_size import PAGE_ROWS, READ_ROWS
from persisting.cluster.service import BucketService
from persisting.cluster.transport import ReplyStream
from persisting.cluster.wire import Reply, Request
from persisting.errors import BucketClosed, BucketLocked, OffsetOutOfRange, StorageError
from persisting.queue import LanceBackend
from persisting.topic.live_topics import live_topic
from persisting.topic.local_handle import open_for_writing
from persisting.topic.spec import TopicSpec

MIB = 1 << 20


class Bucket:
    """Rows in memory that count how many of them were asked for."""

    def __init__(self, rows: list[dict[str, Any]], *, arrow: bool = True) -> None:
        self.rows, self._arrow = rows, arrow
        self.first = self.restores = 0
        self.asked: list[int] = []
        self.puts: list[Any] = []
        self.failure: Exception | None = None
        self._changed = asyncio.Event()

    async def keeps_schema(self) -> bool:
        return self._arrow

    async def read(self, offset: int, limit: int | None) -> Page:
        assert limit is not None, "the owner read without a limit"
        self.asked.append(limit)
        if self.failure is not None:
            raise self.failure
        if 0 < offset < self.first:
            raise OffsetOutOfRange(f"offset {offset} was removed")
        offset = max(offset, self.first)
        return Page(offset, self.rows[offset : offset + limit], self.restores)

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        page = await self.read(offset, limit)
        return page._replace(rows=pa.Table.from_pylist(page.rows))

    async def rows_within(self, offset: int, nbytes: int) -> int | None:
        return None

    async def end(self) -> int:
        return len(self.rows)

    async def epoch(self) -> int:
        return self.restores

    async def wait(self, offset: int, epoch: int) -> None:
        while len(self.rows) <= offset and self.restores == epoch:
            await self._changed.wait()
            self._changed.clear()

    async def put(self, rows: Any, sequence: tuple[str, int]) -> None:
        self.rows += rows
        self.puts.append(sequence)
        self._changed.set()


def served(bucket: Bucket) -> BucketService:
    stub: Any = bucket
    return BucketService(stub, "place", 0)


async def get(to: BucketService, offset: int, limit: int | None = None) -> Page:
    answer = await to.answer(Request("get", {"offset": offset, "limit": limit}))
    assert isinstance(answer, Reply)
    first, count, epoch = wire.raise_error(answer).value
    rows = wire.unpack_rows(answer.rows or b"", answer.arrow)
    records = rows if isinstance(rows, list) else rows.to_pylist()
    assert len(records) == count
    return Page(first, records, epoch)


async def stream_of(to: BucketService, op: str, **args: Any) -> Any:
    answer = await to.answer(Request(op, args))
    assert isinstance(answer, ReplyStream)
    return aclosing(answer.replies)


WINDOW = {"offset": 0, "limit": None, "epoch": None}
both_forms = pytest.mark.parametrize("arrow", [True, False], ids=["arrow", "records"])


def large(count: int, start: int = 0) -> list[dict[str, Any]]:
    blob = bytes(MIB)
    return [{"id": number, "data": blob} for number in range(start, start + count)]


def small(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": number, "data": b""} for number in range(start, start + count)]


async def read_everything(to: BucketService, bucket: Bucket) -> list[tuple[int, int]]:
    """Read page by page; return for each page the rows asked for and the rows it has."""
    pages, found = [], []
    while len(found) < len(bucket.rows):
        bucket.asked.clear()
        page = await get(to, len(found))
        found += ids(page.rows)
        pages.append((sum(bucket.asked), len(page.rows)))
    assert found == ids(bucket.rows)
    return pages


@both_forms
async def test_owner_reads_two_messages_of_large_rows_at_most(arrow: bool) -> None:
    bucket = Bucket(large(40), arrow=arrow)
    pages = await read_everything(served(bucket), bucket)
    for asked, _ in pages:
        assert asked * MIB <= 2 * wire.MESSAGE_BYTES


@both_forms
async def test_first_read_of_a_bucket_asks_for_a_single_row(arrow: bool) -> None:
    bucket = Bucket(small(10), arrow=arrow)
    await get(served(bucket), 0)
    assert bucket.asked[0] == 1


@both_forms
async def test_small_rows_fill_a_page(arrow: bool) -> None:
    bucket = Bucket(small(3 * PAGE_ROWS), arrow=arrow)
    pages = await read_everything(served(bucket), bucket)
    assert [rows for _, rows in pages] == [PAGE_ROWS] * 3
    assert max(bucket.asked) <= READ_ROWS


async def test_rows_that_become_large_are_read_in_excess_once() -> None:
    larger = bytes(2**14)
    grown = [{"id": n, "data": larger} for n in range(PAGE_ROWS, PAGE_ROWS + READ_ROWS)]
    bucket = Bucket([*small(PAGE_ROWS), *grown])
    pages = await read_everything(served(bucket), bucket)
    excess = [asked for asked, _ in pages[1:] if asked * len(larger) > 2 * wire.MESSAGE_BYTES]
    assert len(excess) <= 1
    assert sum(excess) <= READ_ROWS


@pytest.mark.parametrize("flushed", [True, False], ids=["table", "buffer"])
async def test_rows_of_a_table_that_become_large_are_never_read_in_excess(
    tmp_path: Path, flushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await open_for_writing(
        TopicSpec(topic="t", num_buckets=1, backend="lance", options={"flush_threshold": 10**6}),
        str(tmp_path),
        None,
    )
    client, asked = topic.bucket(0), []
    read_arrow = client.read_arrow

    async def counted(offset: int, limit: int | None) -> Page:
        page = await read_arrow(offset, limit)
        asked.append(page.rows.nbytes)
        return page

    monkeypatch.setattr(client, "read_arrow", counted)
    await client.put(small(2 * PAGE_ROWS))
    await client.flush()
    await client.put([{"id": n, "data": os.urandom(2**14)} for n in range(READ_ROWS)])
    if flushed:
        await client.flush()
    to, end = BucketService(client, "place", 0), 0
    while end < 2 * PAGE_ROWS + READ_ROWS:
        page = await get(to, end)
        end = page.first + len(page.rows)
    await topic.close()
    assert max(asked) <= 2 * wire.MESSAGE_BYTES


async def test_a_row_larger_than_a_message_is_a_page_of_its_own() -> None:
    huge = {"id": 0, "data": bytes(2 * wire.MESSAGE_BYTES)}
    bucket = Bucket([huge, *small(5, 1)])
    owner = served(bucket)
    assert ids((await get(owner, 0)).rows) == [0]
    assert ids((await get(owner, 1)).rows) == [1, 2, 3, 4, 5]


async def test_read_returns_at_most_limit_records() -> None:
    bucket = Bucket(small(100))
    owner = served(bucket)
    assert ids((await get(owner, 10, 30)).rows) == list(range(10, 40))
    assert ids((await get(owner, 10, 0)).rows) == []
    assert ids((await get(owner, 90, 30)).rows) == list(range(90, 100))


async def test_a_page_ends_where_a_restore_happened_between_two_reads() -> None:
    bucket = Bucket(small(100))
    read = bucket.read_arrow

    async def restored_after_the_first(offset: int, limit: int | None) -> Page:
        page = await read(offset, limit)
        bucket.restores = 1
        return page

    bucket.read_arrow = restored_after_the_first  # type: ignore[method-assign]
    page = await get(served(bucket), 0)
    assert (ids(page.rows), page.epoch) == ([0], 0)


async def test_a_page_ends_where_retention_removed_rows_between_two_reads() -> None:
    bucket = Bucket(small(100))
    read = bucket.read_arrow

    async def trimmed_after_the_first(offset: int, limit: int | None) -> Page:
        page = await read(offset, limit)
        bucket.first = 50
        return page

    bucket.read_arrow = trimmed_after_the_first  # type: ignore[method-assign]
    owner = served(bucket)
    assert ids((await get(owner, 0)).rows) == [0]
    with pytest.raises(OffsetOutOfRange):
        await get(owner, 1)
    assert (await get(owner, 0)).first == 50


async def test_a_page_ends_where_the_schema_changed_between_two_reads() -> None:
    bucket = Bucket([{"id": 0}, *({"id": n, "new": n} for n in range(1, 5))])
    owner = served(bucket)
    assert (await get(owner, 0)).rows == [{"id": 0}]
    assert len((await get(owner, 1)).rows) == 4


async def test_a_stream_ends_with_again_when_the_bucket_closes() -> None:
    bucket = Bucket(small(3))
    owner = served(bucket)
    async with await stream_of(owner, "stream", **WINDOW, block=True) as replies:
        assert (await anext(replies)).value == [0, 3, 0]
        following = asyncio.ensure_future(anext(replies))
        await asyncio.sleep(0)
        await owner.close()
        values = [(await following).value, *[reply.value async for reply in replies]]
    assert values[-1] == "again"
    assert set(values) <= {"alive", "again"}


async def test_a_closed_bucket_is_not_read_again_by_its_streams() -> None:
    bucket = Bucket(small(3))
    owner = served(bucket)
    async with await stream_of(owner, "stream", **WINDOW, block=False) as replies:
        await owner.close()
        assert [reply.value async for reply in replies] == ["again"]
    assert bucket.asked == []
    answer = await owner.answer(Request("get", {"offset": 0, "limit": 1}))
    assert isinstance(answer, Reply)
    with pytest.raises(BucketClosed):
        wire.raise_error(answer)


async def test_a_bucket_that_another_node_took_is_closed() -> None:
    bucket = Bucket(small(3))
    bucket.failure = BucketLocked("taken", owner={"node": "7"})
    owner = served(bucket)
    async with await stream_of(owner, "stream", **WINDOW, block=False) as replies:
        (last,) = [reply async for reply in replies]
    with pytest.raises(BucketClosed):
        wire.raise_error(last)
    assert owner.closed


async def test_an_error_is_the_last_reply_of_a_stream() -> None:
    bucket = Bucket(small(3))
    bucket.failure = RuntimeError("disk on fire")
    async with await stream_of(served(bucket), "stream", **WINDOW, block=False) as replies:
        (last,) = [reply async for reply in replies]
    with pytest.raises(StorageError, match="RuntimeError: disk on fire"):
        wire.raise_error(last)


async def test_a_waiting_stream_sends_keepalives_and_then_new_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "KEEPALIVE_SECONDS", 0.01)
    bucket = Bucket(small(1))
    owner = served(bucket)
    async with await stream_of(owner, "stream", **WINDOW, block=True) as replies:
        assert (await anext(replies)).value == [0, 1, 0]
        assert [(await anext(replies)).value for _ in range(2)] == ["alive", "alive"]
        await bucket.put(small(1, 1), ("producer", 0))
        async for reply in replies:
            if reply.value != "alive":
                break
        assert reply.value == [1, 1, 0]


async def test_a_watch_sends_every_new_end() -> None:
    bucket = Bucket([])
    async with await stream_of(served(bucket), "watch") as replies:
        assert (await anext(replies)).value == [0, 0]
        await bucket.put(small(2), ("producer", 0))
        assert (await anext(replies)).value == [2, 0]


def staged(number: int, records: list[dict[str, Any]]) -> Request:
    parts = [wire.pack_records(records)]
    return Request("stage", {"upload": "u", "number": number}, parts)


async def put_of_three(to: BucketService) -> Any:
    args = {"mark": ["producer", 0], "upload": "u", "staged": 2}
    answer = await to.answer(Request("put", args, [wire.pack_records(small(1, 2))]))
    assert isinstance(answer, Reply)
    return wire.raise_error(answer).value


async def test_a_put_of_several_messages_is_stored_once_and_in_order() -> None:
    bucket = Bucket([])
    owner = served(bucket)
    for request in (staged(0, small(1)), staged(1, small(1, 1)), staged(1, small(1, 1))):
        await owner.answer(request)
    assert await put_of_three(owner) == "stored"
    assert ids(bucket.rows) == [0, 1, 2]
    assert bucket.puts == [("producer", 0)]


async def test_a_put_whose_first_messages_are_missing_is_sent_again() -> None:
    bucket = Bucket([])
    owner = served(bucket)
    await owner.answer(staged(1, small(1, 1)))
    assert await put_of_three(owner) == "resend"
    assert bucket.puts == []


@pytest.fixture
async def owned(tmp_path: Path) -> AsyncIterator[OwnedTopic]:
    """A topic of two buckets, both of them on this node."""
    spec = TopicSpec(topic="t", num_buckets=2, backend="lance")
    topic = OwnedTopic(await open_for_writing(spec, str(tmp_path), None))
    for bucket in range(2):
        client = topic.handle.bucket(bucket)
        topic.services[bucket] = BucketService(client, "place", bucket, topic.put_parts)
    yield topic
    await topic.handle.close()


async def put_parts(to: BucketService, *buckets: int) -> Any:
    parts = [wire.pack_records(small(2)) for _ in buckets]
    args = {"mark": ["producer", 0], "buckets": [[bucket, 1, False] for bucket in buckets]}
    answer = await to.answer(Request("put_parts", args, parts))
    assert isinstance(answer, Reply)
    return wire.raise_error(answer).value


async def stored_rows(topic: OwnedTopic) -> list[int]:
    return [await topic.handle.bucket(bucket).end() for bucket in range(2)]


async def test_any_bucket_takes_a_put_to_several_buckets_of_its_topic(owned: OwnedTopic) -> None:
    for bucket in (0, 1, 1):
        assert await put_parts(owned.services[bucket], 0, 1) == "stored"
    assert await stored_rows(owned) == [2, 2]


async def test_put_to_a_bucket_that_is_not_here_stores_nothing(owned: OwnedTopic) -> None:
    await owned.services[1].close()
    assert await put_parts(owned.services[0], 0, 1, 7) == {"missing": [1, 7]}
    assert await stored_rows(owned) == [0, 0]


async def test_put_to_a_bucket_that_another_process_took_stores_nothing(
    owned: OwnedTopic, tmp_path: Path
) -> None:
    await owned.handle.open_bucket(1)
    live = live_topic(tmp_path / "t")
    assert live is not None
    await live.close_buckets()  # as new options do; the next use reopens the buckets
    other = LanceBackend(1, str(tmp_path / "t" / "bucket_1"))
    assert await put_parts(owned.services[0], 0, 1) == {"missing": [1]}
    assert owned.services[1].closed
    assert not owned.services[0].closed
    await other.close()
    assert await stored_rows(owned) == [0, 0]


async def test_a_bucket_stays_open_while_a_put_to_several_buckets_uses_it(
    owned: OwnedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = asyncio.Event()
    stored = owned.handle.put_parts

    async def held(*args: Any) -> None:
        await released.wait()
        await stored(*args)

    monkeypatch.setattr(owned.handle, "put_parts", held)
    put = asyncio.create_task(put_parts(owned.services[0], 0, 1))
    await asyncio.sleep(0)
    closing = asyncio.create_task(owned.services[1].close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    released.set()
    assert await put == "stored"
    await closing
    assert await stored_rows(owned) == [2, 2]


async def test_an_unknown_request_names_the_likely_cause() -> None:
    answer = await served(Bucket([])).answer(Request("defragment"))
    assert isinstance(answer, Reply)
    with pytest.raises(StorageError, match=r"'defragment'.*same version"):
        wire.raise_error(answer)
