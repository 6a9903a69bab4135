"""Arbitrary bytes in the small files of a topic are read, or refused with a StorageError."""

from __future__ import annotations

import asyncio
import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile_files import documents

from persisting.bucket.group_offsets import read_committed
from persisting.bucket.shared_schema import SharedSchema
from persisting.errors import StorageError
from persisting.fs import FileSystem
from persisting.lock import left_note, owner_of
from persisting.queue import read_queue, write_queue
from persisting.table import indexes
from persisting.topic import backup, group_admin, spec, tags
from persisting.topic.topic_files import TopicFolder

FS = FileSystem()
MOST_BYTES = 64 << 20


async def filled(root: Path) -> None:
    async with await write_queue(
        topic="t",
        storage_path=str(root),
        num_buckets=1,
        backend="persisting",
        backend_options={"enable_wal": True, "flush_interval": None},
    ) as writer:
        await writer.put([{"id": str(n), "n": n, "text": f"word{n}"} for n in range(5)])
        await writer.tag("tagged")
        await writer.create_index("n")
        async with await read_queue(topic="t", storage_path=str(root), group="g") as reader:
            await reader.get(3)
            await reader.commit()
    backup.create(TopicFolder.open(root / "t"), root / "copy")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a topic with all its small files, and a backup of it."""
    root = tmp_path_factory.mktemp("home")
    asyncio.run(filled(root))
    return root


def use_topic(home: Path) -> None:
    """Use the topic in every way that opens it."""

    async def use() -> None:
        async with (
            await write_queue(topic="t", storage_path=str(home)) as writer,
            await read_queue(topic="t", storage_path=str(home), group="g") as reader,
        ):
            await writer.stats()
            await writer.tags()
            await writer.indexes()
            await writer.verify()
            await reader.get(2)
            await reader.stats()

    asyncio.run(use())


Reader = Callable[[Path], Any]
FILES: dict[str, tuple[str, Reader]] = {
    "topic": ("t/topic.json", lambda home: spec.load(home / "t", FS)),
    "schema": ("t/schema.json", lambda home: SharedSchema(home / "t/schema.json", FS).read()),
    "tag": ("t/tags/tagged.json", lambda home: tags.load(home / "t", "tagged", FS)),
    "tags": ("t/tags/tagged.json", lambda home: tags.all_in(home / "t", FS)),
    "group": ("t/groups/g/bucket_0.json", lambda home: read_committed(home / "t/groups/g", 0, FS)),
    "progress": (
        "t/groups/g/bucket_0.json",
        lambda home: group_admin.groups(
            home / "t", [0], lambda: {0: group_admin.Span(0, 5, [])}, FS
        ),
    ),
    "indexes": ("t/bucket_0/indexes.json", lambda home: indexes.load(home / "t/bucket_0", FS)),
    "backup": ("copy/backup.json", lambda home: backup.load(home / "copy")),
    "damage": ("copy/backup.json", lambda home: backup.damage_in(home / "copy")),
    "note": ("t/bucket_0/.lock", lambda home: left_note(home / "t/bucket_0")),
    "owner": ("t/bucket_0/.lock", lambda home: owner_of(home / "t/bucket_0")),
}
OPENED = (
    "t/topic.json",
    "t/schema.json",
    "t/tags/tagged.json",
    "t/groups/g/bucket_0.json",
    "t/bucket_0/indexes.json",
    "t/bucket_0/.lock",
)


@pytest.fixture
def original(home: Path, request: pytest.FixtureRequest) -> Iterator[bytes]:
    """Yield the valid bytes of the file, and write them back afterwards."""
    path = home / request.param
    before = path.read_bytes()
    yield before
    path.write_bytes(before)


def declared(read: Callable[[], Any]) -> None:
    """Assert that a call returns or raises a StorageError."""
    with suppress(StorageError):
        read()


@pytest.mark.parametrize(
    ("original", "name"),
    [(file, name) for name, (file, _) in FILES.items()],
    indirect=["original"],
    ids=list(FILES),
)
def test_a_file_with_any_bytes_is_read_or_refused(home: Path, original: bytes, name: str) -> None:
    file, reader = FILES[name]

    @settings(max_examples=150)
    @given(data=documents(original))
    def check(data: bytes) -> None:
        (home / file).write_bytes(data)
        tracemalloc.start()
        try:
            declared(lambda: reader(home))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < MOST_BYTES

    check()


@pytest.mark.parametrize("original", OPENED, indirect=True, ids=[Path(f).name for f in OPENED])
def test_a_topic_with_any_bytes_in_a_file_is_opened_or_refused(
    home: Path, original: bytes, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    file = request.node.callspec.params["original"]

    @settings(max_examples=12)
    @given(data=documents(original))
    def check(data: bytes) -> None:
        copied = tmp_path / "copied"
        shutil.copytree(home / "t", copied / "t")
        try:
            (copied / file).write_bytes(data)
            declared(lambda: use_topic(copied))
        finally:
            shutil.rmtree(copied)

    check()


@pytest.mark.parametrize("original", ["copy/backup.json"], indirect=True)
def test_a_backup_never_leads_out_of_its_folder(
    home: Path, original: bytes, tmp_path: Path
) -> None:
    good = json.loads(original)

    @settings(max_examples=30)
    @given(
        names=st.lists(st.sampled_from(["../x", "/tmp/x", "a/../../x", "t\0", "", "."]) | st.text())
    )
    def check(names: list[str]) -> None:
        entry = next(iter(good["files"].values()))
        twisted = {**good, "files": {**good["files"], **dict.fromkeys(names, entry)}}
        (home / "copy/backup.json").write_text(json.dumps(twisted))
        made = tmp_path / "made"
        made.mkdir()
        declared(lambda: backup.damage_in(home / "copy"))
        declared(lambda: backup.restore(home / "copy", made / "again"))
        assert {path.name for path in tmp_path.iterdir()} <= {"made"}
        assert {path.name for path in made.iterdir()} <= {"again"}
        shutil.rmtree(made)

    check()
