"""Tags of a topic: one consistent point over all buckets, readable for as long as it exists."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import Any

import pytest

from persisting.errors import InvalidArgument
from support.topic_homes import BUCKETS, Home, flat
from support.topic_places import ids, numbered
from support.waiting import until

BRIEF = 0.01
"""A ``keep_versions`` (in seconds) that lets tests clean up old versions immediately."""


async def cleaned(writer: Any) -> None:
    """Compact, and remove every version that nothing pins."""
    # Object stores note times in seconds.
    await asyncio.sleep(1.1 if writer.folder is None else 2 * BRIEF)
    await writer.compact()


class TagContract:
    async def test_tag_describes_what_it_holds(self, home: Home) -> None:
        writer = await home.open()
        reader = await home.read()
        assert await reader.tags() == []
        await writer.put(numbered(30))
        before = dt.datetime.now(dt.timezone.utc)
        made = await writer.tag("first")
        content = await home.content()
        assert (made["name"], made["rows"]) == ("first", 30)
        assert before <= made["timestamp"] <= dt.datetime.now(dt.timezone.utc)
        ends = {b: part["end_offset"] for b, part in made["buckets"].items()}
        assert ends == {b: len(rows) for b, rows in content.items()}
        assert {part["start_offset"] for part in made["buckets"].values()} == {0}
        versions = {b: part["version"] for b, part in made["buckets"].items()}
        assert await reader.get(None, version=versions) == flat(content)
        await writer.put(numbered(5, 30))
        second = await writer.tag("second")
        assert await reader.tags() == [made, second]
        assert await writer.tags() == [made, second]

    async def test_tag_holds_acknowledged_records_and_nothing_put_later(
        self, home: Home, spawned: Any
    ) -> None:
        writer = await home.open(flush_threshold=40, compaction=True)
        begun: set[int] = set()
        done: set[int] = set()
        stop = asyncio.Event()

        async def produce(lane: int) -> None:
            number = lane
            while not stop.is_set():
                batch = [number + 4 * step for step in range(5)]
                begun.update(batch)
                await writer.put([{"id": n} for n in batch])
                done.update(batch)
                number += 20

        lanes = [spawned(produce(lane)) for lane in range(4)]

        async def flowing() -> bool:
            return len(done) >= 40

        await until(flowing)
        bounds = []
        for round_ in range(8):
            least = set(done)
            made = await writer.tag(f"t{round_}")
            bounds.append((f"t{round_}", least, set(begun), made["rows"]))
        stop.set()
        await asyncio.gather(*lanes)
        await writer.compact()
        reader = await home.read()
        for name, least, most, rows in bounds:
            found = ids(await reader.get(None, version=name))
            assert len(found) == len(set(found)) == rows
            assert least <= set(found) <= most, name

    async def test_tag_reads_the_same_whatever_happens_later(self, home: Home) -> None:
        writer = await home.open(keep_versions=BRIEF)
        reader = await home.read()
        await writer.put(numbered(30))
        await writer.tag("early")
        early = flat(await home.content())
        await writer.put(numbered(30, 30))
        await writer.flush()
        await writer.put(numbered(30, 60))
        await writer.tag("late")
        late = flat(await home.content())

        async def unchanged() -> None:
            for name, content in (("early", early), ("late", late)):
                assert await reader.get(None, version=name) == content
                assert (await reader.get_arrow(version=name)).to_pylist() == content
            for name, rows in (("early", 30), ("late", 90)):
                (tag,) = [t for t in await reader.tags() if t["name"] == name]
                assert tag["rows"] == rows

        await writer.put(numbered(30, 90))
        await writer.flush()
        await unchanged()
        await cleaned(writer)
        await unchanged()
        await writer.create_index("id")
        await cleaned(writer)
        await unchanged()
        assert (await writer.retain(rows=0))["dropped"] == 120
        await cleaned(writer)
        await unchanged()
        await writer.put(numbered(10, 200))
        await writer.restore("early")
        await cleaned(writer)
        assert flat(await home.content()) == early
        await unchanged()
        writer = await home.reopen()
        reader = await home.read()
        await unchanged()
        await writer.restore("late")
        await writer.put(numbered(10, 300))
        await cleaned(writer)
        await unchanged()
        assert (await reader.verify())["ok"]

    async def test_versions_without_a_tag_are_cleaned_up(self, home: Home) -> None:
        writer = await home.open(keep_versions=BRIEF)
        await writer.put(numbered(30))
        made = await writer.tag("t")
        versions = {b: part["version"] for b, part in made["buckets"].items()}
        content = flat(await home.content())
        await writer.put(numbered(30, 30))
        await cleaned(writer)
        reader = await home.read()
        assert await reader.get(None, version=versions) == content
        assert await writer.delete_tag("t") is True
        await writer.put(numbered(30, 60))
        await cleaned(writer)
        with pytest.raises(InvalidArgument, match="does not exist"):
            await reader.get(None, version=versions)
        kept = {(v["bucket"], v["version"]) for v in await reader.versions()}
        assert not kept & set(versions.items())

    async def test_deleted_tag_no_longer_exists(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(30))
        await writer.tag("t")
        await writer.tag("other")
        assert await writer.delete_tag("t") is True
        assert await writer.delete_tag("t") is False
        assert await writer.delete_tag("never") is False
        reader = await home.read()
        assert [t["name"] for t in await reader.tags()] == ["other"]
        for use in (reader.get(version="t"), reader.get_arrow(version="t"), writer.restore("t")):
            with pytest.raises(InvalidArgument, match="'other'"):
                await use
        assert len(await reader.get(None, version="other")) == 30

    async def test_tag_of_an_existing_name_replaces_it(self, home: Home) -> None:
        writer = await home.open(keep_versions=BRIEF)
        reader = await home.read()
        await writer.put(numbered(30))
        await writer.tag("t")
        await writer.put(numbered(30, 30))
        made = await writer.tag("t")
        content = flat(await home.content())
        await writer.put(numbered(30, 60))
        await cleaned(writer)
        assert await reader.tags() == [made]
        assert await reader.get(None, version="t") == content

    async def test_concurrent_tags_of_one_name_leave_one_complete_tag(
        self, home: Home, spawned: Any
    ) -> None:
        writer = await home.open(keep_versions=BRIEF)
        other = await home.write(backend_options={})
        stop = asyncio.Event()

        async def produce() -> None:
            number = 0
            while not stop.is_set():
                await writer.put({"id": number})
                number += 1

        producing = spawned(produce())
        reader = await home.read()
        for _ in range(4):
            made = await asyncio.gather(*(w.tag("t") for w in (writer, other, writer)))
            await cleaned(writer)
            (tag,) = await reader.tags()
            assert tag in made
            found = ids(await reader.get(None, version="t"))
            assert len(found) == len(set(found)) == tag["rows"]
        stop.set()
        await producing

    async def test_tag_concurrent_with_its_deletion_is_complete_or_deleted(
        self, home: Home
    ) -> None:
        writer = await home.open(keep_versions=BRIEF)
        other = await home.write(backend_options={})
        reader = await home.read()
        number = 0
        for _ in range(6):
            await writer.put(numbered(6, number))
            number += 6
            made, _ = await asyncio.gather(writer.tag("t"), other.delete_tag("t"))
            await writer.put(numbered(6, number))
            number += 6
            await cleaned(writer)
            if await reader.tags():
                assert await reader.tags() == [made]
                assert len(await reader.get(None, version="t")) == made["rows"]

    async def test_empty_topic_and_empty_buckets_can_be_tagged(self, home: Home) -> None:
        writer = await home.open()
        reader = await home.read()
        made = await writer.tag("nothing")
        assert (made["rows"], len(made["buckets"])) == (0, BUCKETS)
        await writer.put({"id": 1})
        assert (await writer.tag("one"))["rows"] == 1
        await writer.put(numbered(30, 10))
        await writer.flush()
        assert await reader.get(version="nothing") == []
        assert (await reader.get_arrow(version="nothing")).num_rows == 0
        assert await reader.get(version="one") == [{"id": 1}]
        assert (await reader.get_arrow(version="one")).to_pylist() == [{"id": 1}]
        assert (await writer.restore("one"))["removed"] == 30
        assert flat(await home.content()) == [{"id": 1}]
        await writer.restore("nothing")
        assert flat(await home.content()) == []
        await writer.put({"id": 2})
        assert flat(await home.content()) == [{"id": 2}]

    async def test_invalid_tag_name_raises(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(3))
        for name in ("", "a b", "a/b", "../a", ".a", "a.", "x" * 129, "ü", None, 5):
            for use in (writer.tag(name), writer.delete_tag(name)):
                with pytest.raises(InvalidArgument, match="tag"):
                    await use
        assert await writer.tags() == []

    async def test_every_valid_tag_name_can_be_read(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(3))
        reader = await home.read()
        names = ["a", "A", "0", "v1.2-rc_3", "x" * 128, "json", "a.json", "-", "_"]
        for name in names:
            await writer.tag(name)
            assert len(await reader.get(version=name)) == 3
        assert sorted(t["name"] for t in await reader.tags()) == sorted(names)
