"""A tag is one consistent point over all buckets of a topic, and stays what it was."""

from __future__ import annotations

import asyncio
import datetime as dt
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.children import python, wait_for_line
from support.topic_homes import BUCKETS, Home, flat
from support.topic_places import ids, numbered
from support.waiting import until

from persisting.errors import BucketLocked, InvalidArgument
from persisting.queue import LanceBackend, PersistingBackend, read_queue, write_queue

_NIGHTLY = pytest.mark.nightly
BRIEF = 0.01
"""Seconds for which old versions are kept, where a test wants them cleaned up at once."""


async def cleaned(writer: Any) -> None:
    """Compact, and remove every version that nothing pins."""
    await asyncio.sleep(2 * BRIEF)
    await writer.compact()


class TagContract:
    async def test_a_tag_says_what_it_holds(self, home: Home) -> None:
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

    async def test_a_tag_holds_what_was_acknowledged_and_nothing_put_later(
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

    async def test_a_tag_reads_the_same_whatever_happens_later(self, home: Home) -> None:
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

    async def test_what_no_tag_holds_is_cleaned_up(self, home: Home) -> None:
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

    async def test_a_deleted_tag_is_gone(self, home: Home) -> None:
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

    async def test_a_tag_of_a_name_that_is_taken_replaces_it(self, home: Home) -> None:
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

    async def test_tags_of_one_name_at_once_leave_one_whole_tag(
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

    async def test_a_tag_made_beside_the_deletion_of_its_name_is_whole_or_gone(
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

    async def test_an_empty_topic_and_empty_buckets_can_be_tagged(self, home: Home) -> None:
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

    async def test_a_name_that_is_none_raises(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(3))
        for name in ("", "a b", "a/b", "../a", ".a", "a.", "x" * 129, "ü", None, 5):
            for use in (writer.tag(name), writer.delete_tag(name)):
                with pytest.raises(InvalidArgument, match="tag"):
                    await use
        assert await writer.tags() == []

    async def test_every_name_that_is_one_can_be_read(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(3))
        reader = await home.read()
        names = ["a", "A", "0", "v1.2-rc_3", "x" * 128, "json", "a.json", "-", "_"]
        for name in names:
            await writer.tag(name)
            assert len(await reader.get(version=name)) == 3
        assert sorted(t["name"] for t in await reader.tags()) == sorted(names)


class TestTags(TagContract):
    pass


class TestOwners:
    """Who may tag, and what the others hear."""

    async def test_a_tag_that_fails_half_way_leaves_the_older_one_whole(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home("lance")
        writer = await home.open(keep_versions=BRIEF)
        await writer.put(numbered(30))
        made = await writer.tag("t")
        content = flat(await home.content())
        await writer.put(numbered(30, 30))
        await home.close()
        reader = await read_queue(topic=home.topic, storage_path=str(tmp_path))
        for taken in range(BUCKETS):
            folder = tmp_path / home.topic / f"bucket_{taken}"
            async with LanceBackend(taken, str(folder), keep_versions=None):
                with pytest.raises(BucketLocked):
                    await reader.tag("t")
            # Nothing of the failed call is under way any more: the next one finds the buckets free.
            await cleaned(reader)
            assert await reader.tags() == [made]
            assert await reader.get(None, version="t") == content
        await reader.close()

    async def test_a_failed_new_tag_is_none_and_pins_nothing(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home("lance")
        writer = await home.open(keep_versions=BRIEF)
        await writer.put(numbered(30))
        await home.close()
        reader = await read_queue(topic=home.topic, storage_path=str(tmp_path))
        async with LanceBackend(1, str(tmp_path / home.topic / "bucket_1"), keep_versions=None):
            with pytest.raises(BucketLocked):
                await reader.tag("t")
        assert await reader.tags() == []
        with pytest.raises(InvalidArgument, match="no tag 't'"):
            await reader.get(version="t")
        assert (await reader.tag("t"))["rows"] == 30
        assert len(await reader.get(None, version="t")) == 30
        await reader.close()

    async def test_what_another_process_owns_is_tagged_there_and_read_here(
        self, tmp_path: Path
    ) -> None:
        code = """
import asyncio, sys
from persisting.queue import write_queue
async def main():
    writer = await write_queue(topic="t", storage_path=sys.argv[1], backend="persisting",
                               num_buckets=3, backend_options={"keep_versions": 0.01})
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "put":
            await writer.put([{"id": n} for n in range(int(rest[0]), int(rest[1]))])
        else:
            await getattr(writer, word)(*rest)
        print("done", flush=True)
asyncio.run(main())
"""
        with python(code, tmp_path) as child:

            def tell(line: str) -> None:
                assert child.stdin is not None
                child.stdin.write(line + "\n")
                child.stdin.flush()
                assert wait_for_line(child) == "done"

            tell("put 0 30")
            reader = await read_queue(topic="t", storage_path=str(tmp_path))
            for name, change in (
                ("tag", reader.tag("mine")),
                ("compact", reader.compact()),
                ("restore", reader.restore({0: 0})),
                ("create_index", reader.create_index("id")),
                ("retain", reader.retain(rows=1)),
            ):
                with pytest.raises(BucketLocked, match=rf"{child.pid}.*call {name}\(\) there"):
                    await change
            assert await reader.tags() == []
            tell("tag theirs")
            tell("put 30 60")
            tell("flush")
            tell("compact")
            tell("compact")
            assert sorted(ids(await reader.get(None, version="theirs"))) == list(range(30))
            assert [t["name"] for t in await reader.tags()] == ["theirs"]
            tell("close")
            assert (await reader.tag("mine"))["rows"] == 60
            await reader.close()

    @_NIGHTLY
    async def test_a_reader_from_before_the_first_record_reads_a_later_tag(
        self, tmp_path: Path
    ) -> None:
        code = """
import asyncio, sys
from persisting.queue import write_queue
async def main():
    writer = await write_queue(topic="t", storage_path=sys.argv[1], backend="lance", num_buckets=1)
    await writer.flush()
    print("made", flush=True)
    sys.stdin.readline()
    await writer.put([{"id": n} for n in range(30)])
    await writer.tag("t")
    print("tagged", flush=True)
    sys.stdin.readline()
asyncio.run(main())
"""
        with python(code, tmp_path) as child:
            assert wait_for_line(child) == "made"
            reader = await read_queue(topic="t", storage_path=str(tmp_path))
            assert await reader.get() == []
            assert await reader.versions() == []
            assert child.stdin is not None
            child.stdin.write("go on\n")
            child.stdin.flush()
            assert wait_for_line(child) == "tagged"
            assert ids(await reader.get(None, version="t")) == list(range(30))
            await reader.close()

    @_NIGHTLY
    async def test_a_tag_of_a_killed_owner_holds_what_its_log_held(self, tmp_path: Path) -> None:
        code = """
import asyncio, sys
from persisting.queue import write_queue
async def main():
    options = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}
    writer = await write_queue(topic="t", storage_path=sys.argv[1], backend="persisting",
                               num_buckets=3, backend_options=options)
    await writer.put([{"id": n} for n in range(50)])
    print("put", flush=True)
    sys.stdin.readline()
asyncio.run(main())
"""
        with python(code, tmp_path) as child:
            assert wait_for_line(child) == "put"
            child.kill()
            child.wait()
        async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
            assert (await reader.tag("t"))["rows"] == 50
            assert sorted(ids(await reader.get(None, version="t"))) == list(range(50))

    async def test_a_buckets_own_tag_is_no_tag_of_the_topic(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home("persisting")
        await (await home.open()).put(numbered(30))
        await home.close()
        folder = str(tmp_path / home.topic / "bucket_1")
        async with PersistingBackend(1, folder) as bucket:
            await bucket.tag("mine")
            await bucket.tag("ours.mine")
        async with await read_queue(topic=home.topic, storage_path=str(tmp_path)) as reader:
            assert await reader.tags() == []
            with pytest.raises(InvalidArgument, match="no tag 'mine'"):
                await reader.get(version="mine")
        writer = await write_queue(topic=home.topic, storage_path=str(tmp_path))
        await writer.tag("ours")
        await writer.delete_tag("ours")
        await writer.close()
        async with PersistingBackend(1, folder) as bucket:
            assert [t["name"] for t in await bucket.tags()] == ["mine", "ours.mine"]

    async def test_a_damaged_tag_file_is_named_and_the_others_are_read(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        from persisting.errors import StorageError

        home = make_home("persisting")
        writer = await home.open()
        await writer.put(numbered(30))
        await writer.tag("good")
        await writer.tag("bad")
        (path,) = (tmp_path / home.topic / "tags").glob("bad*")
        path.write_bytes(b"{")
        reader = await home.read()
        with pytest.raises(StorageError, match="bad"):
            await reader.get(version="bad")
        assert len(await reader.get(None, version="good")) == 30
        assert (await writer.tag("bad"))["rows"] == 30
        assert len(await reader.get(None, version="bad")) == 30
        await home.close()


@_NIGHTLY
async def test_tags_keep_their_content_while_upkeep_goes_on_by_itself(
    tmp_path: Path, spawned: Any, make_home: Any
) -> None:
    home = make_home("persisting")
    writer = await home.open(
        keep_versions=0.3, compaction=True, flush_threshold=20, retention_rows=200
    )
    reader = await home.read()
    stop = asyncio.Event()

    async def produce() -> None:
        number = 0
        while not stop.is_set():
            await writer.put(numbered(30, number))
            number += 30

    producing = spawned(produce())
    tagged: dict[str, list[Any]] = {}
    for round_ in range(5):
        await asyncio.sleep(0.1)
        await writer.tag(f"t{round_}")
        tagged[f"t{round_}"] = await reader.get(None, version=f"t{round_}")

    async def started() -> bool:
        return all(b["start_offset"] > 0 for b in (await writer.stats())["buckets"])

    await until(started)
    stop.set()
    await producing
    await asyncio.sleep(0.4)
    await writer.compact()
    for name, content in tagged.items():
        assert len(content) > 0
        assert await reader.get(None, version=name) == content
    assert all(b["upkeep_error"] is None for b in (await writer.stats())["buckets"])
    await home.close()


async def test_a_damaged_tag_file_does_not_cost_what_the_tag_holds(tmp_path: Path) -> None:
    """Its pin could pass for a lost one; the file may be brought back from a copy."""
    writer = await write_queue(
        topic="t", storage_path=str(tmp_path), num_buckets=2, backend="persisting"
    )
    async with writer:
        await writer.put([{"id": str(n), "n": n} for n in range(10)])
        await writer.tag("old")
        path = tmp_path / "t" / "tags" / "old.json"
        whole = path.read_bytes()
        pin = msgspec.json.decode(whole)["pin"]
        ago = f"topic-{int(pin.split('-')[1]) - 7200}-{pin.split('-')[2]}"
        for place in tmp_path.rglob(f"{pin}.json"):
            place.rename(place.with_name(f"{ago}.json"))
        path.write_bytes(b"{")
        await writer.put({"id": "later", "n": 99})
        await writer.tag("new")
        assert [one["name"] for one in await writer.tags()] == ["new"]
        path.write_bytes(whole.replace(pin.encode(), ago.encode()))
        assert [one["name"] for one in await writer.tags()] == ["new", "old"]
        async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
            assert len(await reader.get(limit=None, version="old")) == 10
