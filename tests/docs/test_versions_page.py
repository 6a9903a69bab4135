"""What docs/guide/versions.md says about old states, tags and restores."""

from __future__ import annotations

import asyncio
import datetime as dt
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import both, code, table_with

from persisting.errors import InvalidArgument, OffsetOutOfRange, StorageError
from persisting.options import BucketOptions
from persisting.queue import LanceBackend, PersistingBackend, read_queue, write_queue
from persisting.table import properties

pages = pytest.mark.parametrize("page", both("guide/versions.md"), ids=["en", "zh"])


@asynccontextmanager
async def topic(folder: Path, **options: Any):
    """A writer and a reader of a topic of two buckets."""
    given = {"num_buckets": 2, "backend": "persisting", "storage_path": str(folder), **options}
    async with (
        await write_queue(topic="t", **given) as writer,
        await read_queue(topic="t", storage_path=str(folder)) as reader,
    ):
        yield writer, reader


def rows(*numbers: int) -> list[dict[str, int]]:
    return [{"id": n} for n in numbers]


def ids(found: list[dict[str, Any]]) -> list[int]:
    return sorted(row["id"] for row in found)


@pages
def test_the_page_names_every_operation_and_the_default_time(page: Path):
    text = page.read_text("utf-8")
    for operation in {*properties._OPERATIONS.values(), "schema"}:
        assert f"`{operation}`" in text
    assert f" {BucketOptions.keep_versions:.0f}" in text


@pages
async def test_the_keys_of_what_restore_returns_are_listed(page: Path, tmp_path):
    listed = {
        key.strip(" `,、")
        for row in table_with(page, "removed", "epoch")
        for key in row[0].replace("、", ",").split(",")
    }
    async with topic(tmp_path) as (writer, _):
        await writer.put(rows(*range(10)))
        await writer.tag("x")
        result = await writer.restore("x")
        keys = set(result) - {"buckets"} | set(result["buckets"][0])
    assert keys == listed
    assert code(table_with(page, "removed", "epoch")[0][0]) == "removed"


async def test_a_version_can_be_a_number_a_tag_or_a_moment(tmp_path):
    async with PersistingBackend(0, str(tmp_path), flush_interval=None) as backend:
        await backend.put_batch(rows(0, 1))
        await backend.flush()
        tag = await backend.tag("two")
        moment = (await backend.versions())[-1]["timestamp"]
        await backend.put_batch(rows(2))
        await backend.flush()
        for version in (tag["version"], "two", moment):
            assert await backend.get(version=version) == rows(0, 1)
            assert (await backend.get_arrow(1, version=version)).to_pylist() == rows(1)
        local = moment.astimezone().replace(tzinfo=None)
        assert await backend.get(version=local) == rows(0, 1)
        assert await backend.get(version=moment - dt.timedelta(days=1)) == []
        with pytest.raises(InvalidArgument, match="versions 1 to"):
            await backend.get(version=99)
        with pytest.raises(InvalidArgument, match="there are: 'two'"):
            await backend.get(version="three")


async def test_a_moment_means_what_was_flushed_by_then(tmp_path):
    async with PersistingBackend(0, str(tmp_path), flush_interval=None) as backend:
        await backend.put_batch(rows(0))
        await backend.flush()
        await backend.put_batch(rows(1))
        moment = dt.datetime.now(dt.timezone.utc)
        await backend.flush()
        assert await backend.get(version=moment) == rows(0)
        assert await backend.get() == rows(0, 1)


async def test_reading_a_version_leaves_the_cursor_and_a_number_needs_one_bucket(tmp_path):
    async with topic(tmp_path) as (writer, reader):
        await writer.put(rows(*range(10)))
        await writer.tag("x")
        assert ids(await reader.get(version="x")) == list(range(10))
        numbers = {b: one["version"] for b, one in (await writer.tags())[0]["buckets"].items()}
        assert ids(await reader.get(version=numbers)) == list(range(10))
        with pytest.raises(InvalidArgument, match="give a tag's name"):
            await reader.get(version=1)
        assert ids(await reader.get()) == list(range(10))


async def test_a_tag_holds_what_was_acknowledged_and_nothing_later_while_producers_go_on(
    tmp_path, spawned
):
    async with topic(tmp_path) as (writer, reader):
        acknowledged: list[int] = []

        async def produce() -> None:
            for n in range(0, 10**6, 4):
                await writer.put(rows(*range(n, n + 4)))
                acknowledged.append(n + 3)

        producer, least = spawned(produce()), 20
        for name in ("a", "b", "c"):
            while not acknowledged or acknowledged[-1] < least:  # noqa: ASYNC110
                await asyncio.sleep(0)
            before = acknowledged[-1]
            tag = await writer.tag(name)
            after = acknowledged[-1] + 4  # one put may be under way
            least = after + 20
            found = ids(await reader.get(version=name, limit=None))
            assert set(range(before + 1)) <= set(found) <= set(range(after + 1))
            assert tag["rows"] == len(found) == len(set(found))
        producer.cancel()


async def test_a_tag_outlives_retention_compaction_cleaning_a_restore_and_a_restart(tmp_path):
    options = {"keep_versions": 0.001, "flush_interval": None}
    async with PersistingBackend(0, str(tmp_path), **options) as backend:
        for n in range(5):
            await backend.put_batch(rows(n))
            await backend.flush()
        await backend.tag("five")
        await backend.put_batch(rows(5))
        await backend.retain(rows=1)
        removed = (await backend.compact())["versions_removed"]
        assert removed > 0
        assert await backend.get(version="five") == rows(*range(5))
        await backend.restore("five")
        await backend.compact()
    async with PersistingBackend(0, str(tmp_path), **options) as backend:
        assert await backend.get(version="five") == await backend.get() == rows(*range(5))
        assert await backend.delete_tag("five") is True
        assert await backend.delete_tag("five") is False


async def test_a_tag_of_the_same_name_is_replaced(tmp_path):
    async with topic(tmp_path) as (writer, reader):
        await writer.put(rows(1))
        await writer.tag("x")
        await writer.put(rows(2))
        await writer.tag("x")
        assert ids(await reader.get(version="x")) == [1, 2]
        assert [one["name"] for one in await writer.tags()] == ["x"]


@pytest.mark.parametrize("name", ["", ".x", "x.", "a/b", "a b", "x" * 129, 5])
async def test_other_names_are_refused(tmp_path, name):
    async with topic(tmp_path) as (writer, _):
        with pytest.raises(InvalidArgument, match="a tag"):
            await writer.tag(name)


async def test_an_empty_backend_cannot_be_tagged_and_an_empty_bucket_is_part_of_a_tag(tmp_path):
    async with LanceBackend(0, str(tmp_path / "alone")) as backend:
        with pytest.raises(StorageError, match="nothing yet"):
            await backend.tag("x")
    async with topic(tmp_path) as (writer, reader):
        await writer.put(rows(1))
        tag = await writer.tag("x")
        assert sorted(one["end_offset"] for one in tag["buckets"].values()) == [0, 1]
        assert await reader.get(version="x") == rows(1)


async def test_a_restore_takes_what_is_logged_and_can_be_taken_back(tmp_path):
    options = {"enable_wal": True, "flush_interval": None}
    async with PersistingBackend(0, str(tmp_path), **options) as backend:
        await backend.put_batch(rows(0, 1))
        await backend.tag("two")
        await backend.put_batch(rows(2))
        result = await backend.restore("two")
        assert (result["removed"], result["end_offset"], result["epoch"]) == (1, 2, 1)
        assert await backend.get() == rows(0, 1)
        before = [one for one in await backend.versions() if one["rows"] == 3][-1]
    async with PersistingBackend(0, str(tmp_path), **options) as backend:
        assert await backend.get() == rows(0, 1)
        await backend.restore(before["version"])
        assert await backend.get() == rows(0, 1, 2)
        assert (await backend.stats())["epoch"] == 2


async def test_readers_and_groups_beyond_the_end_go_on_there(tmp_path, caplog):
    async with (
        topic(tmp_path, num_buckets=1) as (writer, reader),
        await read_queue(topic="t", storage_path=str(tmp_path), group="g") as member,
        await read_queue(topic="t", storage_path=str(tmp_path)) as slow,
    ):
        await writer.put(rows(*range(4)))
        await writer.tag("four")
        assert len(await slow.get(limit=2)) == 2
        await writer.put(rows(4, 5))
        for one in (reader, member):
            assert len(await one.get()) == 6
        await member.commit()
        result = await writer.restore("four")
        assert result["groups"] == [{"group": "g", "bucket": 0, "committed": 6, "end": 4}]
        await writer.put(rows(10, 11, 12))
        for one in (reader, member):
            assert await one.get() == rows(10, 11, 12)
        assert await slow.get() == rows(2, 3, 10, 11, 12)
        assert "was restored to an older version that ends at offset 4" in caplog.text
        stats = await member.stats()
        assert (stats["committed"], stats["group_lag"]) == ({0: 4}, 3)


async def test_a_stream_of_a_backend_raises_and_one_of_a_reader_goes_on(tmp_path):
    async with LanceBackend(0, str(tmp_path / "alone")) as backend:
        await backend.put_batch(rows(0))
        await backend.tag("x")
        await backend.put_batch(rows(1))
        stream = backend.get_stream(block=True)
        assert [await anext(stream), await anext(stream)] == rows(0, 1)
        await backend.restore("x")
        with pytest.raises(OffsetOutOfRange, match="ends at offset 1"):
            await anext(stream)
    async with topic(tmp_path, num_buckets=1) as (writer, reader):
        await writer.put(rows(0))
        await writer.tag("x")
        await writer.put(rows(1))
        stream = reader.get_stream(block=True)
        assert [await anext(stream), await anext(stream)] == rows(0, 1)
        await writer.restore("x")
        await writer.put(rows(2))
        assert await anext(stream) == {"id": 2}
        await stream.aclose()


async def test_a_reader_without_the_lock_sees_a_restore(tmp_path):
    async with (
        LanceBackend(0, str(tmp_path)) as backend,
        LanceBackend(0, str(tmp_path), read_only=True) as reader,
    ):
        await backend.put_batch(rows(0))
        await backend.tag("x")
        await backend.put_batch(rows(1))
        await backend.flush()
        while reader.total_count() != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await backend.restore("x")
        while reader.total_count() != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await reader.get() == rows(0)
        assert (await reader.stats())["epoch"] == 1


async def test_numbers_of_puts_are_those_of_the_restored_version(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put_once(rows(0), "w", 1)
        await backend.tag("x")
        await backend.put_once(rows(1), "w", 2)
        await backend.restore("x")
        assert backend.last_number("w") == 1
        await backend.put_once(rows(1), "w", 2)
        assert await backend.get() == rows(0, 1)


READER = """
import asyncio
from persisting.queue import BucketLocked, read_queue
async def main():
    async with await read_queue("t", storage_path={path!r}) as reader:
        print(len(await reader.get(version="x", limit=None)))
        try:
            print((await reader.tag("y"))["rows"])
        except BucketLocked:
            print("locked")
asyncio.run(main())
"""


async def test_another_process_reads_tags_and_makes_them_only_if_nobody_owns_the_topic(tmp_path):
    def elsewhere() -> list[str]:
        program = [sys.executable, "-c", READER.format(path=str(tmp_path))]
        return subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()

    async with topic(tmp_path) as (writer, _):
        await writer.put(rows(*range(6)))
        await writer.tag("x")
        assert elsewhere() == ["6", "locked"]
    assert elsewhere() == ["6", "6"]


async def test_a_reader_of_some_buckets_neither_tags_nor_restores(tmp_path):
    async with topic(tmp_path) as (writer, _):
        await writer.put(rows(*range(6)))
        await writer.tag("x")
        async with await read_queue(topic="t", storage_path=str(tmp_path), bucket_id=0) as part:
            assert 0 < len(await part.get(version="x")) < 6
            for call in (part.tag, part.restore):
                with pytest.raises(InvalidArgument, match="whole topic"):
                    await call("x")


async def test_a_topic_in_memory_has_no_versions():
    async with await write_queue(topic="t", backend="memory") as writer:
        await writer.put({"id": 1})
        for call in (writer.tag("x"), writer.tags(), writer.versions(), writer.restore("x")):
            with pytest.raises(StorageError, match="'lance' or 'persisting'"):
                await call
