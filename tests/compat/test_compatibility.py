"""Folders of past versions can be read and written; newer formats are refused."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import support.compat_topic as kept
from support.comparing import equal_but_for_absent

from persisting.errors import StorageError, WALError
from persisting.queue import read_queue, write_queue
from persisting.topic import backup
from persisting.wal.frame import FORMAT_VERSION, SegmentHeader, encode_segment_header

FIXTURES = Path(__file__).with_name("fixtures")
VERSIONS = sorted(path.name for path in FIXTURES.iterdir())
MOST_BYTES = 300_000


@pytest.fixture(params=VERSIONS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the folder that a past version wrote."""
    shutil.copytree(FIXTURES / request.param, tmp_path / "copy")
    return tmp_path / "copy"


def by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    indexed = {row["id"]: row for row in rows}
    assert len(indexed) == len(rows)
    return indexed


def assert_all_equal(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    actual = by_id(rows)
    assert set(actual) == set(by_id(expected))
    for record in expected:
        assert equal_but_for_absent(record, actual[record["id"]])


def test_the_fixture_of_a_past_version_exists_and_is_small() -> None:
    assert "0.4.0" in VERSIONS
    for version in VERSIONS:
        files = [path for path in (FIXTURES / version).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < MOST_BYTES
        assert any(path.suffix == ".wal" for path in files)


async def test_every_record_of_a_past_version_keeps_its_values_and_offset(folder: Path) -> None:
    async with await write_queue(topic=kept.TOPIC, storage_path=str(folder)) as writer:
        order = {record["id"]: place for place, record in enumerate(kept.ALL)}
        rows = []
        for bucket in range(kept.BUCKETS):
            async with await read_queue(
                topic=kept.TOPIC, storage_path=str(folder), bucket_id=bucket
            ) as reader:
                found = await reader.get(None)
            places = [order[row["id"]] for row in found]
            assert places == sorted(places)
            rows += found
        assert_all_equal(rows, kept.ALL)
        assert (await writer.verify())["ok"]


async def test_tags_groups_indexes_and_writers_of_a_past_version_still_work(folder: Path) -> None:
    where = {"topic": kept.TOPIC, "storage_path": str(folder)}
    async with (
        await write_queue(**where, writer_id="writer") as writer,
        await read_queue(**where, group=kept.GROUP) as reader,
    ):
        assert_all_equal(await reader.get(None, version=kept.TAG), kept.FLUSHED[:20])
        assert await writer.last_sequence() == 4
        await writer.put(kept.IN_THE_LOG, sequence=4)
        assert (await writer.stats())["total_count"] == len(kept.ALL)
        assert {index["column"] for index in await writer.indexes()} == {"n", "text"}
        assert [row["id"] for row in await writer.lookup("n", 33)] == ["r33"]
        words = await writer.search(text="word1", column="text", k=50)
        assert len(words) == sum("word1" in record.get("text", "") for record in kept.ALL)
        left = await reader.get(None)
        assert len(left) == len(kept.ALL) - kept.READ_BY_GROUP
        await writer.restore(kept.TAG)
        await writer.put(kept.record(99))
        await writer.compact()
    async with await read_queue(**where) as again:
        assert_all_equal(await again.get(None), [*kept.FLUSHED[:20], kept.record(99)])


async def test_a_backup_of_a_past_version_can_be_restored(folder: Path) -> None:
    assert backup.damage_in(folder / "backup") == []
    backup.restore(folder / "backup", folder / "again")
    async with await read_queue(topic="again", storage_path=str(folder)) as reader:
        assert_all_equal(await reader.get(None), kept.COPIED)


# Newer formats


def set_newer_format(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99, **changes}))


@pytest.mark.parametrize("changes", [{}, {"num_buckets": {"now": "another thing"}}], ids=str)
async def test_a_topic_of_a_newer_format_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    set_newer_format(folder / kept.TOPIC / "topic.json", **changes)
    for opened in (write_queue, read_queue):
        with pytest.raises(StorageError, match=r"format 99.*upgrade"):
            await opened(topic=kept.TOPIC, storage_path=str(folder))


@pytest.mark.parametrize("changes", [{}, {"schema": ["now", "a list"]}], ids=str)
async def test_a_schema_of_a_newer_format_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    set_newer_format(folder / kept.TOPIC / "schema.json", **changes)
    with pytest.raises(StorageError, match=r"format 99.*upgrade"):
        async with await write_queue(topic=kept.TOPIC, storage_path=str(folder)) as writer:
            await writer.put({"id": "x", "brand-new": 1})


@pytest.mark.parametrize("changes", [{}, {"files": "elsewhere"}], ids=str)
def test_a_backup_of_a_newer_format_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    set_newer_format(folder / "backup" / "backup.json", **changes)
    for read in (backup.load, backup.damage_in, lambda copy: backup.restore(copy, folder / "new")):
        with pytest.raises(StorageError, match=r"format 99.*upgrade"):
            read(folder / "backup")


async def test_a_log_of_a_newer_format_is_refused_and_not_changed(folder: Path) -> None:
    segment = next((folder / kept.TOPIC).glob("bucket_*/wal/*.wal"))
    data = segment.read_bytes()
    size = len(encode_segment_header(SegmentHeader(1, 1)))
    version = struct.pack("<H", FORMAT_VERSION + 1)
    header = data[:8] + version + data[10 : size - 4]
    segment.write_bytes(header + struct.pack("<I", crc32(header)) + data[size:])
    changed = segment.read_bytes()
    with pytest.raises(WALError, match=rf"format {FORMAT_VERSION + 1}.*upgrade"):
        async with await write_queue(topic=kept.TOPIC, storage_path=str(folder)) as writer:
            await writer.stats()
    assert segment.read_bytes() == changed
