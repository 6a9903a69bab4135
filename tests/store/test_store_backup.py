"""Backups of topics in object stores, and into object stores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.object_stores import SeaweedFS, storage_options, url

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.bucket.store_log_inspection import inspect_store_logs
from persisting.errors import InvalidArgument, NoSuchTopic, StorageError, TableError, WALError
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.topic import backup
from persisting.topic.inspect import find
from persisting.topic.store_files import StoreTopic
from persisting.topic.topic_files import TopicFolder
from persisting.wal.frame import SegmentHeader, encode_segment_header
from persisting.wal.segment import SegmentName
from persisting.wal.slots import LOGS, slot_key, slot_of

LOGGED = {"enable_wal": True, "flush_interval": None}


class Home:
    """A folder or a prefix with topics; both have the same words."""

    def __init__(self, root: str, options: dict[str, str] | None) -> None:
        self.root, self._options = root, options

    @property
    def where(self) -> dict[str, Any]:
        more = {} if self._options is None else {"storage_options": self._options}
        return {"storage_path": self.root, **more}

    def place(self, name: str) -> Path | ObjectStore:
        if self._options is None:
            return Path(self.root) / name
        return open_store(parse(self.root) / name, StorageOptions(self._options))

    def source(self, topic: str = "t") -> TopicFolder:
        if self._options is None:
            return find(topic, self.root)
        return StoreTopic.find(topic, self.root, self._options)

    async def writer(self, topic: str = "t", **options: Any) -> Any:
        given: dict[str, Any] = {
            "num_buckets": 2,
            "durable": True,
            "backend_options": {**LOGGED, **options},
        }
        return await write_queue(topic=topic, **self.where, **given)

    async def numbers(self, topic: str, **given: Any) -> list[int]:
        async with await read_queue(topic=topic, **self.where) as reader:
            return sorted(one["n"] for one in await reader.get(limit=None, **given))


@pytest.fixture
def in_store(server: SeaweedFS, prefix: str) -> Home:
    return Home(url(prefix), server.options())


@pytest.fixture
def in_folder(tmp_path: Path) -> Home:
    return Home(str(tmp_path / "topics"), None)


def records(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": str(n), "n": n, "text": f"text {n}"} for n in range(first, first + count)]


async def fill(home: Home) -> dict[int, int]:
    """Fill a topic that its owner still has open; return what its group has committed."""
    writer = await home.writer()
    await writer.put(records(0, 40))
    await writer.tag("early")
    await writer.put(records(40, 40))
    await writer.create_index("n")
    async with await read_queue(topic="t", **home.where, group="g") as reader:
        await reader.get(limit=30)
        committed: dict[int, int] = await reader.commit()
    await writer.compact()
    await writer.put(records(80, 20))  # in the log only
    await writer.put([{"id": "wide", "n": 100, "text": "x", "extra": 1.5}])
    return committed


WAYS = [
    pytest.param("in_store", "in_folder", "in_folder", id="store to folder, restored in a folder"),
    pytest.param("in_store", "in_store", "in_store", id="store to store, restored in a store"),
    pytest.param("in_folder", "in_store", "in_store", id="folder to store, restored in a store"),
    pytest.param(
        "in_folder",
        "in_store",
        "in_folder",
        id="folder to store, restored in a folder",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        "in_store",
        "in_folder",
        "in_store",
        id="store to folder, restored in a store",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("source", "middle", "target"), WAYS)
async def test_restored_topic_has_records_of_table_and_log_tags_groups_and_indexes(
    request: pytest.FixtureRequest, source: str, middle: str, target: str
) -> None:
    home, copies, last = (request.getfixturevalue(name) for name in (source, middle, target))
    committed = await fill(home)
    copy = copies.place("copy")
    made = await asyncio.to_thread(backup.create, home.source(), copy)
    assert made.rows == 80
    assert backup.damage_in(copy) == []
    again = await asyncio.to_thread(backup.restore, copy, last.place("again"))
    assert again.rows == 80
    assert await last.numbers("again") == list(range(101))
    assert await last.numbers("again", version="early") == list(range(40))
    async with await last.writer("again") as writer:
        await writer.put(records(101, 9))
        assert (await writer.verify())["ok"]
    async with await read_queue(topic="again", **last.where, group="g") as reader:
        stats = await reader.stats()
        assert stats["committed"] == committed
        assert [one["column"] for one in await reader.indexes()] == ["n"]
        assert len(await reader.get(limit=None)) == 110 - sum(committed.values())
    found = await last.numbers("again")
    assert found == list(range(110))


@pytest.mark.parametrize(("source", "middle", "target"), WAYS[:3])
async def test_restored_work_group_continues_where_it_was(
    request: pytest.FixtureRequest, source: str, middle: str, target: str
) -> None:
    home, copies, last = (request.getfixturevalue(name) for name in (source, middle, target))
    async with await home.writer() as writer:
        await writer.put(records(0, 20))
        group = {"group": "solvers", "mode": "work", "lease": 600.0}
        async with await read_queue(topic="t", **home.where, **group) as member:
            deliveries = await member.fetch(12)
            await member.ack(deliveries[:9])
            await deliveries[9].reject("no way")
            copy = copies.place("copy")
            await asyncio.to_thread(backup.create, home.source(), copy)
            await member.ack(deliveries[10:])  # not in the backup
    assert backup.damage_in(copy) == []
    await asyncio.to_thread(backup.restore, copy, last.place("again"))
    async with await read_queue(topic="again", **last.where, **group) as member:
        assert (await member.stats())["acknowledged"] == 9
        assert (await member.stats())["in_flight"] == 2  # their leases have not ended
        finished = {(d.bucket, d.offset) for d in deliveries}
        fetched = await member.fetch(50)
        assert len(fetched) == 8
        assert not finished & {(d.bucket, d.offset) for d in fetched}


async def test_work_group_that_has_written_nothing_is_restored(
    in_folder: Home, in_store: Home
) -> None:
    """Its keeper was killed between the header of its journal and the first write."""
    async with await in_folder.writer() as writer:
        await writer.put(records(0, 4))
    journal = Path(in_folder.root) / "t" / "groups" / "idle" / "work"
    journal.mkdir(parents=True)
    name = SegmentName(1, 7)
    (journal / str(name)).write_bytes(encode_segment_header(SegmentHeader(1, 7)))
    await asyncio.to_thread(backup.create, in_folder.source(), in_store.place("copy"))
    await asyncio.to_thread(backup.restore, in_store.place("copy"), in_store.place("again"))
    group = {"group": "idle", "mode": "work"}
    async with await read_queue(topic="again", **in_store.where, **group) as member:
        assert len(await member.fetch(9)) == 4


async def copied_during_writes(source: Home, target: Home, number: int) -> Path | ObjectStore:
    """Make a backup. On a slow machine the owner may remove versions faster than they are copied,
    which is an error."""
    for attempt in range(10):
        copy = target.place(f"copy{number}-{attempt}")
        try:
            await asyncio.to_thread(backup.create, source.source(), copy)
            return copy
        except StorageError as exc:
            if "a larger keep_versions" not in str(exc):
                raise
    raise AssertionError("no backup was made in 10 attempts")


async def test_backup_of_a_store_made_while_the_owner_writes_holds_all_acknowledged_records(
    in_store: Home, in_folder: Home
) -> None:
    """Versions are removed while they are copied, and objects of the log are released."""
    async with await in_store.writer(flush_threshold=30, keep_versions=0.01, lease=0.6) as writer:
        put = 0

        reached: list[asyncio.Event] = [asyncio.Event() for _ in range(3)]

        async def write() -> None:
            nonlocal put
            while True:
                await writer.put(records(put, 10))
                put += 10
                for number, event in enumerate(reached, 1):
                    if put >= 40 * number:
                        event.set()

        task = asyncio.create_task(write())
        floors, copies = [], []
        for number in range(3):
            await reached[number].wait()
            floors.append(put)
            copies.append(await copied_during_writes(in_store, in_folder, number))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for number, (floor, copy) in enumerate(zip(floors, copies, strict=True)):
        assert backup.damage_in(copy) == []
        await asyncio.to_thread(backup.restore, copy, in_folder.place(f"again{number}"))
        found = await in_folder.numbers(f"again{number}")
        assert len(found) == len(set(found))
        assert set(range(floor)) <= set(found)


async def test_late_put_of_the_old_owner_changes_neither_backup_nor_restored_topic(
    in_store: Home,
) -> None:
    store = in_store.place("t")
    assert isinstance(store, ObjectStore)
    async with await in_store.writer() as writer:
        await writer.put(records(0, 5))
    options: dict[str, Any] = {**LOGGED, "lease": 0.6}
    log = new_store_owner_log(store, 2, **options)
    place: Any = store.address / "bucket_0"
    owner = PersistingBackend(0, place, owner_log=log, **options)
    await owner.put({"id": "x", "n": 50, "text": "in the log"})
    copy = in_store.place("copy")
    backup.create(in_store.source(), copy)
    before = copy.entries("")  # type: ignore[union-attr]
    backup.restore(copy, in_store.place("again"))
    await owner.put({"id": "y", "n": 51, "text": "late"})
    assert copy.entries("") == before  # type: ignore[union-attr]
    assert await in_store.numbers("again") == [0, 1, 2, 3, 4, 50]
    async with await in_store.writer("again") as writer:
        await writer.put(records(60, 1))
    assert await in_store.numbers("again") == [0, 1, 2, 3, 4, 50, 60]
    await owner.close()


async def test_slots_after_a_free_one_are_not_copied_unless_it_was_acknowledged(
    in_store: Home, in_folder: Home
) -> None:
    store = in_store.place("t")
    assert isinstance(store, ObjectStore)
    async with await in_store.writer() as writer:
        for n in range(3):
            await writer.put(records(n, 1)[0])
        slots = [key for key in store.list(LOGS) if "/slots/" in key]
        name, last = slots[-1].split("/")[1], slot_of(slots[-1])
        found = store.get(slots[-1])
        assert found is not None
        store.create(slot_key(name, last + 2), found.data)  # as if slot last + 1 were under way
        backup.create(in_store.source(), in_folder.place("copy"))
        assert [report.state for report in inspect_store_logs(store, 2, lambda _: 0)] == ["whole"]
        store.delete([slots[-2]])
        with pytest.raises(WALError, match="is missing: it holds records that were acknowledged"):
            backup.create(in_store.source(), in_folder.place("damaged"))
        (report,) = inspect_store_logs(store, 2, lambda _: 0)
        assert (report.state, "is missing" in str(report.problem)) == ("damaged", True)
    backup.restore(in_folder.place("copy"), in_folder.place("again"))
    assert await in_folder.numbers("again") == [0, 1, 2]


async def test_half_copied_backup_and_half_restored_topic_cannot_be_used(
    in_store: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await in_store.writer() as writer:
        await writer.put(records(0, 5))
    copy = in_store.place("copy")
    with monkeypatch.context() as patched:
        patched.setattr("persisting.topic.backup_files.StoreFiles.finish", _fail)
        with pytest.raises(StorageError, match="cut off"):
            backup.create(in_store.source(), copy)
    with pytest.raises(InvalidArgument, match="was not finished"):
        backup.restore(copy, in_store.place("again"))
    with pytest.raises(InvalidArgument, match="there are objects below"):
        backup.create(in_store.source(), copy)
    backup.create(in_store.source(), in_store.place("copy2"))
    with monkeypatch.context() as patched:
        patched.setattr("persisting.topic.backup_files.StoreFiles.finish", _fail)
        with pytest.raises(StorageError, match="cut off"):
            backup.restore(in_store.place("copy2"), in_store.place("again"))
    for name in ("again", "copy", "copy2"):
        with pytest.raises(NoSuchTopic):
            await read_queue(topic=name, **in_store.where)


def _fail(*_: Any) -> None:
    raise StorageError("cut off")


async def test_changed_or_missing_object_of_a_backup_is_found(in_store: Home) -> None:
    async with await in_store.writer() as writer:
        await writer.put(records(0, 5))
    copy = in_store.place("copy")
    assert isinstance(copy, ObjectStore)
    made = backup.create(in_store.source(), copy)
    data = next(name for name in made.files if "/data/" in name)
    found = copy.get(data)
    assert found is not None
    changed = bytearray(found.data)
    changed[len(changed) // 2] ^= 1
    copy.swap(data, bytes(changed), found.version)
    copy.delete(["schema.json"])
    assert sorted(backup.damage_in(copy)) == sorted(
        [f"{data} has changed since it was copied", "schema.json is missing"]
    )
    with pytest.raises(TableError, match="use another backup"):
        backup.restore(copy, in_store.place("again"))


async def test_objects_are_copied_by_the_store_and_large_ones_in_parts(
    server: SeaweedFS, in_store: Home, in_folder: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores with other options are taken for different ones, between which nothing is copied by
    the store. One data file has more than two parts."""
    monkeypatch.setattr("persisting.store.object_store.PART_BYTES", 5 * 1024**2)
    async with await in_store.writer() as writer:
        await writer.put([{"id": "a", "n": 0, "text": "x", "blob": bytes(range(256)) * 50_000}])
    backup.create(in_store.source(), in_store.place("copy"))
    assert backup.damage_in(in_store.place("copy")) == []
    other = Home(in_store.root, storage_options(server.port, user_agent="another"))
    backup.create(in_store.source(), other.place("copy2"))
    assert backup.damage_in(other.place("copy2")) == []
    sizes = [backup.load(in_store.place(name)).bytes for name in ("copy", "copy2")]
    assert sizes[0] == sizes[1]
    backup.restore(other.place("copy2"), in_folder.place("again"))
    assert await in_folder.numbers("again") == [0]


async def test_files_of_a_folder_that_were_uploaded_are_not_opened_as_a_topic(
    in_store: Home, in_folder: Home
) -> None:
    async with await in_folder.writer() as writer:
        await writer.put(records(0, 3))
    copy, uploaded = in_folder.place("copy"), in_store.place("uploaded")
    assert isinstance(copy, Path)
    assert isinstance(uploaded, ObjectStore)
    backup.create(in_folder.source(), copy)
    for path in copy.rglob("*"):
        if path.is_file():
            uploaded.create(str(path.relative_to(copy)), path.read_bytes())
    with pytest.raises(StorageError, match="uploaded from a folder"):
        await in_store.writer("uploaded")
    backup.restore(uploaded, in_store.place("again"))
    assert await in_store.numbers("again") == [0, 1, 2]


async def test_topic_that_an_object_store_cannot_hold_is_refused_before_copying(
    in_store: Home, in_folder: Home
) -> None:
    async with await write_queue(topic="plain", **in_folder.where, backend="lance") as writer:
        await writer.put(records(0, 3))
    backup.create(in_folder.source("plain"), in_store.place("copy"))
    with pytest.raises(InvalidArgument, match="without a log"):
        backup.restore(in_store.place("copy"), in_store.place("again"))
    assert in_store.place("again").list("") == []  # type: ignore[union-attr]
    backup.restore(in_store.place("copy"), in_folder.place("again"))
    assert await in_folder.numbers("again") == [0, 1, 2]
