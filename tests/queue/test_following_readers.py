"""Readers without the lock or a socket follow the log of an owner in another process."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.children import python, wait_for_line
from support.filesystems import HookedFileSystem
from support.following import following, owner, stored
from support.topic_places import ids, streamed
from support.waiting import SECONDS, until

from persisting import fs as filesystem
from persisting.bucket import log_follower, log_view, path_watch
from persisting.bucket.log_positions import POSITIONS_FILE, read_positions
from persisting.errors import StorageError, TableError, WALError
from persisting.lock import owner_of
from persisting.queue import LanceBackend, read_queue, write_queue
from persisting.table import files
from persisting.table.table import Table
from persisting.topic.readonly import ReadonlyBucketClient
from persisting.topic.routing import bucket_of
from persisting.topic.topic_files import TopicFolder

INTERVAL = 1000.0
"""Seconds between syncs that no test waits for."""


def opened(root: Path, **words: Any) -> Any:
    return read_queue(topic="t", storage_path=str(root), local_socket=False, **words)


def log_of(root: Path) -> Path:
    """Return the only log of the topic."""
    (log,) = (root / "t" / "log").iterdir()
    return log


def files_of(root: Path) -> dict[str, bytes]:
    """Return the content of the log and of the buckets, except what Lance writes."""
    found = [path for path in (root / "t").rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in found if "data.lance" not in path.parts}


def ids_in(bucket: int) -> list[int]:
    """Return ids that belong to one of two buckets, in order."""
    return [number for number in range(1000) if bucket_of(number, 2) == bucket]


def followers(root: Path) -> list[log_follower.LogFollower]:
    """Return the followers of this process that follow a log below ``root``."""
    return [f for f in log_follower._followers.values() if root in f.folder.parents]


@pytest.fixture(params=["inotify", "polling"])
def watching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Follow files by inotify where there is one, or by polling."""
    if request.param == "inotify" and not sys.platform.startswith("linux"):
        pytest.skip("this system has no inotify")
    monkeypatch.setattr(path_watch, "_watch", None)
    if request.param == "polling":
        monkeypatch.setattr(path_watch._Inotify, "open", lambda: None)
    yield
    assert path_watch.path_watch().polls == (request.param == "polling")


async def test_acknowledged_records_are_read_before_any_flush(tmp_path: Path) -> None:
    with owner(tmp_path, buckets=4) as writer:
        writer.tell("put", 0, 100)
        writer.tell("put", 100, 1)
        async with await opened(tmp_path) as reader:
            stats = await reader.stats()
            assert (stats["total_count"], stats["buffer_count"]) == (101, 101)
            assert sorted(ids(await streamed(reader))) == list(range(101))
            writer.tell("put", 101, 9)
            assert sorted(ids(await reader.get(limit=None))) == list(range(101, 110))
            await reader.reset()
            assert (await reader.get_arrow()).num_rows == 110
            writer.tell("flush")
            await reader.reset()
            assert sorted(ids(await reader.get(limit=None))) == list(range(110))


async def test_search_take_query_and_seek_find_records_of_the_log(tmp_path: Path) -> None:
    with owner(tmp_path) as writer:
        writer.tell("put", 0, 10)
        writer.tell("flush")
        writer.tell("put", 10, 10)
        async with await opened(tmp_path) as reader:
            assert ids(await reader.query("id >= 8 AND id < 12")) == [8, 9, 10, 11]
            assert ids(await reader.search(text="word15", column="text", k=1)) == [15]
            assert ids(await reader.take([(0, 3), (0, 17)])) == [3, 17]
            (bucket,) = (await reader.stats())["buckets"]
            assert (bucket["persisted_count"], bucket["buffer_count"]) == (10, 10)
            client = reader._topic.bucket(0)
            assert await client.last_number("w") == 10
            assert await client.find(0) == 0
            assert await client.find(1 << 60) == 20


async def test_blocking_stream_shows_records_as_they_are_acknowledged(
    tmp_path: Path, watching: None
) -> None:
    with owner(tmp_path, buckets=4) as writer:
        writer.tell("put", 0, 1)
        async with following(tmp_path) as seen:
            for start in range(1, 120, 4):
                await writer.does("put", start, 4)
                await seen.reaches(start + 4)
                if start % 40 == 1:
                    await writer.does("flush")
        seen.check_against(await stored(tmp_path))


async def test_records_of_the_log_are_shown_while_a_new_version_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, may_load, load = threading.Event(), threading.Event(), Table.load_newer

    def slowly(table: Table) -> Any:
        loading.set()
        assert may_load.wait(SECONDS)
        return load(table)

    with owner(tmp_path) as writer:
        writer.tell("put", 0, 5)
        writer.tell("flush")
        async with following(tmp_path) as seen:
            await seen.reaches(5)
            await writer.does("put", 5, 1)
            await seen.reaches(6)
            monkeypatch.setattr(Table, "load_newer", slowly)
            try:
                for start in range(6, 18, 3):  # the flushed segments are removed
                    await writer.does("flush")
                    assert await asyncio.to_thread(loading.wait, SECONDS)
                    await writer.does("put", start, 3)
                    await seen.reaches(start + 3)
            finally:
                may_load.set()
            await writer.does("flush")
            await writer.does("put", 18, 1)
            await seen.reaches(19)
        seen.check_against(await stored(tmp_path))


async def test_version_that_cannot_be_loaded_in_the_background_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(table: Table) -> Any:
        raise TableError("the disk fails")

    with owner(tmp_path) as writer:
        writer.tell("put", 0, 5)
        writer.tell("flush")
        async with await opened(tmp_path) as reader:
            assert len(await reader.get(wait=True)) == 5
            writer.tell("put", 5, 1)
            assert len(await reader.get(wait=True)) == 1
            waiting = asyncio.create_task(reader.get(wait=True, timeout=SECONDS))
            await asyncio.sleep(0.1)
            monkeypatch.setattr(Table, "load_newer", fail)
            await writer.does("flush")
            with pytest.raises(TableError, match="the disk fails"):
                await waiting


async def test_reader_that_waits_before_the_bucket_exists_sees_its_first_record(
    tmp_path: Path,
) -> None:
    async with await write_queue(
        topic="t",
        storage_path=str(tmp_path),
        backend="persisting",
        num_buckets=2,
        bucket_column="id",
        backend_options={"enable_wal": True, "flush_interval": None},
    ):
        pass
    async with following(tmp_path) as seen:
        with owner(tmp_path, buckets=2) as writer:
            await writer.does("put", 0, 5)
            await seen.reaches(5)
            assert seen.ids == list(range(5))


@pytest.mark.parametrize("interval", [0.0, INTERVAL])
async def test_everything_that_a_killed_owner_acknowledged_is_read_without_a_new_owner(
    tmp_path: Path, interval: float
) -> None:
    with owner(tmp_path, buckets=4, interval=interval) as writer:
        writer.tell("put", 0, 50)
        writer.tell("flush")
        async with await opened(tmp_path) as early:
            writer.tell("put", 50, 50)
            writer.tell("put", 100, 1)
            writer.kill()
            before = files_of(tmp_path)
            assert sorted(ids(await streamed(early))) == list(range(101))
    async with await opened(tmp_path) as late:
        assert sorted(ids(await streamed(late))) == list(range(101))
        assert owner_of(tmp_path / "t" / "bucket_0") is None
    assert files_of(tmp_path) == before
    async with await write_queue(topic="t", storage_path=str(tmp_path)) as heir:
        assert (await heir.stats())["total_count"] == 101


async def test_torn_tail_of_a_killed_owner_is_skipped_and_left_alone(tmp_path: Path) -> None:
    with owner(tmp_path) as writer:
        writer.tell("put", 0, 10)
        writer.kill()
    (segment,) = log_of(tmp_path).glob("*.wal")
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[-40:-10])
    before = segment.read_bytes()
    assert ids((await stored(tmp_path))[0]) == list(range(10))
    assert segment.read_bytes() == before


async def test_stream_continues_over_restarts_flushes_and_compactions(tmp_path: Path) -> None:
    async with following_later(tmp_path) as seen:
        total = 0
        for run in range(4):
            with owner(tmp_path, buckets=2, interval=0.0 if run % 2 else INTERVAL) as writer:
                for _ in range(6):
                    await writer.does("put", total, 7)
                    await writer.does("put", total + 7, 1)
                    total += 8
                    if total % 3 == 0:
                        await writer.does("flush")
                    if total % 5 == 0:
                        await writer.does("compact")
                await seen.reaches(total - 8)
                if run == 1:
                    await writer.does("close")
                else:
                    writer.kill()
        await seen.reaches(total)
        assert seen.ids == list(range(total))
    seen.check_against(await stored(tmp_path))


def following_later(root: Path) -> Any:
    """Follow the topic, which is created first."""
    with owner(root, buckets=2) as writer:
        writer.tell("flush")
    return following(root)


async def test_reader_that_lags_behind_the_log_finds_released_records_in_the_table(
    tmp_path: Path,
) -> None:
    with owner(tmp_path) as writer:
        writer.tell("put", 0, 5)
        async with await opened(tmp_path) as reader:
            assert len(await reader.get()) == 5
            for start in range(5, 25, 5):
                writer.tell("put", start, 5)
                writer.tell("flush")
            writer.tell("put", 25, 5)
            assert ids(await reader.get()) == list(range(5, 30))
            writer.tell("flush")
            writer.tell("put", 30, 1)
            assert ids(await reader.get()) == [30]
            (follower,) = followers(tmp_path)
            assert sum(map(len, follower._places.values())) <= 2


async def test_rows_that_were_read_from_the_log_stay_once_when_a_part_is_flushed(
    tmp_path: Path,
) -> None:
    with owner(tmp_path) as writer:
        writer.tell("put", 0, 1)
        async with await opened(tmp_path) as reader:
            seen = ids(await reader.get())
            for number in range(1, 40):
                writer.tell("put", number, 1)
                if number % 7 == 0:
                    writer.tell("flush")  # the reader takes these rows and the next one together
                else:
                    seen += ids(await reader.get())

            async def table_is_followed() -> bool:
                (bucket,) = (await reader.stats())["buckets"]
                assert bucket["end_offset"] == len(seen)
                return bool(bucket["persisted_count"] >= 36)

            await until(table_is_followed)
            await reader.reset()
            assert ids(await reader.get()) == seen == list(range(40))


@pytest.mark.parametrize("logged", [True, False])
async def test_closing_a_reader_ends_its_blocking_stream(tmp_path: Path, logged: bool) -> None:
    with owner(tmp_path, enable_wal=logged) as writer:
        writer.tell("put", 0, 5)
        writer.tell("flush")
        reader = await opened(tmp_path)
        found: list[int] = []

        async def follow() -> None:
            async for record in reader.get_stream(block=True):
                found.append(record["id"])

        async def has_caught_up() -> bool:
            return len(found) == 5

        tail = asyncio.create_task(follow())
        await until(has_caught_up)
        await asyncio.sleep(0.1)  # now it waits
        await reader.close()
        await asyncio.wait_for(tail, SECONDS)
        assert found == list(range(5))


async def test_restore_moves_a_following_reader_back(tmp_path: Path) -> None:
    with owner(tmp_path) as writer:
        writer.tell("put", 0, 5)
        writer.tell("tag", "five")
        writer.tell("put", 5, 5)
        async with await opened(tmp_path) as reader:
            assert ids(await reader.get()) == list(range(10))
            writer.tell("restore", "five")
            writer.tell("put", 50, 3)
            assert ids(await reader.get(wait=True, timeout=60)) == [50, 51, 52]
            (bucket,) = (await reader.stats())["buckets"]
            assert (bucket["end_offset"], bucket["epoch"]) == (8, 1)
            writer.tell("put", 53, 1)
            assert ids(await reader.get()) == [53]


async def test_retention_moves_the_start_under_a_following_reader(tmp_path: Path) -> None:
    with owner(tmp_path) as writer:
        for start in range(0, 30, 10):
            writer.tell("put", start, 10)
            writer.tell("flush")
        writer.tell("put", 30, 5)
        async with await opened(tmp_path) as reader:
            assert ids(await reader.get(limit=25)) == list(range(25))
            writer.tell("retain", 12)
            writer.tell("put", 35, 5)
            assert ids(await reader.get()) == list(range(25, 40))

            async def start_has_moved() -> bool:
                return (await reader.stats())["buckets"][0]["start_offset"] == 20

            await until(start_has_moved)
            await reader.reset()
            assert ids(await reader.get()) == list(range(20, 40))


async def test_records_that_left_the_log_before_they_were_read_are_read_immediately(
    tmp_path: Path,
) -> None:
    with owner(tmp_path) as writer:
        writer.tell("put", 0, 5)
        writer.tell("flush")
        async with await opened(tmp_path) as reader:
            assert ids(await reader.get()) == list(range(5))
            for start in range(5, 50, 5):
                writer.tell("put", start, 5)
                writer.tell("flush")
                assert ids(await reader.get()) == list(range(start, start + 5))


async def test_version_that_its_owner_takes_back_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, found = files.newest_version, []

    def newest_and_one_more(root: Path) -> int:
        found.append(newest(root) + (not found))
        return found[-1]

    with owner(tmp_path) as writer:
        writer.tell("put", 0, 5)
        writer.tell("flush")
        async with await opened(tmp_path) as reader:
            assert ids(await reader.get()) == list(range(5))
            monkeypatch.setattr(files, "newest_version", newest_and_one_more)
            writer.tell("put", 5, 5)
            writer.tell("flush")
            assert ids(await reader.get()) == list(range(5, 10))
    assert found[0] > found[1]


@pytest.mark.parametrize("steps", [["restore nothing"], ["put 0 5", "retain 0"]])
async def test_reader_that_waits_for_the_first_record_of_an_emptied_bucket_does_not_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    waits, wait = [], ReadonlyBucketClient.wait

    async def counted(self: ReadonlyBucketClient, *position: Any) -> None:
        waits.append(position)
        await wait(self, *position)

    monkeypatch.setattr(ReadonlyBucketClient, "wait", counted)
    with owner(tmp_path) as writer:
        for step in ("put 0 1", "retain 0", "tag nothing", *steps):
            writer.tell(*step.split())
        async with following(tmp_path) as seen:
            await asyncio.sleep(0.5)
            assert len(waits) < 5
            writer.tell("put", 50, 3)
            await seen.reaches(3)
            assert seen.ids == [50, 51, 52]


async def test_bucket_that_moves_to_another_owner_is_followed_there(tmp_path: Path) -> None:
    staying, moving = iter(ids_in(0)), iter(ids_in(1))
    with owner(tmp_path, buckets=2) as first, owner(tmp_path, buckets=2) as second:
        first.tell("put", next(staying), 1)
        async with following(tmp_path) as seen:
            count = 1
            for holder, other in ((first, second), (second, first), (first, second)):
                for _ in range(5):
                    await holder.does("put", next(moving), 1)
                    await first.does("put", next(staying), 1)
                    count += 2
                    await seen.reaches(count)
                await holder.does("drop", 1)
                await other.does("put", next(moving), 1)
                count += 1
                await seen.reaches(count)
        seen.check_against(await stored(tmp_path))


async def test_many_readers_share_one_follower(tmp_path: Path) -> None:
    with owner(tmp_path, buckets=4) as writer:
        writer.tell("put", 0, 40)
        readers = [await opened(tmp_path) for _ in range(12)]
        streams = [asyncio.create_task(streamed(r, limit=60, block=True)) for r in readers]
        await writer.does("put", 40, 20)
        for stream in streams:
            assert sorted(ids(await asyncio.wait_for(stream, 60))) == list(range(60))
        assert len(followers(tmp_path)) == 1
        for reader in readers:
            await reader.close()


async def test_damage_below_the_acknowledged_position_is_reported(tmp_path: Path) -> None:
    with owner(tmp_path) as writer:
        writer.tell("put", 0, 10)
        (segment,) = log_of(tmp_path).glob("*.wal")
        data = bytearray(segment.read_bytes())
        data[-5] ^= 0xFF
        segment.write_bytes(data)
        async with await opened(tmp_path) as reader:
            with pytest.raises(WALError, match="damaged"):
                await reader.get()
            writer.tell("flush")
            assert ids(await reader.get()) == list(range(10))


async def test_schema_that_evolves_in_the_log_is_read_with_its_defaults(tmp_path: Path) -> None:
    options = {"enable_wal": True, "flush_interval": None, "schema_defaults": {"later": "unknown"}}
    words: Any = {"backend": "persisting", "num_buckets": 1, "backend_options": options}
    async with await write_queue(topic="t", storage_path=str(tmp_path), **words) as writer:
        await writer.put({"id": 0})
        await writer.flush()
        await writer.put({"id": 1})
        await writer.put([{"id": 2.5, "later": "x"}, {"id": 3}])
        async with await opened(tmp_path) as reader:
            live = await reader.get()
        assert [record["later"] for record in live] == ["unknown", "unknown", "x", "unknown"]
        bare = LanceBackend(
            0,
            str(tmp_path / "t" / "bucket_0"),
            read_only=True,
            schema_defaults=options["schema_defaults"],
        )
        assert await bare.get() == live
        await bare.close()


async def test_log_that_skips_sequences_is_read_after_a_kill(tmp_path: Path) -> None:
    busy, cold = ids_in(0), ids_in(1)
    with owner(tmp_path, buckets=2) as writer:
        for number in cold[:20]:
            writer.tell("put", number, 1)
        writer.tell("close")
    with owner(tmp_path, buckets=2) as writer:
        for number in (busy[0], cold[20], busy[1], cold[21]):
            writer.tell("put", number, 1)
        writer.kill()
    rows = await stored(tmp_path)
    assert (ids(rows[0]), ids(rows[1])) == (busy[:2], cold[:22])
    async with await write_queue(topic="t", storage_path=str(tmp_path)) as heir:
        assert (await heir.stats())["total_count"] == 24


# Positions of consumers


class Recording(HookedFileSystem):
    """Notes which files are synced and renamed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def before(self, name: str, *args: Any) -> None:
        if name in ("sync_file", "rename"):
            self.calls.append((name, args[-1].name))


async def test_group_in_another_process_syncs_the_log_before_it_commits(tmp_path: Path) -> None:
    recorded = Recording()
    with owner(tmp_path, interval=INTERVAL) as writer, filesystem.use(recorded):
        writer.tell("put", 0, 10)
        async with await opened(tmp_path, group="g") as reader:
            assert len(await reader.get(limit=4)) == 4
            recorded.calls.clear()
            assert await reader.commit() == {0: 4}
            synced = [name for call, name in recorded.calls if call == "sync_file"]
            assert [name.endswith(".wal") for name in synced] == [True]
            assert recorded.calls[-1] == ("rename", "bucket_0.json")
            assert recorded.calls.index(("sync_file", synced[0])) == 0
            await reader.get(limit=4)
            recorded.calls.clear()
            assert await reader.commit() == {0: 8}
            assert [call for call, _ in recorded.calls] == ["rename"]
            writer.tell("put", 10, 1)
            await reader.get()
            recorded.calls.clear()
            assert await reader.commit() == {0: 11}
            assert [call for call, _ in recorded.calls] == ["sync_file", "rename"]


async def test_group_of_a_synced_log_syncs_nothing_itself(tmp_path: Path) -> None:
    recorded = Recording()
    with owner(tmp_path, interval=0.0) as writer, filesystem.use(recorded):
        writer.tell("put", 0, 10)
        async with await opened(tmp_path, group="g") as reader:
            await reader.get()
            recorded.calls.clear()
            await reader.commit()
            assert [call for call, _ in recorded.calls] == ["rename"]


async def test_group_of_the_owning_process_syncs_the_log_before_it_commits(tmp_path: Path) -> None:
    words: Any = {
        "backend": "persisting",
        "num_buckets": 1,
        "backend_options": {
            "enable_wal": True,
            "wal_sync_interval": INTERVAL,
            "flush_interval": None,
        },
    }
    async with await write_queue(topic="t", storage_path=str(tmp_path), **words) as writer:
        await writer.put([{"id": n} for n in range(10)])
        async with await opened(tmp_path, group="g") as reader:
            await reader.get(limit=5)
            with (log_of(tmp_path) / POSITIONS_FILE).open("rb") as file:
                positions = read_positions(file.fileno())
                assert positions.synced < positions.acknowledged
                await reader.commit()
                positions = read_positions(file.fileno())
                assert positions.synced == positions.acknowledged


async def test_failed_sync_of_the_log_fails_the_commit(tmp_path: Path) -> None:
    class Failing(HookedFileSystem):
        def before(self, name: str, *args: Any) -> None:
            if name == "sync_file" and args[0].suffix == ".wal":
                raise OSError(5, "Input/output error")

    with owner(tmp_path, interval=INTERVAL) as writer, filesystem.use(Failing()):
        writer.tell("put", 0, 10)
        reader = await opened(tmp_path, group="g")
        await reader.get()
        with pytest.raises(StorageError, match="sync the log"):
            await reader.commit()
        assert (await reader.stats())["committed"] == {0: 0}
        await reader.close()


def test_tail_follows_the_log_of_another_process(tmp_path: Path) -> None:
    code = "from persisting.cli import main; main()"
    with owner(tmp_path, buckets=2) as writer:
        writer.tell("put", 0, 1)
        words = ["tail", "t", "-f", "--json", "-c", "id", "-s", tmp_path]
        with python(code, *words) as tail:
            assert '"id":0' in wait_for_line(tail)
            for number in range(1, 6):
                writer.tell("put", number, 1)
                assert f'"id":{number}' in wait_for_line(tail)


async def test_reader_of_a_topic_without_a_log_sees_a_flush_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_view, "_TABLE_SECONDS", 3600.0)

    async def put(numbers: range) -> None:
        async with await write_queue(
            topic="t", storage_path=str(tmp_path), num_buckets=1, backend="lance"
        ) as writer:
            await writer.put([{"id": number} for number in numbers])

    await put(range(3))
    topic = TopicFolder.open(tmp_path / "t")
    assert topic.snapshot(0).end == 3
    await asyncio.sleep(0.05)  # file systems store the time of a change with a few milliseconds
    await put(range(3, 5))
    assert topic.snapshot(0).end == 5
