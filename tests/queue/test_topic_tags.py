"""Tags of a topic in this process, across processes, and with damaged files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.children import python, wait_for_line
from support.tag_contract import BRIEF, TagContract, cleaned
from support.topic_homes import BUCKETS, flat
from support.topic_places import ids, numbered
from support.waiting import until

from persisting.errors import BucketLocked, InvalidArgument
from persisting.queue import LanceBackend, PersistingBackend, read_queue, write_queue
from persisting.topic.table_calls import Tags

_NIGHTLY = pytest.mark.nightly


class TestTags(TagContract):
    pass


async def test_concurrent_tags_of_one_name_leave_one_pin_in_each_bucket(tmp_path: Path) -> None:
    where: dict[str, Any] = {"topic": "t", "storage_path": str(tmp_path)}
    writers = [await write_queue(**where, backend="lance", num_buckets=2) for _ in range(3)]
    for start in range(0, 50, 10):
        await writers[0].put(numbered(10, start))
        results = await asyncio.gather(*(w.tag("t") for w in writers for _ in range(3)))
        (tag,) = await writers[0].tags()
        assert tag in results
        assert tag["rows"] == start + 10
        for bucket in range(2):
            pins = await writers[0]._topic.bucket(bucket).call(Tags())
            versions = [pin["version"] for pin in pins]
            assert versions == [tag["buckets"][bucket]["version"]]
        assert [path.name for path in (tmp_path / "t" / "tags").iterdir()] == ["t.json"]
    await asyncio.gather(*(w.delete_tag("t") for w in writers), writers[0].tag("u"))
    assert [tag["name"] for tag in await writers[0].tags()] == ["u"]
    for writer in writers:
        await writer.close()


class TestOwners:
    """Only the owner can tag; other processes get an error that names it."""

    async def test_tag_that_fails_midway_leaves_the_previous_tag_intact(
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
            # No part of the failed call still runs: the next call finds the buckets free.
            await cleaned(reader)
            assert await reader.tags() == [made]
            assert await reader.get(None, version="t") == content
        await reader.close()

    async def test_failed_new_tag_does_not_exist_and_pins_nothing(
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

    async def test_topic_owned_by_another_process_is_tagged_there_and_read_here(
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
            reader = await read_queue(topic="t", storage_path=str(tmp_path), local_socket=False)
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
    async def test_reader_opened_before_the_first_record_reads_a_later_tag(
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
    async def test_tag_after_the_kill_of_the_owner_contains_its_logged_records(
        self, tmp_path: Path
    ) -> None:
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

    async def test_tag_of_a_single_bucket_is_not_a_tag_of_the_topic(
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

    async def test_damaged_tag_file_is_named_and_other_tags_stay_readable(
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
async def test_tags_keep_their_content_during_automatic_maintenance(
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


async def test_damaged_tag_file_does_not_release_the_tagged_versions(tmp_path: Path) -> None:
    """Its pin could be taken for a lost one, but the file may be restored from a copy."""
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
