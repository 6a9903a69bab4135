"""The topic file: what it stores, what contradicts it, and that invalid options never get in."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from support.faults import FaultyFileSystem
from support.protocol_only_backend import OnlyProtocol
from support.topic_places import WAL, ids, numbered, streamed

from persisting.backends import bucket_reader
from persisting.errors import InvalidArgument, StorageError
from persisting.queue import LanceBackend, PersistingBackend, read_queue, write_queue
from persisting.topic import live_topics

GOOD_NAMES = [
    "a b",
    "a?b",
    "a#b",
    "a%20b",
    "s3:x",
    "日本–ü",
    "a*b",
    "con.",
    "-x",
    "~",
    "a'b\"c",
    "a&b=c",
    "bucket_0",
    "groups",
    "．．",
    "x" * 200,
]
BAD_NAMES: list[Any] = [
    "../x",
    "/abs",
    "a/b",
    "..",
    ".",
    ".hidden",
    "a\\b",
    "a\0b",
    "",
    "a\nb",
    "a\u202eb",
    "a\u200bb",
    "\ud800",
    "x" * 201,
    "日" * 100,
    5,
    b"x",
]


def topic_file(root: Path, topic: str = "t") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / topic / "topic.json").read_text())
    return found


async def made(root: Path, **given: Any) -> None:
    """Create a topic on disk with ten records, and close it."""
    words = {"backend": "lance", **given}
    async with await write_queue(topic="t", storage_path=str(root), **words) as writer:
        await writer.put(numbered(10))


async def test_topic_file_stores_the_configuration(tmp_path: Path) -> None:
    await made(
        tmp_path,
        backend="persisting",
        num_buckets=3,
        bucket_column="id",
        batch_size=7,
        backend_options=WAL,
    )
    kept = topic_file(tmp_path)
    assert re.fullmatch("[0-9a-f]{32}", kept.pop("id"))
    assert kept == {
        "topic": "t",
        "num_buckets": 3,
        "bucket_column": "id",
        "backend": "persisting",
        "batch_size": 7,
        "options": WAL,
        "format": 2,
    }
    assert sorted(p.name for p in (tmp_path / "t").glob("bucket_*")) == [
        "bucket_0",
        "bucket_1",
        "bucket_2",
    ]


async def test_arguments_a_later_writer_omits_come_from_the_topic_file(tmp_path: Path) -> None:
    await made(tmp_path, backend="persisting", num_buckets=2, backend_options=WAL)
    before = topic_file(tmp_path)
    async with await write_queue(topic="t", storage_path=str(tmp_path)) as writer:
        await writer.put(numbered(10, 10))
        stats = await writer.stats()
    assert (stats["num_buckets"], stats["total_count"], stats["wal_enabled"]) == (2, 20, True)
    assert topic_file(tmp_path) == before


async def test_default_folder_is_queue_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with await write_queue(topic="t", backend="lance") as writer:
        await writer.put(numbered(3))
    assert (tmp_path / "queue_storage" / "t" / "topic.json").is_file()
    async with await read_queue(topic="t") as reader:
        assert sorted(ids(await streamed(reader))) == [0, 1, 2]


async def test_topic_may_be_the_first_argument(tmp_path: Path) -> None:
    async with await write_queue("t", storage_path=str(tmp_path), backend="lance") as writer:
        await writer.put({"id": 1})
    async with await read_queue("t", storage_path=str(tmp_path)) as reader:
        assert await reader.get() == [{"id": 1}]
    with pytest.raises(InvalidArgument, match="topic"):
        await write_queue()


async def test_lance_topic_is_upgraded_to_persisting_in_place(tmp_path: Path) -> None:
    await made(tmp_path)
    async with await write_queue(
        topic="t", storage_path=str(tmp_path), backend="persisting"
    ) as writer:
        await writer.put([{"id": n, "new": "field"} for n in range(10, 20)])
    assert topic_file(tmp_path)["backend"] == "persisting"
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        found = sorted(await streamed(reader), key=lambda r: r["id"])
    assert [record.get("new") for record in found] == [None] * 10 + ["field"] * 10


async def test_upgrade_leaves_open_writers_and_streams_running(
    tmp_path: Path, spawned: Any
) -> None:
    first = await write_queue(topic="t", storage_path=str(tmp_path), backend="lance")
    await first.put(numbered(10))
    reader = await read_queue(topic="t", storage_path=str(tmp_path))
    tail = spawned(streamed(reader, limit=200, block=True))
    acknowledged = 10

    async def put_on() -> None:
        nonlocal acknowledged
        while acknowledged < 190:
            await first.put({"id": acknowledged})
            acknowledged += 1
            await asyncio.sleep(0.002)

    putting = spawned(put_on())
    await asyncio.sleep(0.1)
    second = await write_queue(topic="t", storage_path=str(tmp_path), backend="persisting")
    await second.put(numbered(10, 190))
    await asyncio.wait_for(putting, 30)
    assert sorted(ids(await asyncio.wait_for(tail, 30))) == list(range(200))
    for handle in (first, second, reader):
        await handle.close()


async def test_finite_stream_continues_while_its_buckets_are_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_reader, "_SNAPSHOT_SECONDS", 0.001)  # a new one for each block
    where = {"topic": "t", "storage_path": str(tmp_path)}
    first = await write_queue(**where, backend="lance", num_buckets=1, batch_size=10)
    await first.put(numbered(20_000))
    found = []
    async with await read_queue(**where) as reader:
        async for record in reader.get_stream(0):
            found.append(record["id"])
            if len(found) == 10:
                second = await write_queue(**where, backend="persisting")
    assert found == list(range(20_000))
    await first.close()
    await second.close()


async def test_persisting_topic_cannot_become_a_lance_topic(tmp_path: Path) -> None:
    await made(tmp_path, backend="persisting")
    for backend in ("lance", "memory", LanceBackend):
        with pytest.raises(InvalidArgument, match="persisting"):
            await write_queue(topic="t", storage_path=str(tmp_path), backend=backend)
    assert topic_file(tmp_path)["backend"] == "persisting"


async def test_changed_options_apply_and_warn(tmp_path: Path) -> None:
    await made(tmp_path, backend="persisting", backend_options={"flush_interval": 9.0})
    with pytest.warns(UserWarning, match="from now on"):
        writer = await write_queue(topic="t", storage_path=str(tmp_path), backend_options=WAL)
    await writer.put({"id": 1})
    assert (await writer.stats())["wal_enabled"] is True
    await writer.close()
    assert topic_file(tmp_path)["options"] == {"flush_interval": 9.0, **WAL}


async def test_changed_options_reach_open_buckets(tmp_path: Path) -> None:
    first = await write_queue(topic="t", storage_path=str(tmp_path), backend="persisting")
    await first.put(numbered(10))
    with pytest.warns(UserWarning, match="from now on"):
        second = await write_queue(topic="t", storage_path=str(tmp_path), backend_options=WAL)
    await second.put(numbered(10, 10))
    await first.put(numbered(10, 20))
    stats = await first.stats()
    assert (stats["wal_enabled"], stats["total_count"]) == (True, 30)
    await first.close()
    await second.close()


async def test_two_open_topics_of_one_name_need_a_path(tmp_path: Path) -> None:
    writers = [
        await write_queue(topic="t", storage_path=str(tmp_path / name), backend="lance")
        for name in "ab"
    ]
    with pytest.raises(InvalidArgument, match="several") as caught:
        await read_queue(topic="t")
    assert all(str(tmp_path / name) in str(caught.value) for name in "ab")
    for number, writer in enumerate(writers):
        await writer.put({"id": number})
    async with await read_queue(topic="t", storage_path=str(tmp_path / "b")) as reader:
        assert await reader.get() == [{"id": 1}]
    for writer in writers:
        await writer.close()


async def test_memory_topic_is_found_with_the_storage_path_of_its_creation(tmp_path: Path) -> None:
    async with await write_queue(topic="t", storage_path=str(tmp_path)) as writer:
        await writer.put({"id": 1})
        async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
            assert await reader.get() == [{"id": 1}]


async def test_memory_topic_does_not_shadow_a_topic_on_disk(tmp_path: Path) -> None:
    await made(tmp_path)
    with pytest.raises(InvalidArgument, match="lance"):
        await write_queue(topic="t", storage_path=str(tmp_path), backend="memory")


async def test_reader_that_contradicts_a_live_topic_leaves_no_handle(tmp_path: Path) -> None:
    writer = await write_queue(topic="t", storage_path=str(tmp_path), backend="lance")
    await writer.put({"id": 1})
    for path in (None, str(tmp_path)):
        with pytest.raises(InvalidArgument):
            await read_queue(topic="t", storage_path=path, num_buckets=9)
    await writer.close()
    assert live_topics.live_named("t") == []


@pytest.mark.parametrize("batch_size", ["big", 0, -1, True, 1.5])
async def test_invalid_batch_size_is_refused_and_not_stored(
    tmp_path: Path, batch_size: Any
) -> None:
    with pytest.raises(InvalidArgument, match="batch_size"):
        await write_queue(
            topic="t", storage_path=str(tmp_path), backend="lance", batch_size=batch_size
        )
    await made(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "brotli"},
        {"enable_wal": "yes"},
        {"wal_sync_interval": -1},
        {"flush_threshold": 0},
        {"batch_size": 1000},
        {"storage_path": "elsewhere"},
        {"bucket_id": 0},
        {"read_only": True},
        {"schema_path": "schema.json"},
        {"groups_path": "groups"},
        {1: 2},
        "enable_wal",
    ],
    ids=str,
)
async def test_invalid_options_are_refused_and_not_stored(tmp_path: Path, options: Any) -> None:
    with pytest.raises(InvalidArgument):
        await write_queue(
            topic="t", storage_path=str(tmp_path), backend="persisting", backend_options=options
        )
    await made(tmp_path, backend="persisting")
    with pytest.raises(InvalidArgument):
        await write_queue(topic="t", storage_path=str(tmp_path), backend_options=options)
    assert topic_file(tmp_path)["options"] == {}


async def test_read_only_is_refused_as_a_topic_option_and_other_writers_continue(
    tmp_path: Path,
) -> None:
    words: dict[str, Any] = {"topic": "t", "storage_path": str(tmp_path)}
    async with await write_queue(**words, backend="persisting") as writer:
        await writer.put(numbered(10))
        for opening in (write_queue, read_queue):
            with pytest.raises(InvalidArgument, match="read_queue"):
                await opening(**words, backend_options={"read_only": True})
        await writer.put(numbered(10, 10))
        assert (await writer.stats())["total_count"] == 20
    assert topic_file(tmp_path)["options"] == {}


async def test_read_only_is_refused_for_a_custom_table_class_too(tmp_path: Path) -> None:
    class Own(PersistingBackend):
        pass

    with pytest.raises(InvalidArgument, match="read_only"):
        await made(tmp_path, backend=Own, backend_options={"read_only": True})
    assert not (tmp_path / "t").exists()


STRAYS = {
    "read_only": True,
    "schema_path": "x",
    "groups_path": "x",
    "batch_size": 5,
    "storage_path": "x",
    "bucket_id": 7,
}


@pytest.mark.parametrize("backend", ["lance", "persisting"])
async def test_foreign_options_in_the_topic_file_are_ignored(tmp_path: Path, backend: str) -> None:
    await made(tmp_path, backend=backend, backend_options={"flush_threshold": 5})
    path = tmp_path / "t" / "topic.json"
    kept = topic_file(tmp_path)
    path.write_text(json.dumps({**kept, "options": {**kept["options"], **STRAYS}}))
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        assert len(await streamed(reader)) == 10
        await reader.tag("before")
    async with await write_queue(topic="t", storage_path=str(tmp_path)) as writer:
        await writer.put(numbered(10, 10))
        assert (await writer.stats())["total_count"] == 20
    with pytest.warns(UserWarning, match="from now on"):
        await made(tmp_path, backend_options={"flush_threshold": 6}, backend=None)
    assert topic_file(tmp_path)["options"] == {"flush_threshold": 6}


async def test_schema_default_that_contradicts_the_topic_is_refused_and_not_stored(
    tmp_path: Path,
) -> None:
    place = {"topic": "t", "storage_path": str(tmp_path), "backend": "persisting"}
    async with await write_queue(**place) as writer:
        await writer.put({"id": 1, "y": "text"})
    before = topic_file(tmp_path)
    with pytest.raises(InvalidArgument, match=r"schema_defaults: field 'y' is str.*7 is int"):
        await write_queue(**place, backend_options={"schema_defaults": {"y": 7}})
    assert topic_file(tmp_path) == before
    async with await write_queue(**place) as writer:
        await writer.put({"id": 2})


async def test_custom_backend_class_may_have_options_named_like_ours(tmp_path: Path) -> None:
    given = {"read_only": False, "schema_path": "records.proto"}
    await made(tmp_path, backend=OnlyProtocol, backend_options=given)
    assert topic_file(tmp_path)["options"] == given


@pytest.mark.parametrize("value", [b"\xff", dt.datetime(2020, 1, 1), float("nan"), {1: 2}], ids=str)
async def test_options_are_stored_exactly_or_refused(tmp_path: Path, value: Any) -> None:
    options = {"schema_defaults": {"field": value}}
    try:
        await made(tmp_path, backend="persisting", backend_options=options)
    except InvalidArgument:
        assert not (tmp_path / "t" / "topic.json").exists()
        return
    async with await write_queue(topic="t", storage_path=str(tmp_path)) as writer:
        assert repr(writer._topic.config.options) == repr(options)  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [0, -1, 65537, "4", 4.0, True])
async def test_invalid_number_of_buckets_is_refused(tmp_path: Path, count: Any) -> None:
    with pytest.raises(InvalidArgument, match="num_buckets"):
        await write_queue(topic="t", storage_path=str(tmp_path), backend="lance", num_buckets=count)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", GOOD_NAMES, ids=ascii)
async def test_unusual_topic_name_is_used_as_folder_name(tmp_path: Path, name: str) -> None:
    async with await write_queue(
        topic=name, storage_path=str(tmp_path), backend="lance", num_buckets=1
    ) as writer:
        await writer.put({"id": 1})
    assert [p.name for p in tmp_path.iterdir()] == [name]
    async with await read_queue(topic=name, storage_path=str(tmp_path), group=name) as reader:
        assert await reader.get() == [{"id": 1}]
        await reader.commit()
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
async def test_topic_and_group_names_cannot_leave_the_storage_folder(
    tmp_path: Path, name: Any
) -> None:
    root = tmp_path / "root"
    for opening in (write_queue, read_queue):
        with pytest.raises(InvalidArgument):
            await opening(topic=name, storage_path=str(root))
    assert not list(tmp_path.iterdir())
    await made(root)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidArgument):
        await read_queue(topic="t", storage_path=str(root), group=name)
    assert sorted(tmp_path.rglob("*")) == before


async def test_damaged_topic_file_is_reported_and_not_changed(tmp_path: Path) -> None:
    await made(tmp_path)
    path = tmp_path / "t" / "topic.json"
    for damage in (b"", b"{", b'{"topic": "t"}', b"\xff\xfe", b"[]"):
        path.write_bytes(damage)
        for opening in (write_queue, read_queue):
            with pytest.raises(StorageError, match=r"topic\.json"):
                await opening(topic="t", storage_path=str(tmp_path))
        assert path.read_bytes() == damage


async def test_topic_file_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    await made(tmp_path)
    path = tmp_path / "t" / "topic.json"
    path.write_text(json.dumps({**topic_file(tmp_path), "format": 3}))
    with pytest.raises(StorageError, match="upgrade"):
        await read_queue(topic="t", storage_path=str(tmp_path))


async def test_topic_file_is_complete_or_absent_after_any_failed_write(
    tmp_path: Path, faults: FaultyFileSystem
) -> None:
    for index in range(40):
        root = tmp_path / str(index)
        faults.fail_once_at(index)
        try:
            async with await write_queue(
                topic="t", storage_path=str(root), backend="lance", num_buckets=1
            ):
                pass
        except StorageError:
            pass
        waiting = faults.heal()
        if (root / "t" / "topic.json").exists():
            assert topic_file(root)["num_buckets"] == 1
        await made(root, num_buckets=1)
        if waiting:
            return
    raise AssertionError("making a topic takes more than 40 calls")


def test_writers_in_several_threads_create_one_topic(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        async def main() -> None:
            async with await write_queue(
                topic="t", storage_path=str(tmp_path), backend="lance", num_buckets=2
            ) as writer:
                await writer.put(numbered(50, 50 * number))

        try:
            asyncio.run(main())
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors

    async def check() -> list[Any]:
        async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
            return await streamed(reader)

    assert sorted(ids(asyncio.run(check()))) == list(range(300))


async def test_storage_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="file"):
        await write_queue(topic="t", storage_path=str(tmp_path / "file"), backend="lance")


@pytest.mark.parametrize("batch_size", [7, 250])
async def test_reader_of_a_stored_topic_streams_pages_of_its_batch_size(
    tmp_path: Path, batch_size: int
) -> None:
    async with await write_queue(
        topic="t",
        storage_path=str(tmp_path),
        backend="lance",
        num_buckets=1,
        batch_size=batch_size,
    ) as writer:
        await writer.put([{"id": str(n)} for n in range(500)])

    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        pages = [page async for page in reader._topic.bucket(0).pages(0, None, False)]

    whole, rest = divmod(500, batch_size)
    assert [len(page.rows) for page in pages] == [batch_size] * whole + [rest] * bool(rest)
