"""Restoring a topic: readers and groups follow, and miss nothing that is put later."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from contextlib import aclosing
from typing import Any

import pytest

from persisting.errors import InvalidArgument
from persisting.topic.routing import route
from support.topic_homes import BUCKETS, Following, Home, flat, taken, with_two_flushes
from support.topic_places import WAL, drained, ids, numbered, streamed


async def tagged(home: Home, before: int = 30, after: int = 30, **options: Any) -> Any:
    """Return a writer that has put ``before`` records, tagged them "t", and put ``after`` more."""
    writer = await home.open(**options)
    await writer.put(numbered(before))
    await writer.tag("t")
    await writer.put(numbered(after, before))
    return writer


class RestoreContract:
    async def test_restored_topic_equals_the_tag_and_accepts_new_records(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(30))
        await writer.tag("t")
        content = await home.content()
        await writer.put(numbered(20, 30))
        await writer.flush()
        await writer.put(numbered(10, 50))
        done = await writer.restore("t")
        assert done["removed"] == 30
        assert done["groups"] == []
        for bucket, part in done["buckets"].items():
            assert part["end_offset"] == len(content[bucket])
            assert (part["start_offset"], part["epoch"]) == (0, 1)
        assert await home.content() == content
        await writer.put(numbered(30, 100))
        after = await home.content()
        for bucket in range(BUCKETS):
            fresh = [r for r in numbered(30, 100) if route(r, "id", BUCKETS) == bucket]
            assert after[bucket] == content[bucket] + fresh
        stats = await writer.stats()
        assert [b["epoch"] for b in stats["buckets"]] == [1] * BUCKETS
        assert stats["total_count"] == 60
        writer = await home.reopen()
        assert await home.content() == after
        assert [b["epoch"] for b in (await writer.stats())["buckets"]] == [1] * BUCKETS

    async def test_versions_before_a_restore_can_still_be_read(self, home: Home) -> None:
        writer = await tagged(home)
        await writer.tag("whole")
        whole = flat(await home.content())
        await writer.restore("t")
        await writer.put(numbered(5, 100))
        reader = await home.read()
        assert await reader.get(None, version="whole") == whole
        operations = {v["operation"] for v in await reader.versions()}
        assert "restore" in operations
        await writer.restore("whole")
        assert flat(await home.content()) == whole
        assert [b["epoch"] for b in (await writer.stats())["buckets"]] == [2] * BUCKETS

    async def test_restore_to_a_timestamp_empties_buckets_that_were_empty_then(
        self, home: Home
    ) -> None:
        writer = await home.open()
        reader = await home.read()
        await writer.put({"id": 1})
        await writer.flush()
        moment = max(v["timestamp"] for v in await reader.versions())
        await asyncio.sleep(0.01)
        await writer.put({"id": 1})
        await writer.flush()
        naive = moment.astimezone().replace(tzinfo=None)
        assert (await writer.restore(naive))["removed"] == 1
        assert flat(await home.content()) == [{"id": 1}]
        await writer.put(numbered(30, 10))
        await writer.flush()
        assert (await writer.restore(moment))["removed"] == 30
        assert flat(await home.content()) == [{"id": 1}]
        await writer.restore(moment - dt.timedelta(days=1))
        assert flat(await home.content()) == []

    async def test_single_bucket_is_restored_without_the_others(self, home: Home) -> None:
        writer, content = await with_two_flushes(home)
        whole = await home.content()
        versions = await writer.versions()
        first = next(v["version"] for v in versions if v["bucket"] == 1 and v["rows"])
        done = await writer.restore({1: first})
        assert list(done["buckets"]) == [1]
        assert await home.content() == {**whole, 1: content[1]}
        assert [b["epoch"] for b in (await writer.stats())["buckets"]] == [0, 1, 0]

    async def test_restore_to_an_invalid_version_changes_nothing(self, home: Home) -> None:
        writer = await tagged(home)
        await writer.flush()
        content = await home.content()
        for version in ("nope", {0: 99}, {9: 1}, {0: 1, 1: 99}, {}, 1, True, None, 2.5):
            with pytest.raises(InvalidArgument):
                await writer.restore(version)
        assert await home.content() == content
        assert [b["epoch"] for b in (await writer.stats())["buckets"]] == [0] * BUCKETS

    async def test_reader_beyond_the_restored_end_continues_there_with_a_warning(
        self, home: Home, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer = await tagged(home)
        reader = await home.read()
        assert len(await drained(reader)) == 60
        await writer.restore("t")
        with caplog.at_level(logging.WARNING, "persisting"):
            assert await reader.get() == []
        assert "restored" in caplog.text
        await writer.put(numbered(20, 100))
        assert sorted(ids(await drained(reader))) == list(range(100, 120))
        stats = await reader.stats()
        assert (stats["lag"], stats["total_count"]) == (0, 50)

    async def test_reader_before_the_restored_end_is_not_affected(self, home: Home) -> None:
        writer = await tagged(home)
        reader = await home.read()
        content = await home.content()
        first = await reader.get(9)
        await writer.restore("t")
        await writer.put(numbered(20, 100))
        rest = await drained(reader)
        assert sorted(ids(first + rest)) == [*range(30), *range(100, 120)]
        assert len(flat(content)) == 60

    async def test_records_put_after_a_restore_are_never_skipped(self, home: Home) -> None:
        """Even if the end has passed the readers' old offsets before they read again."""
        writer = await tagged(home, 30, 30)
        by_get, by_arrow, by_stream, sought = [await home.read() for _ in range(4)]
        assert len(await drained(by_get)) == 60
        assert (await by_arrow.get_arrow()).num_rows == 60
        assert len(await streamed(by_stream)) == 60
        await sought.seek(timestamp=time.time() + 60)
        await writer.restore("t")
        await writer.put(numbered(100, 1000))
        fresh = list(range(1000, 1100))
        assert sorted(ids(await drained(by_get))) == fresh
        assert sorted((await by_arrow.get_arrow()).column("id").to_pylist()) == fresh
        assert sorted(ids(await streamed(by_stream))) == fresh
        assert sorted(ids(await drained(sought))) == fresh

    async def test_seek_that_is_cancelled_skips_nothing_put_after_a_restore(
        self, home: Home
    ) -> None:
        writer = await home.open()
        await writer.put(numbered(20))
        await writer.tag("one")
        await writer.put(numbered(20, 20))
        reader = await home.read()
        assert len(await drained(reader)) == 40
        await writer.restore("one")
        await writer.put(numbered(40, 100))
        for steps in range(12):
            for call in (reader.seek(timestamp=0), reader.set_offset(0)):
                task = asyncio.ensure_future(call)
                for _ in range(steps):
                    await asyncio.sleep(0)
                if task.done():
                    await reader.set_offset(0)
                task.cancel()
                await asyncio.wait([task])
        found = ids(await drained(reader))
        assert set(found) >= set(range(100, 140))

    async def test_undone_restore_delivers_records_that_had_not_been_read(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(20))
        await writer.tag("mistake")
        reader, group = await home.read(), await home.read(group="g")
        for one in (reader, group):
            assert len(await drained(one)) == 20
        await group.commit()
        await writer.put(numbered(40, 20))
        await writer.tag("all")
        await writer.restore("mistake")
        await writer.put(numbered(40, 100))
        for one in (reader, group):
            assert sorted(ids(await drained(one))) == list(range(100, 140))
        await group.commit()
        done = await writer.restore("all")
        assert {one["group"] for one in done["groups"]} == {"g"}
        for one in (reader, group):
            assert sorted(ids(await drained(one))) == list(range(20, 60))

    async def test_waiting_get_returns_records_put_after_a_restore(
        self, home: Home, spawned: Any
    ) -> None:
        writer = await tagged(home)
        reader = await home.read()
        assert len(await drained(reader)) == 60
        waiting = spawned(taken(reader, 12))
        await asyncio.sleep(0.2)
        await writer.restore("t")
        await writer.put(numbered(12, 100))
        assert sorted(await waiting) == list(range(100, 112))

    async def test_blocking_stream_continues_across_restores(self, home: Home) -> None:
        writer = await tagged(home)
        reader = await home.read()
        async with aclosing(Following(reader.get_stream(block=True))) as tail:
            assert sorted(await tail.reaches(60)) == list(range(60))
            await writer.restore("t")
            await writer.put(numbered(12, 100))
            assert sorted((await tail.reaches(72))[60:]) == list(range(100, 112))
            await writer.restore("t")
            await writer.put(numbered(90, 200))
            assert sorted((await tail.reaches(162))[72:]) == list(range(200, 290))
            await writer.put(numbered(5, 400))
            assert sorted((await tail.reaches(167))[162:]) == list(range(400, 405))

    async def test_blocking_stream_started_after_a_restore_misses_nothing(self, home: Home) -> None:
        writer = await tagged(home)
        reader = await home.read()
        assert len(await drained(reader)) == 60
        await writer.restore("t")
        await writer.put(numbered(6, 100))
        async with aclosing(Following(reader.get_stream(block=True))) as tail:
            assert sorted(await tail.reaches(6)) == list(range(100, 106))
            await writer.put(numbered(6, 106))
            assert sorted(await tail.reaches(12)) == list(range(100, 112))

    async def test_stream_from_an_offset_continues_across_a_restore_without_repeats(
        self, home: Home
    ) -> None:
        writer = await tagged(home)
        content = await home.content()
        expected = sorted(r["id"] for rows in content.values() for r in rows[2:])
        reader = await home.read()
        async with aclosing(Following(reader.get_stream(offset=2, block=True))) as tail:
            assert sorted(await tail.reaches(len(expected))) == expected
            await writer.restore("t")
            await writer.put(numbered(12, 100))
            fresh = (await tail.reaches(len(expected) + 12))[len(expected) :]
            assert sorted(fresh) == list(range(100, 112))
        assert sorted(ids(await drained(reader))) == [*range(30), *range(100, 112)]

    async def test_stream_from_an_offset_and_gets_of_one_reader_both_follow_a_restore(
        self, home: Home
    ) -> None:
        writer = await tagged(home)
        reader = await home.read()
        assert len(await drained(reader)) == 60
        async with aclosing(Following(reader.get_stream(offset=0, block=True))) as tail:
            await tail.reaches(60)
            await writer.restore("t")
            await writer.put(numbered(12, 100))
            assert sorted(await taken(reader, 12)) == list(range(100, 112))
            assert sorted((await tail.reaches(72))[60:]) == list(range(100, 112))

    async def test_group_beyond_the_restored_end_is_reported_and_moved_back(
        self, home: Home
    ) -> None:
        writer = await tagged(home)
        member = await home.read(group="g")
        assert len(await drained(member)) == 60
        committed = await member.commit()
        behind = await home.read(group="behind")
        await behind.get(3)
        await behind.commit()
        done = await writer.restore("t")
        ends = {b: part["end_offset"] for b, part in done["buckets"].items()}
        reported = {(g["group"], g["bucket"]): (g["committed"], g["end"]) for g in done["groups"]}
        assert reported == {("g", b): (o, ends[b]) for b, o in committed.items() if o > ends[b]}
        await writer.put(numbered(20, 100))
        stats = await member.stats()
        assert stats["group_lag"] == 20
        assert stats["committed"] == ends
        assert sorted(ids(await drained(member))) == list(range(100, 120))
        await member.commit()
        assert (await member.stats())["group_lag"] == 0
        rest = await drained(behind)
        assert len(rest) == 30 - 3 + 20

    @pytest.mark.parametrize("more", [5, 60], ids=["below", "above"])
    async def test_commit_of_an_older_epoch_skips_nothing_put_later(
        self, home: Home, more: int
    ) -> None:
        writer = await tagged(home)
        member = await home.read(group="g")
        assert len(await drained(member)) == 60
        await writer.restore("t")
        await writer.put(numbered(more, 1000))
        await member.commit()
        await member.close()
        heir = await home.read(group="g")
        assert sorted(ids(await drained(heir))) == list(range(1000, 1000 + more))
        await heir.commit()
        await heir.close()
        last = await home.read(group="g")
        assert await last.get() == []

    async def test_auto_commit_across_a_restore_delivers_all_later_records(
        self, home: Home
    ) -> None:
        writer = await tagged(home)
        member = await home.read(group="g", auto_commit=True)
        assert len(await drained(member)) == 60
        await writer.restore("t")
        await writer.put(numbered(60, 1000))
        found = await drained(member, 7)
        await member.close()
        heir = await home.read(group="g", auto_commit=True)
        found += await drained(heir)
        assert sorted(ids(found)) == list(range(1000, 1060))

    async def test_put_concurrent_with_a_restore_is_kept_or_removed_as_a_whole(
        self, home: Home, spawned: Any
    ) -> None:
        writer = await home.open(flush_threshold=25)
        await writer.put(numbered(30))
        await writer.tag("t")
        begun: list[int] = []
        done: list[int] = []
        stop = asyncio.Event()

        async def produce(lane: int) -> None:
            number = 10**6 * (lane + 1)
            while not stop.is_set():
                begun.append(number)
                await writer.put({"id": number})
                done.append(number)
                number += 1

        lanes = [spawned(produce(lane)) for lane in range(3)]
        for _ in range(4):
            await asyncio.sleep(0.05)
            before = set(done)
            await writer.restore("t")
            after = set(begun)
        stop.set()
        await asyncio.gather(*lanes)
        found = ids(flat(await home.content()))
        assert len(found) == len(set(found))
        later = set(found) - set(range(30))
        assert set(range(30)) <= set(found)
        assert not later & before
        assert set(done) - after <= later
        for lane in range(3):
            own = [n for n in sorted(later) if n // 10**6 == lane + 1]
            for bucket in range(BUCKETS):
                mine = [n for n in own if route({"id": n}, "id", BUCKETS) == bucket]
                members = set(mine)
                assert [n for n in found if n in members] == mine

    async def test_two_concurrent_restores_both_complete(self, home: Home) -> None:
        writer = await tagged(home)
        other = await home.write(backend_options={})
        content = await other.query("id < 30")
        results = await asyncio.gather(
            writer.restore("t"), other.restore("t"), return_exceptions=True
        )
        assert any(isinstance(one, dict) for one in results), results
        assert await writer.query() == content
        await writer.put(numbered(5, 100))
        assert len(await writer.query()) == 35


class LoggedRestoreContract:
    """With a log, which holds records that are acknowledged and not flushed."""

    async def test_logged_records_before_a_restore_are_not_replayed(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(30), sequence=1)
        await writer.tag("t")
        await writer.put(numbered(30, 30), sequence=2)
        await writer.restore("t")
        stats = await writer.stats()
        assert (stats["total_count"], stats["buffer_count"]) == (30, 0)
        await writer.put(numbered(10, 100), sequence=3)
        await writer.put(numbered(10, 100), sequence=3)
        assert await writer.last_sequence() == 3
        writer = await home.reopen()
        assert sorted(ids(await writer.query())) == [*range(30), *range(100, 110)]

    async def test_writer_can_store_removed_sequences_again_after_a_restore(
        self, home: Home
    ) -> None:
        writer = await home.write(
            num_buckets=BUCKETS, writer_id="w", backend_options={**WAL, "flush_interval": None}
        )
        await writer.put(numbered(30), sequence=1)
        await writer.tag("t")
        await writer.put(numbered(30, 30), sequence=2)
        await writer.flush()
        await writer.put(numbered(30, 60), sequence=3)
        await writer.restore("t")
        assert await writer.last_sequence() == 1
        for _ in range(2):
            await writer.put(numbered(30), sequence=1)
            await writer.put(numbered(30, 30), sequence=2)
        assert sorted(ids(await writer.query())) == list(range(60))
        await home.close()
        writer = await home.write(writer_id="w", backend_options={})
        assert await writer.last_sequence() == 2
        await writer.put(numbered(30, 60), sequence=3)
        assert sorted(ids(await writer.query())) == list(range(90))
