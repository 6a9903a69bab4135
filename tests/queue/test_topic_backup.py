"""A backup holds everything that was acknowledged before it began, even while others write."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.children import python
from support.damage import flip_bit
from support.dead_logs import dead_topic, logs_of, segments_of

from persisting.errors import InvalidArgument, StorageError
from persisting.queue import read_queue, write_queue
from persisting.topic import backup
from persisting.topic.topic_files import TopicFolder
from persisting.wal.inspection import inspect

LOGGED = {"enable_wal": True, "wal_sync_interval": 0.0}


async def writer_of(home: Path, topic: str = "t", **options: Any) -> Any:
    return await write_queue(
        topic=topic,
        storage_path=str(home),
        num_buckets=2,
        backend="persisting",
        backend_options={**LOGGED, **options},
    )


def records(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": str(n), "n": n, "text": f"text {n}"} for n in range(first, first + count)]


async def numbers_in(home: Path, topic: str, **options: Any) -> list[int]:
    async with await read_queue(topic=topic, storage_path=str(home)) as reader:
        return sorted(one["n"] for one in await reader.get(limit=None, **options))


def copy_of(home: Path, name: str = "copy", topic: str = "t") -> Path:
    backup.create(TopicFolder.open(home / topic), home / name)
    return home / name


async def test_backup_contains_flushed_and_logged_records(tmp_path: Path) -> None:
    async with await writer_of(tmp_path, flush_interval=None) as writer:
        await writer.put(records(0, 50))
        await writer.flush()
        await writer.put(records(50, 20))
        copy = copy_of(tmp_path)
        await writer.put(records(70, 5))
    made = backup.restore(copy, tmp_path / "again")
    assert made.rows == 50
    assert await numbers_in(tmp_path, "again") == list(range(70))
    assert await numbers_in(tmp_path, "t") == list(range(75))


async def test_backup_contains_a_bucket_emptied_by_retention(tmp_path: Path) -> None:
    async with await writer_of(tmp_path) as writer:
        await writer.put(records(0, 50))
        await writer.flush()
        await writer.retain(rows=0)
        await writer.put(records(50, 3))
        copy = copy_of(tmp_path)
    backup.restore(copy, tmp_path / "again")
    async with await writer_of(tmp_path, "again") as writer:
        await writer.put(records(53, 20))
    assert await numbers_in(tmp_path, "again") == list(range(50, 73))


async def test_backup_contains_offsets_tags_groups_indexes_and_tagged_versions(
    tmp_path: Path,
) -> None:
    async with await writer_of(tmp_path) as writer:
        await writer.put(records(0, 40))
        await writer.tag("early")
        await writer.put(records(40, 40))
        await writer.create_index("n")
        async with await read_queue(topic="t", storage_path=str(tmp_path), group="g") as reader:
            await reader.get(limit=30)
            committed = await reader.commit()
        await writer.compact()
        await writer.retain(rows=20)
        starts = [one["start_offset"] for one in (await writer.stats())["buckets"]]
        copy = copy_of(tmp_path)
    backup.restore(copy, tmp_path / "again")
    assert await numbers_in(tmp_path, "again", version="early") == list(range(40))
    async with await read_queue(topic="again", storage_path=str(tmp_path), group="g") as reader:
        stats = await reader.stats()
        assert [one["start_offset"] for one in stats["buckets"]] == starts
        assert stats["committed"] == committed
        assert [one["column"] for one in await reader.indexes()] == ["n"]
        assert (await reader.verify())["ok"]


@pytest.mark.parametrize(("keep", "interval"), [(600.0, 0.0), (0.01, 0.0), (600.0, 0.02)])
async def test_backups_made_while_the_owner_writes_are_complete(
    tmp_path: Path, keep: float, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``keep`` is how long the owner keeps old versions: with 0.01 s, files are removed while they
    are copied. Small segments are released while they are copied."""
    monkeypatch.setattr("persisting.wal.log.SEGMENT_BYTES", 2000)
    options = {"flush_threshold": 20, "keep_versions": keep, "wal_sync_interval": interval}
    async with await writer_of(tmp_path, **options) as writer:
        put = 0

        async def write() -> None:
            nonlocal put
            while True:
                await writer.put(records(put, 10))
                put += 10

        task = asyncio.create_task(write())
        floors = []
        for number in range(4):
            await asyncio.sleep(0.1)
            floors.append(put)
            source = TopicFolder.open(tmp_path / "t")
            await asyncio.to_thread(backup.create, source, tmp_path / f"copy{number}")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for number, floor in enumerate(floors):
        assert not backup.damage_in(tmp_path / f"copy{number}")
        backup.restore(tmp_path / f"copy{number}", tmp_path / f"again{number}")
        found = await numbers_in(tmp_path, f"again{number}")
        # A put goes to two buckets; of the put in flight, the backup may hold one part.
        assert len(found) == len(set(found))
        assert set(range(floor)) <= set(found)


OWNER = """
import asyncio, sys
from persisting.queue import write_queue

async def main():
    writer = await write_queue(
        topic="t", storage_path=sys.argv[1], num_buckets=2, backend="persisting",
        backend_options={"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None},
    )
    for n in range(100):
        await writer.put({"id": str(n), "n": n})
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_tag_replaced_during_a_backup_is_readable_in_the_backup(
    tmp_path: Path,
) -> None:
    options = {"enable_wal": True, "keep_versions": 0.001}
    writer = await write_queue(
        topic="t", storage_path=str(tmp_path), backend="persisting", backend_options=options
    )
    async with writer:
        await writer.put([{"id": n} for n in range(50)])
        await writer.tag("latest")
        await writer.put([{"id": n} for n in range(50, 100)])
        moved: list[int] = []
        loop = asyncio.get_running_loop()

        async def again() -> None:
            await writer.tag("latest")
            await writer.put([{"id": n} for n in range(100, 120)])
            await writer.flush()
            await writer.compact()

        def count(nbytes: int) -> None:
            if not moved:
                moved.append(nbytes)
                asyncio.run_coroutine_threadsafe(again(), loop).result(30)

        source = TopicFolder.open(tmp_path / "t")
        await asyncio.to_thread(backup.create, source, tmp_path / "copy", count)
    assert backup.damage_in(tmp_path / "copy") == []
    backup.restore(tmp_path / "copy", tmp_path / "again")
    async with await read_queue(topic="again", storage_path=str(tmp_path)) as reader:
        assert len(await reader.get(version="latest")) == 100
        assert len(await reader.get()) >= 100


async def test_backup_of_a_topic_with_a_killed_owner_contains_its_log(tmp_path: Path) -> None:
    with python(OWNER, tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    copy = copy_of(tmp_path)
    backup.restore(copy, tmp_path / "again")
    assert await numbers_in(tmp_path, "again") == list(range(100))
    assert await numbers_in(tmp_path, "t") == list(range(100))


async def segmented_writer(home: Path) -> Any:
    """Return a writer of a topic with 10 flushed and 30 logged records in 3 segments; the first two
    hold records of one bucket only."""
    writer = await writer_of(home, flush_interval=None)
    await writer.put(records(0, 10))
    await writer.flush()
    for first, same in ((10, {"id": "x"}), (20, {"id": "x"}), (30, {})):
        await writer.put([record | same for record in records(first, 10)])
        writer._topic._local._log.group_commit.seal()
    return writer


async def flush_one_bucket(home: Path, writer: Any) -> Any:
    """Release the first two segments."""
    local = writer._topic._local
    before = len(segments_of(home / "t"))
    for bucket in range(2):
        (await local.backend(bucket)).bucket.flusher.flush()
        if len(segments_of(home / "t")) < before:
            return writer
    raise AssertionError("no segment was released")


async def flush_and_put(home: Path, writer: Any) -> Any:
    await writer.flush()
    await writer.put(records(40, 10))
    return writer


async def move_to_another_log(home: Path, writer: Any) -> Any:
    await writer.close()
    writer = await writer_of(home, flush_interval=None)
    await writer.put(records(40, 10))
    return writer


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("event", [flush_one_bucket, flush_and_put, move_to_another_log])
async def test_backup_is_complete_whatever_happens_to_the_log_meanwhile(
    tmp_path: Path, event: Any, step: int
) -> None:
    """The event happens after the ``step``-th block has been copied."""
    writer = await segmented_writer(tmp_path)
    loop, blocks = asyncio.get_running_loop(), 0

    def count(_: int) -> None:
        nonlocal blocks, writer
        if blocks == step:
            happening = asyncio.run_coroutine_threadsafe(event(tmp_path, writer), loop)
            writer = happening.result(30)
        blocks += 1

    source = TopicFolder.open(tmp_path / "t")
    done = await asyncio.to_thread(backup.create, source, tmp_path / "copy", count)
    await writer.close()
    assert blocks > step
    names = {name for name in done.files if name.startswith("log/")}
    logged = sum(done.files[name].bytes for name in names)
    assert sum(bucket.log_bytes for bucket in done.buckets) == logged
    assert backup.damage_in(tmp_path / "copy") == []
    backup.restore(tmp_path / "copy", tmp_path / "again")
    found = await numbers_in(tmp_path, "again")
    assert len(found) == len(set(found))
    assert set(range(40)) <= set(found)
    await asyncio.to_thread(TopicFolder.open(tmp_path / "again").recover)
    assert await numbers_in(tmp_path, "again") == found
    assert list((tmp_path / "again" / "log").glob("*")) == []


async def test_backup_holds_the_complete_entries_of_a_log_with_a_torn_tail(tmp_path: Path) -> None:
    topic = await dead_topic(tmp_path / "queues", records(0, 10), records(10, 10))
    last = segments_of(topic)[-1]
    last.write_bytes(last.read_bytes()[:-3])
    copy = copy_of(topic.parent)
    (log,) = logs_of(copy)
    assert (inspect(log, 0).state, inspect(log, 0).torn_bytes) == ("whole", 0)
    backup.restore(copy, topic.parent / "again")
    assert await numbers_in(topic.parent, "again") == list(range(10))


async def test_backup_of_a_damaged_log_keeps_the_damage_for_a_repair(tmp_path: Path) -> None:
    topic = await dead_topic(tmp_path / "queues", records(0, 10), records(10, 10))
    first = segments_of(topic)[0]
    flip_bit(first, first.stat().st_size - 3)
    copy = copy_of(topic.parent)
    copied = [path.read_bytes() for path in segments_of(copy)]
    assert copied == [path.read_bytes() for path in segments_of(topic)]


async def test_backup_leaves_out_logs_that_no_bucket_needs(tmp_path: Path) -> None:
    topic = await dead_topic(tmp_path / "queues", records(0, 10))
    shutil.copytree(logs_of(topic)[0], tmp_path / "aside")
    await asyncio.to_thread(TopicFolder.open(topic).recover)
    shutil.copytree(tmp_path / "aside", topic / "log" / ("1" * 20 + "-00000000"))
    done = backup.create(TopicFolder.open(topic), tmp_path / "copy")
    assert not [name for name in done.files if name.startswith("log/")]
    assert done.rows == 10


async def test_backup_cannot_be_opened_as_a_topic_and_is_not_changed(tmp_path: Path) -> None:
    async with await writer_of(tmp_path) as writer:
        await writer.put(records(0, 5))
        copy_of(tmp_path)
    with pytest.raises(StorageError, match="is a backup"):
        await write_queue(topic="copy", storage_path=str(tmp_path))
    with pytest.raises(StorageError, match="is a backup"):
        await read_queue(topic="copy", storage_path=str(tmp_path))


@pytest.mark.parametrize("harm", ["flip", "remove", "unfinished", "newer", "escape"])
async def test_damaged_backup_is_refused_and_the_damage_is_named(tmp_path: Path, harm: str) -> None:
    async with await writer_of(tmp_path) as writer:
        await writer.put(records(0, 50))
        await writer.flush()
    copy = copy_of(tmp_path)
    data = next(copy.glob("bucket_0/data.lance/data/*"))
    note = copy / backup.FILE
    if harm == "flip":
        raw = bytearray(data.read_bytes())
        raw[10] ^= 1
        data.write_bytes(raw)
    elif harm == "remove":
        data.unlink()
    elif harm == "unfinished":
        note.unlink()
    else:
        known = msgspec.json.decode(note.read_bytes())
        if harm == "newer":
            known["format"] = 99
        else:
            known["files"]["../../escape"] = {"bytes": 0, "crc32": "00000000"}
        note.write_bytes(msgspec.json.encode(known))
    words = {
        "flip": data.name,
        "remove": data.name,
        "unfinished": "not finished",
        "newer": "upgrade",
        "escape": "outside",
    }
    if harm in ("flip", "remove"):
        assert [one.split(" ")[0] for one in backup.damage_in(copy)] == [
            str(data.relative_to(copy))
        ]
    with pytest.raises(StorageError, match=words[harm]):
        backup.restore(copy, tmp_path / "again")
    assert not (tmp_path / "again" / "topic.json").exists()


async def test_backup_and_restore_overwrite_nothing(tmp_path: Path) -> None:
    async with await writer_of(tmp_path) as writer:
        await writer.put(records(0, 5))
        copy = copy_of(tmp_path)
        with pytest.raises(InvalidArgument, match="already exists"):
            copy_of(tmp_path)
    with pytest.raises(InvalidArgument, match="already exists"):
        backup.restore(copy, tmp_path / "t")
    assert await numbers_in(tmp_path, "t") == list(range(5))


async def test_backup_into_the_topic_itself_is_refused(tmp_path: Path) -> None:
    async with await writer_of(tmp_path) as writer:
        await writer.put(records(0, 3))
    source = TopicFolder.open(tmp_path / "t")
    for place in ("inside", "groups/inside", "bucket_0/../inside"):
        with pytest.raises(InvalidArgument, match="inside the topic to be copied"):
            backup.create(source, tmp_path / "t" / place)
    assert not (tmp_path / "t" / "groups").exists()
