"""What every queue does, whatever its backend and wherever its buckets live."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import time
from typing import Any

import pyarrow as pa
import pytest

from persisting.errors import BucketClosed, InvalidArgument, SchemaError, StorageError
from support.topic_places import Place, drained, ids, numbered, streamed
from support.values import EVERY_TYPE


def pulsing_bucket(value: Any, buckets: int) -> int:
    """Route as ``pulsing.streaming.queue.Queue._hash_partition`` does."""
    text = "" if value is None else str(value)
    return int(hashlib.md5(text.encode()).hexdigest(), 16) % buckets


class WritingContract:
    async def test_every_record_put_is_read_once(self, place: Place) -> None:
        writer = await place.write()
        await writer.put({"id": 1, "text": "one"})
        reader = await place.read()
        assert await reader.get() == [{"id": 1, "text": "one"}]

    async def test_lists_batches_and_arrow_data_are_stored(self, place: Place) -> None:
        writer = await place.write()
        await writer.put(numbered(10))
        await writer.put_batch(numbered(10, 10))
        await writer.put_arrow(pa.table({"id": list(range(20, 30))}))
        await writer.put_arrow(pa.record_batch({"id": list(range(30, 40))}))
        assert sorted(ids(await streamed(await place.read()))) == list(range(40))

    async def test_empty_lists_and_tables_store_nothing(self, place: Place) -> None:
        writer = await place.write()
        await writer.put([])
        await writer.put_batch([])
        await writer.put_arrow(pa.table({"id": pa.array([], pa.int64())}))
        assert (await writer.stats())["total_count"] == 0

    async def test_records_are_routed_as_pulsing_routes_them(self, place: Place) -> None:
        keys = ["a", "b", "日本", "", "1", "2.5", "None", *map(str, range(20))]
        writer = await place.write(num_buckets=3, bucket_column="key")
        await writer.put([{"key": key} for key in keys])
        await writer.put({"key": None})
        for bucket in range(3):
            reader = await place.read(bucket_id=bucket)
            expected = [k for k in [*keys, None] if pulsing_bucket(k, 3) == bucket]
            assert [r["key"] for r in await reader.get(limit=1000)] == expected

    async def test_record_without_the_bucket_column_is_refused(self, place: Place) -> None:
        writer = await place.write(bucket_column="key")
        with pytest.raises(SchemaError, match="key"):
            await writer.put({"id": 1})
        with pytest.raises(SchemaError, match="key"):
            await writer.put([{"key": 1}, {"id": 2}])
        with pytest.raises(SchemaError, match="key"):
            await writer.put_arrow(pa.table({"id": [1]}))
        assert (await writer.stats())["total_count"] == 0

    @pytest.mark.parametrize("record", ["text", 5, None, [1], [[{"id": 1}]]])
    async def test_value_that_is_not_a_record_is_refused(self, place: Place, record: Any) -> None:
        writer = await place.write()
        with pytest.raises((SchemaError, InvalidArgument)):
            await writer.put(record)

    async def test_concurrent_single_puts_are_all_stored_once(self, place: Place) -> None:
        writer = await place.write()
        await asyncio.gather(*(writer.put({"id": number}) for number in range(300)))
        assert sorted(ids(await streamed(await place.read()))) == list(range(300))

    async def test_puts_of_one_task_keep_their_order_within_a_bucket(self, place: Place) -> None:
        writer = await place.write(num_buckets=2, bucket_column="key")
        for number in range(10):
            await writer.put({"key": number % 3, "n": number})
        await writer.put([{"key": n % 3, "n": n} for n in range(10, 60)])
        for bucket in range(2):
            found = [r["n"] for r in await streamed(await place.read(bucket_id=bucket))]
            assert found == sorted(found)

    async def test_values_of_every_type_are_read_as_they_were_put(self, typed_place: Place) -> None:
        record = EVERY_TYPE
        writer = await typed_place.write()
        await writer.put(record)
        await writer.put([{**record, "id": "y"}, {**record, "id": "z"}])
        found = await streamed(await typed_place.read())
        assert sorted(found, key=lambda r: r["id"]) == [{**record, "id": i} for i in "xyz"]
        assert all(list(r) == list(record) for r in found)

    async def test_stats_are_summed_over_the_buckets(self, place: Place) -> None:
        writer = await place.filled(40)
        await writer.flush()
        stats = await writer.stats()
        assert stats["total_count"] == 40
        assert [bucket["bucket_id"] for bucket in stats["buckets"]] == [0, 1, 2, 3]
        assert sum(bucket["total_count"] for bucket in stats["buckets"]) == 40
        if place.persistent:
            assert stats["buffer_count"] == 0
            assert stats["persisted_count"] == 40
        if place.kind == "persisting":
            assert stats["wal_enabled"] is True
            assert stats["wal_size"] >= 0

    async def test_closed_writer_refuses_puts(self, place: Place) -> None:
        async with await place.write() as writer:
            await writer.put({"id": 1})
        await writer.close()
        for use in (writer.put({"id": 2}), writer.put([]), writer.flush(), writer.stats()):
            with pytest.raises(BucketClosed):
                await use

    async def test_synchronous_code_writes_and_reads(self, place: Place) -> None:
        writer, reader = await place.write(), await place.read()

        def work() -> list[Any]:
            sync = writer.sync()
            sync.put(numbered(5))
            sync.flush()
            source = reader.sync()
            return [*source.get(limit=2), *source.get_stream()]

        assert sorted(ids(await asyncio.to_thread(work))) == list(range(5))

    async def test_synchronous_call_on_the_own_event_loop_raises(self, place: Place) -> None:
        writer = await place.write()
        with pytest.raises(InvalidArgument, match="event loop"):
            writer.sync().put({"id": 1})

    async def test_arguments_that_contradict_the_topic_raise(self, place: Place) -> None:
        await place.filled(num_buckets=3, bucket_column="id")
        for wrong in ({"num_buckets": 4}, {"bucket_column": "key"}):
            with pytest.raises(InvalidArgument, match=next(iter(wrong))):
                await place.write(**wrong)
        with pytest.raises(InvalidArgument, match="num_buckets"):
            await place.read(num_buckets=4)

    async def test_two_writers_share_the_topic(self, place: Place) -> None:
        first, second = await place.write(), await place.write()
        await asyncio.gather(first.put(numbered(50)), second.put(numbered(50, 50)))
        assert (await first.stats())["total_count"] == 100
        await first.close()
        await second.put({"id": 100})
        assert sorted(ids(await streamed(await place.read()))) == list(range(101))


class ReadingContract:
    async def test_get_moves_the_cursor_and_ends_empty(self, place: Place) -> None:
        await place.filled(40)
        reader = await place.read()
        first = await reader.get(limit=15)
        assert len(first) == 15
        rest = await drained(reader, 10)
        assert sorted(ids(first + rest)) == list(range(40))
        assert await reader.get() == []

    async def test_limit_of_get_counts_over_all_buckets(self, place: Place) -> None:
        await place.filled(40)
        reader = await place.read()
        assert await reader.get(limit=0) == []
        assert len(await reader.get(limit=1)) == 1
        assert len(await reader.get(limit=1000)) == 39

    @pytest.mark.parametrize("limit", [-1, "5", 1.5, True])
    async def test_invalid_limit_raises(self, place: Place, limit: Any) -> None:
        await place.filled(1)
        reader = await place.read()
        with pytest.raises(InvalidArgument):
            await reader.get(limit=limit)

    async def test_each_reader_has_its_own_cursor(self, place: Place) -> None:
        await place.filled(40)
        first, second = await place.read(), await place.read()
        assert len(await first.get(limit=30)) == 30
        assert sorted(ids(await drained(second))) == list(range(40))

    async def test_concurrent_gets_of_one_reader_deliver_each_record_once(
        self, place: Place
    ) -> None:
        writer = await place.filled(200)
        await writer.flush()
        reader = await place.read()
        parts = await asyncio.gather(*(reader.get(limit=15) for _ in range(6)))
        found = [record for part in parts for record in part] + await drained(reader)
        assert sorted(ids(found)) == list(range(200))

    async def test_cancelled_get_loses_nothing(self, place: Place) -> None:
        writer = await place.filled(400)
        await writer.flush()
        reader = await place.read()
        found: list[dict[str, Any]] = []
        for attempt in range(30):
            task = asyncio.ensure_future(reader.get(limit=8))
            await asyncio.sleep(0.0007 * (attempt % 10))
            task.cancel()
            for part in await asyncio.gather(task, return_exceptions=True):
                found += part if isinstance(part, list) else []
        found += await drained(reader)
        assert sorted(ids(found)) == list(range(400))

    async def test_waiting_get_returns_at_its_timeout(self, place: Place) -> None:
        await place.filled(1)
        reader = await place.read()
        await reader.get()
        started = time.monotonic()
        assert await asyncio.wait_for(reader.get(wait=True, timeout=0.3), 60) == []
        assert time.monotonic() - started > 0.2

    async def test_repeated_short_waits_always_return(self, place: Place) -> None:
        await place.filled(1)
        reader = await place.read()
        await reader.get()
        for _ in range(40):
            assert await asyncio.wait_for(reader.get(wait=True, timeout=0.02), 60) == []

    async def test_waiting_get_wakes_on_a_put(self, place: Place) -> None:
        writer = await place.filled(1)
        reader = await place.read()
        await reader.get()
        waiting = asyncio.ensure_future(reader.get(wait=True))
        await asyncio.sleep(0.3)
        await writer.put({"id": 77})
        assert ids(await asyncio.wait_for(waiting, 60)) == [77]

    async def test_stream_continues_at_the_cursor(self, place: Place) -> None:
        await place.filled(40)
        reader = await place.read()
        first = await streamed(reader, limit=13)
        second = await reader.get(limit=10)
        rest = await streamed(reader)
        assert (len(first), len(second)) == (13, 10)
        assert sorted(ids(first + second + rest)) == list(range(40))

    async def test_abandoned_stream_is_continued_by_the_next_one(self, place: Place) -> None:
        await place.filled(40)
        reader = await place.read()
        found = []
        async for record in reader.get_stream():
            found.append(record)
            if len(found) == 7:
                break
        assert sorted(ids(found + await streamed(reader))) == list(range(40))

    async def test_explicit_offset_applies_per_bucket_and_does_not_move_the_cursor(
        self, place: Place
    ) -> None:
        await place.filled(40)
        reader = await place.read()
        everything = [await streamed(await place.read(bucket_id=b)) for b in range(4)]
        found = await streamed(reader, offset=2)
        assert sorted(ids(found)) == sorted(ids(r for rows in everything for r in rows[2:]))
        assert len(await streamed(reader, offset=0, limit=9)) == 9
        assert await streamed(reader, offset=10**9) == []
        assert sorted(ids(await drained(reader))) == list(range(40))

    async def test_blocking_stream_delivers_new_records(self, place: Place, spawned: Any) -> None:
        writer = await place.filled(10)
        reader = await place.read()
        task = spawned(streamed(reader, limit=25, block=True))
        await asyncio.sleep(0.2)
        for number in range(10, 25):
            await writer.put({"id": number})
        assert sorted(ids(await asyncio.wait_for(task, 60))) == list(range(25))

    async def test_order_is_kept_within_a_bucket_in_a_stream(self, place: Place) -> None:
        await place.filled(500)
        found = ids(await streamed(await place.read()))
        for bucket in range(4):
            own = [n for n in found if pulsing_bucket(n, 4) == bucket]
            assert own == sorted(own)

    async def test_get_arrow_returns_the_same_records(self, place: Place) -> None:
        await place.filled(40)
        reader = await place.read()
        table = await reader.get_arrow(offset=0)
        assert sorted(table.column("id").to_pylist()) == list(range(40))
        part = await reader.get_arrow(limit=15)
        rest = await reader.get_arrow()
        assert part.num_rows == 15
        found = part.column("id").to_pylist() + rest.column("id").to_pylist()
        assert sorted(found) == list(range(40))

    async def test_reset_and_set_offset_move_the_cursor(self, place: Place) -> None:
        await place.filled(40)
        reader = await place.read()
        assert sorted(ids(await drained(reader))) == list(range(40))
        await reader.reset()
        assert sorted(ids(await drained(reader))) == list(range(40))
        await reader.set_offset(0, bucket_id=1)
        alone = await streamed(await place.read(bucket_id=1))
        assert ids(await drained(reader)) == ids(alone)
        await reader.set_offset(3)
        assert reader.offsets() == dict.fromkeys(range(4), 3)
        for wrong in ({"offset": -1}, {"offset": 0, "bucket_id": 9}):
            with pytest.raises(InvalidArgument):
                await reader.set_offset(**wrong)

    async def test_offset_beyond_the_end_waits_for_that_record(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer = await place.write(num_buckets=1)
        await writer.put(numbered(10))
        await writer.flush()
        reader = await place.read()
        await reader.set_offset(12)
        for _ in range(3):
            assert await reader.get() == []
            reader._looked = 0.0
        await writer.put(numbered(5, 10))
        await writer.flush()
        assert ids(await drained(reader)) == [12, 13, 14]
        assert "lost" not in caplog.text

    async def test_extreme_offsets_and_timestamps_are_accepted_or_refused(
        self, place: Place
    ) -> None:
        await place.filled(3)
        reader = await place.read()
        for moment in (10**400, 1e20):
            with pytest.raises(InvalidArgument):
                await reader.seek(timestamp=moment)
        assert len(await reader.get(limit=2**70)) == 3
        assert (await reader.get_arrow(offset=2**63)).num_rows == 0
        await reader.set_offset(2**70)
        assert await reader.get() == []
        await reader.reset()
        if place.kind != "custom":
            assert set((await reader.seek(timestamp=dt.datetime.min)).values()) == {0}
        assert len(await drained(reader)) == 3

    async def test_get_arrow_is_complete_while_fields_are_added(self, place: Place) -> None:
        writer = await place.filled(2000)
        if not place.evolving:
            return
        reader = await place.read()
        for n in range(3):
            table, _ = await asyncio.gather(
                reader.get_arrow(offset=0), writer.put({"id": 5000 + n, f"new{n}": n})
            )
            assert table.num_rows >= 2000
            assert set(table.column("id").to_pylist()) >= set(range(2000))

    async def test_seek_moves_to_the_first_record_since_a_timestamp(self, place: Place) -> None:
        writer = await place.filled(20)
        await asyncio.sleep(0.05)
        between = time.time()
        await asyncio.sleep(0.05)
        await writer.put(numbered(20, 20))
        await writer.flush()
        reader = await place.read()
        if place.kind == "custom":
            with pytest.raises(StorageError, match="stores no arrival times"):
                await reader.seek(timestamp=between)
            return
        await reader.seek(timestamp=between)
        assert sorted(ids(await drained(reader))) == list(range(20, 40))
        await reader.seek(timestamp=dt.datetime.fromtimestamp(between, dt.timezone.utc))
        assert sorted(ids(await drained(reader))) == list(range(20, 40))
        await reader.seek(timestamp=0)
        assert len(await drained(reader)) == 40
        await reader.seek(timestamp=between + 1e6)
        assert await drained(reader) == []

    @pytest.mark.parametrize("when", [float("nan"), float("inf"), "now", True, None])
    async def test_seek_to_an_invalid_timestamp_raises(self, place: Place, when: Any) -> None:
        await place.filled(1)
        reader = await place.read()
        with pytest.raises(InvalidArgument):
            await reader.seek(timestamp=when)

    async def test_ranks_share_the_buckets_without_overlap(self, place: Place) -> None:
        await place.filled(100, num_buckets=5)
        found = []
        for rank in range(3):
            found += await streamed(await place.read(rank=rank, world_size=3))
        assert sorted(ids(found)) == list(range(100))
        one = await streamed(await place.read(bucket_ids=[4, 0, 4]))
        assert sorted(ids(one)) == [n for n in range(100) if pulsing_bucket(n, 5) in (0, 4)]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"bucket_id": 4},
            {"bucket_id": -1},
            {"bucket_ids": [0, "1"]},
            {"bucket_id": 0, "bucket_ids": [1]},
            {"rank": 0},
            {"rank": 2, "world_size": 2},
            {"rank": 0, "world_size": 1, "bucket_id": 0},
        ],
        ids=str,
    )
    async def test_invalid_bucket_choices_raise(self, place: Place, wrong: dict[str, Any]) -> None:
        await place.filled(1)
        with pytest.raises(InvalidArgument):
            await place.read(**wrong)

    async def test_reads_are_fair_between_buckets(self, place: Place) -> None:
        writer = await place.write(bucket_column="key")
        keys = {pulsing_bucket(key, 4): key for key in range(100)}
        await writer.put([{"key": keys[0]}] * 400)
        await writer.put([{"key": keys[bucket]} for bucket in (1, 2, 3) for _ in range(3)])
        reader = await place.read()
        first = [record["key"] for record in await reader.get(limit=12)]
        assert {keys[bucket] for bucket in range(4)} == set(first)

    async def test_closed_reader_raises_on_every_read(self, place: Place) -> None:
        await place.filled(1)
        async with await place.read() as reader:
            pass
        await reader.close()
        for use in (reader.get(), reader.reset(), reader.stats(), reader.get_arrow()):
            with pytest.raises(BucketClosed):
                await use

    async def test_reader_stats_report_cursor_and_lag(self, place: Place) -> None:
        await place.filled(40)
        reader = await place.read()
        await reader.get(limit=15)
        stats = await reader.stats()
        assert (stats["total_count"], stats["lag"]) == (40, 25)
        assert sum(stats["offsets"].values()) == 15


class FindingContract:
    async def test_reading_a_missing_topic_raises_and_does_not_create_it(
        self, place: Place
    ) -> None:
        with pytest.raises(StorageError, match=place.topic):
            await place.read()
        with pytest.raises(StorageError, match=place.topic):
            await place.read(wait_for_topic=0.2)
        assert not list(place.folder.glob("*"))

    async def test_reader_waits_for_its_topic(self, place: Place, spawned: Any) -> None:
        task = spawned(place.read(wait_for_topic=True))
        await asyncio.sleep(0.3)
        assert not task.done()
        await place.filled(10)
        reader = await asyncio.wait_for(task, 60)
        found: list[Any] = []
        while len(found) < 10:
            found += await reader.get(wait=True, timeout=10)
        assert sorted(ids(found)) == list(range(10))

    async def test_open_topic_is_found_without_its_path(self, place: Place) -> None:
        await place.filled(10)
        reader = await place.read(storage_path=None)
        assert sorted(ids(await drained(reader))) == list(range(10))


class SchemaContract:
    """For the backends with tables."""

    async def test_conflicting_field_type_raises_in_every_bucket(self, table_place: Place) -> None:
        writer = await table_place.write()
        await writer.put({"id": 0, "v": 1})
        for number in range(1, 9):
            with pytest.raises(SchemaError, match="v"):
                await writer.put({"id": number, "v": "text"})
        assert (await writer.stats())["total_count"] == 1

    async def test_new_field_is_accepted_by_all_buckets_or_by_none(
        self, table_place: Place
    ) -> None:
        writer = await table_place.write()
        await writer.put({"id": 0, "a": 1})
        if not table_place.evolving:
            for number in range(1, 9):
                with pytest.raises(SchemaError, match="b"):
                    await writer.put({"id": number, "a": 1, "b": 2})
                with pytest.raises(SchemaError, match="a"):
                    await writer.put({"id": number})
            return
        await writer.put([{"id": number, "b": 2} for number in range(1, 9)])
        with pytest.raises(SchemaError, match="b"):
            await writer.put({"id": 0, "b": "text"})
        found = sorted(await streamed(await table_place.read()), key=lambda r: r["id"])
        assert found[0]["a"] == 1
        assert [record["b"] for record in found[1:]] == [2] * 8

    async def test_large_integers_in_another_bucket_forbid_floats(self, table_place: Place) -> None:
        writer = await table_place.write()
        await writer.put({"id": 0, "n": 2**60 + 1})
        for number in range(1, 9):
            with pytest.raises(SchemaError, match="n"):
                await writer.put({"id": number, "n": 0.5})
        await writer.put([{"id": number, "n": number} for number in range(1, 9)])
        found = {r["id"]: r["n"] for r in await streamed(await table_place.read())}
        assert found == {0: 2**60 + 1, **{n: n for n in range(1, 9)}}

    async def test_bad_record_fails_without_affecting_concurrent_puts(
        self, table_place: Place
    ) -> None:
        writer = await table_place.write()
        await writer.put({"id": 0, "v": 1})
        records = [{"id": n, "v": "bad" if n % 10 == 0 else n} for n in range(1, 60)]
        results = await asyncio.gather(*map(writer.put, records), return_exceptions=True)
        bad = [r["id"] for r, result in zip(records, results, strict=True) if result]
        assert bad == [10, 20, 30, 40, 50]
        assert all(isinstance(result, SchemaError) for result in results if result)
        assert (await writer.stats())["total_count"] == 1 + 59 - 5


class GroupContract:
    """For the backends with tables."""

    async def test_synchronous_group_reader_commits_nothing_after_an_exception(
        self, table_place: Place
    ) -> None:
        await (await table_place.filled(20)).flush()
        first = await table_place.read(group="g", auto_commit=True)

        def consume() -> None:
            with first.sync() as queue:
                assert len(queue.get(limit=5)) == 5
                raise KeyError("in the middle")

        with pytest.raises(KeyError):
            await asyncio.to_thread(consume)
        async with await table_place.read(group="g") as second:
            assert sorted(ids(await drained(second))) == list(range(20))

    async def test_group_continues_after_its_last_commit(self, table_place: Place) -> None:
        writer = await table_place.filled(60)
        await writer.flush()
        async with await table_place.read(group="g") as first:
            done = await first.get(limit=20)
            await first.commit()
            await first.get(limit=20)
        async with await table_place.read(group="g") as second:
            rest = await drained(second)
            stats = await second.stats()
        assert sorted(ids(done + rest)) == list(range(60))
        assert stats["group_lag"] == 40

    async def test_auto_commit_commits_what_earlier_reads_returned(
        self, table_place: Place
    ) -> None:
        writer = await table_place.filled(60)
        await writer.flush()
        async with await table_place.read(group="g", auto_commit=True) as first:
            done = await first.get(limit=10)
            done += await first.get(limit=10)
        async with await table_place.read(group="g", auto_commit=True) as second:
            rest = await drained(second)
        async with await table_place.read(group="g") as third:
            assert await third.get() == []
            assert (await third.stats())["group_lag"] == 0
        assert sorted(ids(done + rest)) == list(range(60))

    async def test_members_share_buckets_without_overlap_and_hand_them_over(
        self, table_place: Place
    ) -> None:
        writer = await table_place.filled(60)
        await writer.flush()
        first = await table_place.read(group="g")
        second = await table_place.read(group="g")
        await shared_out(first, second, buckets=4)
        assert not set(first.buckets) & set(second.buckets)
        own = await drained(first)
        other = await drained(second)
        assert sorted(ids(own + other)) == list(range(60))
        await first.commit()
        await second.commit()
        await second.close()
        await writer.put(numbered(40, 60))
        await writer.flush()
        found: list[Any] = []
        deadline = time.monotonic() + 60
        while len(found) < 40 and time.monotonic() < deadline:
            found += await first.get(wait=True, timeout=1)
        assert sorted(ids(found)) == list(range(60, 100))

    async def test_groups_are_independent_of_each_other(self, table_place: Place) -> None:
        writer = await table_place.filled(20)
        await writer.flush()
        for group in ("a", "b"):
            async with await table_place.read(group=group) as reader:
                assert sorted(ids(await drained(reader))) == list(range(20))
                await reader.commit()

    async def test_commit_and_auto_commit_need_a_group(self, table_place: Place) -> None:
        await table_place.filled(1)
        reader = await table_place.read()
        with pytest.raises(InvalidArgument, match="group"):
            await reader.commit()
        with pytest.raises(InvalidArgument, match="group"):
            await table_place.read(auto_commit=True)


async def shared_out(*members: Any, buckets: int) -> None:
    """Let the members rebalance until every bucket is assigned to one of them."""
    for _ in range(1200):
        for member in members:
            await member.get(limit=0)
        held = [bucket for member in members for bucket in member.buckets]
        if len(held) == buckets and all(member.buckets for member in members):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the buckets are not shared out: {[m.buckets for m in members]}")


class OnceContract:
    """Idempotent writers, for PersistingBackend with its log."""

    async def test_repeated_sequence_is_stored_once(self, logged_place: Place) -> None:
        writer = await logged_place.write(writer_id="w")
        for _ in range(3):
            await writer.put(numbered(20), sequence=7)
            await writer.put({"id": 99}, sequence=8)
        await writer.put_arrow(pa.table({"id": [100]}), sequence=9)
        await writer.put_arrow(pa.table({"id": [100]}), sequence=9)
        assert (await writer.stats())["total_count"] == 22
        assert await writer.last_sequence() == 9

    async def test_sequences_of_a_writer_id_are_remembered_by_later_writers(
        self, logged_place: Place
    ) -> None:
        for _ in range(3):
            async with await logged_place.write(writer_id="w") as writer:
                await writer.put(numbered(20), sequence=1)
        async with await logged_place.write(writer_id="other") as writer:
            await writer.put(numbered(20), sequence=1)
            assert (await writer.stats())["total_count"] == 40

    async def test_concurrent_sequences_are_all_stored(self, logged_place: Place) -> None:
        writer = await logged_place.write(writer_id="w", num_buckets=1)
        text = "x" * 100_000
        await asyncio.gather(
            *(
                writer.put({"id": n, "text": text if n % 7 == 0 else ""}, sequence=n)
                for n in range(100)
            )
        )
        assert (await writer.stats())["total_count"] == 100

    async def test_concurrent_large_and_small_puts_are_all_stored(
        self, logged_place: Place
    ) -> None:
        writer = await logged_place.write(writer_id="w", num_buckets=2)
        await asyncio.gather(
            writer.put(numbered(6000), sequence=1),
            writer.put({"id": 6000}, sequence=2),
            writer.put_arrow(pa.table({"id": range(6001, 9000)}), sequence=3),
            writer.put([{"id": 9000}], sequence=4),
        )
        assert (await writer.stats())["total_count"] == 9001

    async def test_two_writers_with_one_id_lose_no_acknowledged_put(
        self, logged_place: Place
    ) -> None:
        first = await logged_place.write(writer_id="w", num_buckets=1)
        acknowledged = 0
        try:
            second = await logged_place.write(writer_id="w")
            for number in range(6):
                await (first, second)[number % 2].put({"id": number})
                acknowledged += 1
        except StorageError:
            pass
        assert (await first.stats())["total_count"] >= acknowledged

    @pytest.mark.parametrize("sequence", [-1, 1.5, "1", True, 2**63])
    async def test_invalid_sequence_raises(self, logged_place: Place, sequence: Any) -> None:
        writer = await logged_place.write(writer_id="w")
        with pytest.raises(InvalidArgument, match="sequence"):
            await writer.put({"id": 1}, sequence=sequence)


class QueueContract:
    """The whole contract: pytest collects these classes in each test class that inherits them."""

    TestWriting = WritingContract
    TestReading = ReadingContract
    TestFinding = FindingContract
    TestSchema = SchemaContract
    TestGroups = GroupContract
    TestOnce = OnceContract
