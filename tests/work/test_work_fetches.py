"""Many tasks of one reader share claims, and records are read ahead: none gets a wrong record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from persisting.bucket.snapshot import Page
from persisting.errors import BucketClosed, OffsetOutOfRange, StorageError
from persisting.queue import WorkReader, read_queue, write_queue
from persisting.topic.table_calls import MakeDurable
from persisting.work.group_values import RecordLease
from persisting.work.near_reads import read_near
from persisting.work.record_cache import (
    FIRST_ROWS,
    MOST_BYTES,
    MOST_ROWS,
    SMALL_ROWS,
    BucketCache,
    RecordCache,
    read_rows,
)
from persisting.work.turns import STAY_MICROSECONDS, STAY_RECORDS, Turns

OPTIONS = {"enable_wal": True, "wal_sync_interval": 0.0}


class Bucket:
    """A bucket of records in memory that notes which ranges are read."""

    def __init__(self, end: int, start: int = 0, epoch: int = 0, width: int = 1) -> None:
        self.start, self.end, self.epoch, self.width = start, end, epoch, width
        self.reads: list[tuple[int, int]] = []
        self.behind, self.may_be_behind = 0, True
        """Records that are durable and not shown yet."""

    async def call(self, call: MakeDurable) -> int:
        """Show the records that a client is behind with."""
        self.end, self.behind = self.end + self.behind, 0
        return self.end

    async def read(self, offset: int, limit: int | None) -> Page:
        assert limit is not None
        self.reads.append((offset, limit))
        if offset < self.start:
            raise OffsetOutOfRange("removed by retention")
        await asyncio.sleep(0)
        rows = range(offset, min(self.end, offset + limit))
        return Page(offset, [self.record(n) for n in rows], self.epoch)

    def record(self, offset: int) -> dict[str, Any]:
        return {"n": f"{self.epoch}/{offset}", "text": "x" * self.width}


def leases(first: int, count: int, *, epoch: int = 0, end: int = 10**6) -> list[RecordLease]:
    return [RecordLease(0, first + i, 1 + i, 1, 0, 0, 0, -1, epoch, end) for i in range(count)]


async def read(cache: BucketCache, bucket: Bucket, *args: int, **more: int) -> list[str]:
    rows = await cache.read_new(bucket, leases(*args, **more))  # type: ignore[arg-type]
    for offset, row in rows:
        assert row["n"].endswith(f"/{offset}")
    return [row["n"] for _, row in rows]


async def test_records_that_a_client_does_not_see_yet_are_read() -> None:
    bucket = Bucket(4)
    bucket.behind = 6
    rows = await read_rows(bucket, 2, 6, 0)  # type: ignore[arg-type]
    assert [offset for offset, _ in rows] == list(range(2, 8))


class TestReadAhead:
    async def test_one_read_serves_the_claims_that_follow(self) -> None:
        cache, bucket = BucketCache(), Bucket(10_000)
        for offset in range(2000):
            assert await read(cache, bucket, offset, 1) == [f"0/{offset}"]
        assert len(bucket.reads) < 10
        assert max(limit for _, limit in bucket.reads) <= MOST_ROWS

    async def test_concurrent_members_wait_for_one_read_of_the_same_records(self) -> None:
        cache, bucket = BucketCache(), Bucket(10_000)
        found = await asyncio.gather(*(read(cache, bucket, n, 1) for n in range(64)))
        assert found == [[f"0/{n}"] for n in range(64)]
        assert bucket.reads == [(0, FIRST_ROWS), (FIRST_ROWS, SMALL_ROWS)]

    async def test_pages_grow_even_if_every_claim_gets_a_whole_page(self) -> None:
        cache, bucket = BucketCache(), Bucket(10_000)
        for offset in range(0, 6400, 64):
            await read(cache, bucket, offset, 64)
        assert len(bucket.reads) < 10

    async def test_nothing_beyond_the_durable_end_is_read(self) -> None:
        cache, bucket = BucketCache(), Bucket(10_000)
        assert await read(cache, bucket, 0, 4, end=6) == [f"0/{n}" for n in range(4)]
        assert bucket.reads == [(0, 6)]
        assert await read(cache, bucket, 4, 4, end=8) == [f"0/{n}" for n in range(4, 8)]
        assert bucket.reads == [(0, 6), (6, 2)]

    async def test_a_record_that_was_read_before_a_restore_is_not_delivered_after_it(self) -> None:
        cache, bucket = BucketCache(), Bucket(100)
        assert await read(cache, bucket, 0, 1) == ["0/0"]
        bucket.epoch = 1
        assert await read(cache, bucket, 1, 2, epoch=1) == ["1/1", "1/2"]

    async def test_a_page_of_another_epoch_than_the_lease_is_not_delivered(self) -> None:
        cache, bucket = BucketCache(), Bucket(100, epoch=1)
        assert await read(cache, bucket, 0, 1, epoch=0, end=100) == []
        assert await read_rows(bucket, 0, 1, 0) == []  # type: ignore[arg-type]
        assert await read(cache, bucket, 0, 1, epoch=1, end=100) == ["1/0"]

    async def test_a_record_is_handed_out_once(self) -> None:
        cache, bucket = BucketCache(), Bucket(100)
        rows = await cache.read_new(bucket, leases(0, 1))  # type: ignore[arg-type]
        rows[0][1]["n"] = "changed by its handler"
        assert await read(cache, bucket, 0, 1) == ["0/0"]

    async def test_records_that_retention_has_removed_are_left_out(self) -> None:
        cache, bucket = BucketCache(), Bucket(10, start=3)
        assert await read(cache, bucket, 1, 4) == ["0/3", "0/4"]

    async def test_a_read_that_retention_moves_forward_keeps_nothing_beyond_the_durable_end(
        self,
    ) -> None:
        class Cut(Bucket):
            async def read(self, offset: int, limit: int | None) -> Page:
                return await super().read(max(offset, 100), limit)  # 0 means the earliest

        cache, bucket = BucketCache(), Cut(10_000)
        assert await read(cache, bucket, 0, 1, end=105) == []
        assert sorted(cache._rows) == list(range(100, 105))

    async def test_large_records_are_read_in_small_pages(self) -> None:
        cache, bucket = BucketCache(), Bucket(10_000, width=MOST_BYTES)
        for offset in range(20):
            await read(cache, bucket, offset, 1)
        assert bucket.reads[0][1] == FIRST_ROWS
        assert {limit for _, limit in bucket.reads[1:]} == {1}

    async def test_pages_stay_small_while_other_processes_get_nearly_all_records(self) -> None:
        cache, bucket = BucketCache(), Bucket(10**6)
        for offset in range(0, 10**6, 5000):
            await read(cache, bucket, offset, 1)
        assert bucket.reads[-1][1] == SMALL_ROWS


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[WorkReader]:
    place: dict[str, Any] = {"topic": "tasks", "storage_path": str(tmp_path)}
    writer = await write_queue(**place, backend="persisting", backend_options=OPTIONS)
    await writer.put([{"id": n} for n in range(300)])
    reader = await read_queue(**place, group="g", mode="work", lease=60.0)
    yield reader
    await reader.close()
    await writer.close()


def count_claims(reader: WorkReader, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every claim adds how many records it asks for."""
    counts: list[int] = []
    client = reader._session._client
    call = client.call

    async def counted(op: str, args: dict[str, Any]) -> Any:
        if op == "claim":
            counts.append(args["count"])
        return await call(op, args)

    monkeypatch.setattr(client, "call", counted)
    return counts


class TestBatchedFetches:
    async def test_tasks_that_fetch_at_the_same_time_share_claims(
        self, jobs: WorkReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claims = count_claims(jobs, monkeypatch)
        fetched = await asyncio.gather(*(jobs.fetch(1 + n % 3) for n in range(60)))
        assert [len(deliveries) for deliveries in fetched] == [1 + n % 3 for n in range(60)]
        records = [d.record["id"] for deliveries in fetched for d in deliveries]
        assert len(set(records)) == len(records) == 120
        assert len(claims) <= 2

    async def test_tasks_that_fetch_when_no_record_is_left_get_nothing(
        self, jobs: WorkReader
    ) -> None:
        fetched = await asyncio.gather(*(jobs.fetch(100) for _ in range(5)))
        assert sorted(map(len, fetched)) == [0, 0, 100, 100, 100]

    async def test_a_cancelled_task_leaves_no_lease_behind(self, jobs: WorkReader) -> None:
        tasks = [asyncio.create_task(jobs.fetch(5)) for _ in range(20)]
        for _ in range(3):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        kept = [d for found in results if isinstance(found, list) for d in found]
        assert len(kept) == 50
        for _ in range(500):
            stats = await jobs.stats()
            if stats["in_flight"] == 50:
                break
            await asyncio.sleep(0.01)
        assert stats["in_flight"] == 50
        rest = await jobs.fetch(300)
        assert {d.attempt for d in rest} == {1}
        assert sorted(d.record["id"] for d in [*kept, *rest]) == list(range(300))

    async def test_every_task_gets_the_error_of_a_failed_claim(
        self, jobs: WorkReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail(op: str, args: dict[str, Any]) -> Any:
            raise BucketClosed("no keeper")

        with monkeypatch.context() as patched:
            patched.setattr(jobs._session._client, "call", fail)
            tasks = (jobs.fetch(1) for _ in range(5))
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(result) for result in results] == ["no keeper"] * 5
        assert len(await jobs.fetch(1)) == 1

    async def test_a_bucket_that_cannot_be_read_does_not_hold_back_the_others(
        self, jobs: WorkReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def fail(offset: int, limit: int | None) -> Page:
            raise StorageError("no owner")

        jobs._session.records._cache = RecordCache()
        with monkeypatch.context() as patched:
            patched.setattr(jobs._session.records.topic.bucket(1), "read", fail)
            got = [d for _ in range(6) for d in await jobs.fetch(300)]
            assert {d.bucket for d in got} == {0, 2, 3}
            assert "cannot read bucket 1 of topic 'tasks': no owner" in caplog.text
            with pytest.raises(StorageError, match="no owner"):
                await jobs.fetch(100, wait=True, timeout=60)
        rest = await jobs.fetch(300, wait=True, timeout=60)
        while len(got) + len(rest) < 300:
            rest += await jobs.fetch(300, wait=True, timeout=60)
        assert {(d.bucket, d.attempt) for d in rest} == {(1, 1)}
        assert sorted(d.record["id"] for d in [*got, *rest]) == list(range(300))

    async def test_single_fetches_get_the_records_of_the_buckets_that_can_be_read(
        self, jobs: WorkReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail(offset: int, limit: int | None) -> Page:
            raise StorageError("no owner")

        jobs._session.records._cache = RecordCache()
        readable = (await jobs.stats())["buckets"]
        count = sum(readable[bucket]["end_offset"] for bucket in (0, 2, 3))
        with monkeypatch.context() as patched:
            patched.setattr(jobs._session.records.topic.bucket(1), "read", fail)
            got = [d for _ in range(count) for d in await jobs.fetch(1)]
        assert len(got) == count
        assert {d.bucket for d in got} == {0, 2, 3}

    async def test_readers_of_one_process_share_what_was_read_ahead(
        self, jobs: WorkReader, tmp_path: Path
    ) -> None:
        place: dict[str, Any] = {"topic": "tasks", "storage_path": str(tmp_path)}
        other = await read_queue(**place, group="g", mode="work", lease=60.0)
        records = []
        for number in range(150):
            reader = (jobs, other)[number % 2]
            records += [d.record["id"] for d in await reader.fetch(2)]
        assert sorted(records) == list(range(300))
        assert other._session is jobs._session
        await other.close()


class TestNearReads:
    async def test_records_near_to_each_other_need_one_read(
        self, jobs: WorkReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client, reads = jobs._session.records.topic.bucket(0), []
        read = client.read

        async def counted(offset: int, limit: int | None) -> Page:
            reads.append(offset)
            return await read(offset, limit)

        monkeypatch.setattr(client, "read", counted)
        end = (await jobs.stats())["buckets"][0]["end_offset"]
        wanted = [0, 1, 3, 10, end - 1]
        found = await read_near(client, reversed(wanted))
        assert sorted(found) == wanted
        assert reads == [0, end - 1]
        page = await read(0, None)
        assert found == {offset: page.rows[offset] for offset in wanted}

    async def test_large_records_are_read_a_few_at_a_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("persisting.work.near_reads.MOST_BYTES", 80_000, raising=False)
        sizes = []

        class Client:
            async def read(self, offset: int, limit: int) -> Page:
                rows = [{"id": n, "text": "x" * 16_000} for n in range(offset, offset + limit)]
                sizes.append(len(rows))
                return Page(offset, rows, 0)

        wanted = list(range(0, 200, 10))
        found = await read_near(Client(), wanted)
        assert [record["id"] for record in found.values()] == wanted
        assert max(sizes) == sizes[0] == 16  # before it is known how large they are
        assert max(sizes[1:]) == 4

    async def test_records_that_cannot_be_read_are_left_out(
        self, jobs: WorkReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = jobs._session.records.topic.bucket(0)
        read = client.read

        async def fail_at_first(offset: int, limit: int | None) -> Page:
            if offset == 0:
                raise StorageError("damaged")
            return await read(offset, limit)

        monkeypatch.setattr(client, "read", fail_at_first)
        end = (await jobs.stats())["buckets"][0]["end_offset"]
        assert sorted(await read_near(client, [0, 1, end - 1, end + 100])) == [end - 1]


class TestTurns:
    def test_members_begin_with_different_buckets_and_stay_there_for_a_while(self) -> None:
        turns, buckets = Turns(), [0, 1, 2, 3]
        orders = {member: turns.order(0, member, 16, buckets) for member in "abcd"}
        assert sorted(order[0] for order in orders.values()) == buckets
        assert all(sorted(order) == buckets for order in orders.values())
        for member, order in orders.items():
            assert turns.order(STAY_MICROSECONDS - 1, member, 16, buckets) == order

    def test_a_member_that_asks_rarely_visits_all_buckets_in_turn(self) -> None:
        turns, buckets = Turns(), [0, 1, 2, 3]
        firsts = [turns.order(n * STAY_MICROSECONDS, "a", 1, buckets)[0] for n in range(8)]
        assert sorted(firsts[:4]) == sorted(firsts[4:]) == buckets

    def test_a_member_leaves_a_bucket_after_many_records(self) -> None:
        turns, buckets = Turns(), [0, 1]
        first = turns.order(0, "a", STAY_RECORDS, buckets)
        assert turns.order(0, "a", 1, buckets) == first[::-1]

    def test_a_group_without_a_bucket_to_offer_has_no_turns(self) -> None:
        assert Turns().order(0, "a", 1, []) == []

    def test_members_that_died_are_forgotten(self) -> None:
        turns = Turns()
        for number in range(5000):
            turns.order(0, f"member {number}", 1, [0])
        assert len(turns._members) <= 1024
