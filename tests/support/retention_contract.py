"""Retention: old rows go, and the offsets of the others stay."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest

from persisting.errors import InvalidArgument, OffsetOutOfRange
from support.topic_homes import BUCKETS, Following, Home, flat, taken
from support.topic_places import drained, ids, numbered, streamed
from support.waiting import until


async def in_steps(home: Home, steps: int = 4, count: int = 30, **options: Any) -> Any:
    """Return a writer after ``steps`` flushes: every bucket has a fragment for each."""
    writer = await home.open(**options)
    for step in range(steps):
        await writer.put(numbered(count, step * count))
        await writer.flush()
    return writer


class RetentionContract:
    async def test_retention_drops_the_oldest_rows_and_keeps_other_offsets(
        self, home: Home
    ) -> None:
        writer = await in_steps(home)
        content = await home.content()
        reader = await home.read()
        pairs = [(b, o) for b in range(BUCKETS) for o in range(len(content[b]))]
        done = await writer.retain(rows=12)
        starts = done["start_offsets"]
        assert done["dropped"] == sum(starts.values()) > 0
        stats = await reader.stats()
        for bucket in range(BUCKETS):
            left = len(content[bucket]) - starts[bucket]
            assert left >= 12
            own = stats["buckets"][bucket]
            assert (own["start_offset"], own["end_offset"]) == (
                starts[bucket],
                len(content[bucket]),
            )
            assert own["total_count"] == left
        assert stats["total_count"] == 120 - done["dropped"]
        kept = [(b, o) for b, o in pairs if o >= starts[b]]
        assert await reader.take(kept) == [content[b][o] for b, o in kept]
        assert await reader.query() == [content[b][o] for b, o in kept]
        for bucket in range(BUCKETS):
            with pytest.raises(OffsetOutOfRange, match=str(starts[bucket])):
                await reader.take([(bucket, starts[bucket] - 1)])
        lost = content[0][0]["id"]
        assert await reader.lookup("id", lost) == []
        await writer.put(numbered(30, 500))
        after = await home.content()
        for bucket in range(BUCKETS):
            assert after[bucket][: len(content[bucket]) - starts[bucket]] == [
                content[bucket][o] for o in range(starts[bucket], len(content[bucket]))
            ]
        assert (await writer.retain(rows=10**6))["dropped"] == 0

    async def test_offset_0_means_the_earliest_and_an_offset_below_the_start_raises(
        self, home: Home
    ) -> None:
        writer = await in_steps(home)
        starts = (await writer.retain(rows=12))["start_offsets"]
        left = flat(await home.content())
        reader = await home.read()
        assert sorted(ids(await reader.get(None))) == sorted(ids(left))
        assert sorted(ids(await streamed(reader, offset=0))) == sorted(ids(left))
        assert (await reader.get_arrow(offset=0)).num_rows == len(left)
        below = min(starts.values()) - 1
        for read in (streamed(reader, offset=below), reader.get_arrow(offset=below)):
            with pytest.raises(OffsetOutOfRange):
                await read
        await reader.set_offset(below)
        for read in (reader.get(), reader.get_arrow(), streamed(reader)):
            with pytest.raises(OffsetOutOfRange, match="retention"):
                await read
        with pytest.raises(OffsetOutOfRange):
            await reader.get(wait=True, timeout=5)
        await reader.reset()
        assert sorted(ids(await drained(reader))) == sorted(ids(left))

    async def test_cursor_overtaken_by_retention_raises_until_it_is_reset(self, home: Home) -> None:
        writer = await in_steps(home)
        reader, fresh = await home.read(), await home.read()
        assert len(await reader.get(9)) == 9
        await writer.retain(rows=12)
        left = sorted(ids(flat(await home.content())))
        for _ in range(2):
            with pytest.raises(OffsetOutOfRange):
                await reader.get()
        assert sorted(ids(await drained(fresh))) == left
        await reader.reset()
        assert sorted(ids(await drained(reader))) == left
        await writer.put(numbered(10, 500))
        assert sorted(ids(await drained(reader))) == list(range(500, 510))

    async def test_reader_beyond_the_dropped_rows_is_not_affected(self, home: Home) -> None:
        writer = await in_steps(home)
        reader = await home.read()
        assert len(await reader.get(None)) == 120
        starts = (await writer.retain(rows=0))["start_offsets"]
        assert await reader.get() == []
        await writer.put(numbered(10, 500))
        assert sorted(ids(await drained(reader))) == list(range(500, 510))
        assert reader.offsets() != starts

    async def test_lag_counts_only_rows_that_retention_left(self, home: Home) -> None:
        writer = await in_steps(home)
        reader, member = await home.read(), await home.read(group="g")
        await member.get(0)
        dropped = (await writer.retain(rows=12))["dropped"]
        stats = await reader.stats()
        assert stats["lag"] == stats["total_count"] == 120 - dropped
        stats = await member.stats()
        assert stats["group_lag"] == stats["lag"] == 120 - dropped
        assert len(await drained(member)) == 120 - dropped
        await member.commit()
        assert (await member.stats())["group_lag"] == 0

    async def test_seek_works_on_the_rows_that_retention_left(self, home: Home) -> None:
        writer = await in_steps(home)
        await asyncio.sleep(0.01)
        between = time.time()
        await asyncio.sleep(0.01)
        await writer.put(numbered(30, 120))
        await writer.flush()
        starts = (await writer.retain(rows=20))["start_offsets"]
        reader = await home.read()
        assert await reader.seek(timestamp=0) == starts
        assert sorted(ids(await drained(reader))) == sorted(ids(flat(await home.content())))
        await reader.seek(timestamp=between)
        assert sorted(ids(await drained(reader))) == list(range(120, 150))
        await reader.seek(timestamp=time.time() + 60)
        assert await reader.get() == []

    async def test_long_read_overtaken_by_retention_returns_each_record_once(
        self, home: Home
    ) -> None:
        writer = await home.open()
        await writer.put(numbered(30_000))
        await writer.flush()
        reader = await home.read()
        found, _ = await asyncio.gather(reader.get(limit=None), writer.retain(rows=0))
        assert len(set(ids(found))) == len(found)

    async def test_topic_emptied_by_retention_accepts_new_records(self, home: Home) -> None:
        writer = await in_steps(home, 2)
        await writer.create_index("id")
        reader = await home.read()
        ends = {b["bucket_id"]: b["end_offset"] for b in (await writer.stats())["buckets"]}
        done = await writer.retain(seconds=0)
        assert (done["dropped"], done["start_offsets"]) == (60, ends)
        assert flat(await home.content()) == []
        assert await reader.query() == await reader.get() == []
        assert (await reader.get_arrow(offset=0)).num_rows == 0
        assert await reader.seek(timestamp=0) == ends
        assert (await writer.retain(rows=0, seconds=0))["dropped"] == 0
        await writer.put(numbered(30, 100))
        assert sorted(ids(await drained(reader))) == list(range(100, 130))
        assert ids(await reader.lookup("id", 117)) == [117]
        await writer.compact()
        writer = await home.reopen()
        stats = await writer.stats()
        assert {b["bucket_id"]: b["start_offset"] for b in stats["buckets"]} == ends
        assert sorted(ids(flat(await home.content()))) == list(range(100, 130))

    async def test_retention_limits_bytes_and_age(self, home: Home) -> None:
        writer = await in_steps(home)
        sizes = [b["table_bytes"] for b in (await writer.stats())["buckets"]]
        done = await writer.retain(bytes=min(sizes) // 2)
        assert all(start > 0 for start in done["start_offsets"].values())
        for bucket in (await writer.stats())["buckets"]:
            assert min(sizes) // 2 <= bucket["table_bytes"] < min(sizes)
        assert (await writer.retain(seconds=3600))["dropped"] == 0
        assert (await writer.retain(bytes=0))["dropped"] == 120 - done["dropped"]

    async def test_invalid_retention_limits_drop_nothing(self, home: Home) -> None:
        writer = await in_steps(home, 1)
        wrong: list[dict[str, Any]] = [
            {},
            {"rows": -1},
            {"rows": "5"},
            {"seconds": float("nan")},
            {"bytes": True},
        ]
        for limits in wrong:
            with pytest.raises(InvalidArgument):
                await writer.retain(**limits)
        assert (await writer.stats())["total_count"] == 30

    async def test_retention_keeps_what_a_group_has_not_committed(self, home: Home) -> None:
        writer = await in_steps(home, retention_waits_for=["groups"])
        quick, slow = await home.read(group="quick"), await home.read(group="slow")
        first = await drained(quick)
        await quick.commit()
        some = await slow.get(45)
        await slow.commit()
        committed = (await slow.stats())["committed"]
        starts = (await writer.retain(rows=0))["start_offsets"]
        assert all(starts[b] <= committed[b] for b in range(BUCKETS))
        assert sum(starts.values()) > 0
        some += await drained(slow)
        assert sorted(ids(some)) == sorted(ids(first)) == list(range(120))
        await slow.commit()
        assert (await writer.retain(rows=0))["dropped"] == 120 - sum(starts.values())

    async def test_retention_keeps_what_a_group_must_read_again_after_a_restore(
        self, home: Home
    ) -> None:
        writer = await home.open(retention_waits_for=["groups"])
        await writer.put(numbered(30))
        await writer.tag("t")
        await writer.put(numbered(60, 30))
        member = await home.read(group="g")
        assert len(await drained(member)) == 90
        await member.commit()
        await member.close()
        await writer.restore("t")
        for start in (1000, 1030, 1060, 1090):
            await writer.put(numbered(30, start))
            await writer.flush()
        await writer.retain(rows=0)
        heir = await home.read(group="g")
        assert sorted(ids(await drained(heir))) == list(range(1000, 1120))

    async def test_groups_do_not_delay_retention_by_default(self, home: Home) -> None:
        writer = await in_steps(home)
        member = await home.read(group="g")
        assert len(await member.get(9)) == 9
        await member.commit()
        assert (await writer.retain(rows=0))["dropped"] == 120
        with pytest.raises(OffsetOutOfRange):
            await member.get()
        await member.reset()
        assert await member.get() == []
        await writer.put(numbered(10, 500))
        assert sorted(ids(await drained(member))) == list(range(500, 510))
        await member.commit()
        await member.close()
        heir = await home.read(group="g")
        assert await heir.get() == []

    async def test_tags_delay_retention_by_option_and_are_always_readable(self, home: Home) -> None:
        writer = await in_steps(home, 2, retention_waits_for=["tags"])
        assert (await writer.retain(rows=0))["dropped"] == 60
        for step in (2, 3):
            await writer.put(numbered(30, 30 * step))
            await writer.flush()
        await writer.tag("t")
        held = flat(await home.content())
        await writer.put(numbered(30, 120))
        await writer.flush()
        assert (await writer.retain(rows=0))["dropped"] == 0
        reader = await home.read()
        assert await reader.get(None, version="t") == held
        await writer.delete_tag("t")
        assert (await writer.retain(rows=0))["dropped"] == 90

    async def test_older_version_keeps_dropped_rows_at_their_offsets(self, home: Home) -> None:
        writer = await in_steps(home)
        content = await home.content()
        made = await writer.tag("t")
        await writer.retain(rows=12)
        later = await writer.tag("later")
        reader = await home.read()
        assert await reader.get(None, version="t") == flat(content)
        assert await reader.get(None, version="later") == flat(await home.content())
        for bucket in range(BUCKETS):
            start = later["buckets"][bucket]["start_offset"]
            assert made["buckets"][bucket]["start_offset"] == 0 < start
            end = later["buckets"][bucket]["end_offset"]
            assert end == made["buckets"][bucket]["end_offset"] == len(content[bucket])
            alone = await home.read(bucket_id=bucket)
            assert (
                await alone.get(3, offset=start - 2, version="t")
                == (content[bucket][start - 2 : start + 1])
            )
            assert (
                await alone.get(3, offset=start, version="later")
                == (content[bucket][start : start + 3])
            )
            with pytest.raises(OffsetOutOfRange):
                await alone.get(3, offset=start - 1, version="later")

    async def test_restore_brings_back_rows_that_retention_dropped(self, home: Home) -> None:
        writer = await in_steps(home)
        content = await home.content()
        await writer.tag("t")
        await writer.retain(rows=0)
        await writer.put(numbered(30, 500))
        done = await writer.restore("t")
        assert {part["start_offset"] for part in done["buckets"].values()} == {0}
        assert await home.content() == content
        reader = await home.read()
        await reader.set_offset(3)
        assert len(await reader.get(None)) == 120 - 3 * BUCKETS

    async def test_blocking_stream_that_keeps_up_continues_across_retention(
        self, home: Home
    ) -> None:
        writer = await home.open()
        reader = await home.read()
        async with aclosing(Following(reader.get_stream(block=True))) as tail:
            for step in range(4):
                await writer.put(numbered(30, 30 * step))
                await tail.reaches(30 * (step + 1))
                await writer.flush()
                await writer.retain(rows=0)
            assert sorted(tail.found) == list(range(120))

    async def test_stream_overtaken_by_retention_raises(self, home: Home) -> None:
        writer = await in_steps(home, 4, 2000)
        reader = await home.read()
        stream = reader.get_stream()
        first = await anext(stream)
        await writer.retain(rows=0)
        await writer.put(numbered(30, 100_000))
        with pytest.raises(OffsetOutOfRange):
            await reader.get_arrow()
        await stream.aclose()
        await reader.reset()
        assert first["id"] < 8000
        assert sorted(ids(await drained(reader))) == list(range(100_000, 100_030))

    async def test_retention_options_drop_rows_automatically(self, home: Home) -> None:
        writer = await home.open(retention_rows=20)
        reader = await home.read()

        async def dropped() -> bool:
            buckets = (await reader.stats())["buckets"]
            return all(b["start_offset"] > 0 for b in buckets)

        for step in range(6):
            await writer.put(numbered(30, 30 * step))
            await writer.flush()
        await until(dropped)
        stats = await reader.stats()
        assert all(b["total_count"] >= 20 for b in stats["buckets"])
        assert all(b["upkeep_error"] is None for b in stats["buckets"])
        found = {n["id"] for n in await reader.get(None)}
        assert set(range(150, 180)) <= found

    async def test_retention_by_age_needs_no_further_puts(self, home: Home) -> None:
        writer = await home.open(retention_seconds=0.5)
        await writer.put(numbered(30))
        await writer.flush()
        reader = await home.read()

        async def gone() -> bool:
            return (await reader.stats())["total_count"] == 0

        await until(gone)
        assert await reader.get() == []
        await writer.put(numbered(5, 100))
        assert sorted(await taken(reader, 5)) == list(range(100, 105))


FRAGMENTS, ROWS = 100, 1000
"""More fragments than Lance reads ahead (about 24), so that a slow reader opens files late."""
SMALL = {"flush_interval": None, "compaction": False}


async def in_fragments(writer: Any) -> None:
    step = ROWS // FRAGMENTS
    for start in range(0, ROWS, step):
        await writer.put(numbered(step, start))
        await writer.flush()


class SlowContract:
    """Slow readers during compaction and the removal of old versions."""

    async def test_slow_stream_reads_everything_once_and_in_order(self, home: Home) -> None:
        options = {**(home.options or {}), **SMALL, "keep_versions": 0.1}
        writer = await home.write(num_buckets=1, backend_options=options)
        await in_fragments(writer)
        reader = await home.read()
        found: list[int] = []
        async for record in reader.get_stream():
            found.append(record["id"])
            if len(found) == 10:
                read = max(version["version"] for version in await writer.versions())
                assert (await writer.compact())["fragments_after"] == 1
                await asyncio.sleep(0.15)
                await writer.put({"id": 10**6})
                await writer.compact()
                assert read not in {v["version"] for v in await writer.versions()}
        assert found[:ROWS] == list(range(ROWS))
        assert found[ROWS:] in ([], [10**6])

    async def test_long_read_of_a_removed_version_restarts_or_raises(
        self, home: Home, spawned: Any
    ) -> None:
        writer = await home.open(keep_versions=0.05, flush_threshold=30, compaction=True)
        await writer.put([{"id": n, "v": [float(n), 0.0]} for n in range(200)])
        stop = asyncio.Event()

        async def produce() -> None:
            number = 200
            while not stop.is_set():
                await writer.put(
                    [{"id": n, "v": [float(n), 0.0]} for n in range(number, number + 20)]
                )
                number += 20
                await writer.compact()

        producing = spawned(produce())
        reader = await home.read()
        for _ in range(25):
            assert len(await reader.query("id < 200")) == 200
            assert ids(await reader.search(vector=[7.1, 0.0], k=1)) == [7]
            assert (await reader.get_arrow(offset=0)).num_rows >= 200
            await reader.versions()
            await reader.indexes()
            await reader.stats()
        stop.set()
        await producing
