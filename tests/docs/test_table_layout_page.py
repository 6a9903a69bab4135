"""The files of a bucket have the names and contents that docs/reference/table-layout.md states."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

import lance
import pytest
from support.doc_pages import blocks, both, code, table_with

from persisting.bucket.delays import DELAYS
from persisting.bucket.group_offsets import Committed
from persisting.bucket.producer_sequences import WRITERS
from persisting.queue import LanceBackend, PersistingBackend, read_queue, write_queue
from persisting.records.field_names import ARRIVAL
from persisting.table import checksums, files, indexes, layout, schema_change
from persisting.table.properties import RESTORES, SEAL, SEQUENCE, START, sealed
from persisting.table.table import FOLDER
from persisting.topic import tags

pages = pytest.mark.parametrize("page", both("reference/table-layout.md"), ids=["en", "zh"])


@pages
def test_table_layout_page_uses_the_names_of_the_code(page: Path):
    (arrival, _) = table_with(page, ARRIVAL)
    assert code(arrival[1]) == str(layout.ARRIVAL_FIELD.type)
    keys = {code(row[0]): code(row[1]) for row in table_with(page, layout.FORMAT_KEY)}
    assert keys == {layout.FORMAT_KEY: str(layout.FORMAT), layout.SCHEMA_KEY: ""}
    properties = {code(row[0]) for row in table_with(page, SEQUENCE)}
    assert properties == {SEQUENCE, WRITERS, DELAYS, START, RESTORES, SEAL}
    (checksum,) = table_with(page, checksums.LOOSE)
    assert "CRC-32" in checksum[1]
    text = page.read_text("utf-8")
    for name in (FOLDER, files.ASIDE, layout._UNUSED, schema_change._WIDE, schema_change._OLD):
        assert name in text
    listing = next(b.text for b in blocks(page) if b.language == "text")
    for name in (files.DATA, files.VERSIONS, files.TRANSACTIONS, files.INDICES, files.TAGS):
        assert f"    {name}/ " in listing
    for name in (indexes.FILE, files.CHANGING, files.CLEANING):
        assert f"  {name} " in listing


@pages
def test_table_layout_page_lists_the_fields_of_topic_files(page: Path):
    (tag, group, *_) = table_with(page, "tags/<name>.json")
    for struct in (tags.TopicTag, tags.BucketTag):
        assert {f"`{name}`" for name in struct.__struct_fields__} - {"`buckets`"} <= quoted(tag[1])
    assert {f"`{name}`" for name in Committed.__struct_fields__} == quoted(group[1])
    assert tags.FOLDER == "tags"


def quoted(cell: str) -> set[str]:
    return set(re.findall(r"`[^`]+`", cell))


async def written(path: Path, *, flushes: int = 2) -> None:
    async with LanceBackend(0, str(path)) as backend:
        for n in range(flushes):
            await backend.put({"n": n})
            await backend.flush()


def newest_manifest(path: Path) -> Path:
    root = path / FOLDER
    return files.manifest_path(root, files.newest_version(root))


async def test_lock_file_names_its_owner_and_a_clean_close(tmp_path):
    async with LanceBackend(3, str(tmp_path)):
        note = json.loads((tmp_path / ".lock").read_text())
        assert set(note) >= {"pid", "host", "bucket", "clean"}
        assert (note["bucket"], note["clean"]) == (3, False)
    assert json.loads((tmp_path / ".lock").read_text())["clean"] is True


async def test_clean_close_records_the_newest_version_and_its_manifest_checksum(tmp_path):
    await written(tmp_path)
    note = json.loads((tmp_path / ".lock").read_text())
    assert note["version"] == files.newest_version(tmp_path / FOLDER)
    assert note["manifest"] == f"{zlib.crc32(newest_manifest(tmp_path).read_bytes()):08x}"


async def test_files_and_folders_are_private(tmp_path):
    folder = tmp_path / "topic" / "bucket_0"
    async with PersistingBackend(0, str(folder), enable_wal=True) as backend:
        await backend.put({"n": 1})
        (segment,) = (folder / "wal").glob("*.wal")
        for path, mode in ((folder, 0o700), (folder / "wal", 0o700), (segment, 0o600)):
            assert path.stat().st_mode & 0o777 == mode
        assert (folder / ".lock").stat().st_mode & 0o777 == 0o600


async def test_rows_of_one_batch_share_their_arrival_time(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put_batch([{"n": n} for n in range(10)])
    column = lance.dataset(str(tmp_path / FOLDER)).to_table()[ARRIVAL]
    assert len(column.unique()) == 1


async def test_empty_structs_and_untyped_fields_are_stored(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put({"nothing": None, "empty": {}})
        await backend.flush()
        assert await backend.get() == [{"nothing": None, "empty": {}}]
    schema = lance.dataset(str(tmp_path / FOLDER)).schema
    assert schema.names == [ARRIVAL, "empty"]
    assert [field.name for field in schema.field("empty").type] == [layout._UNUSED]


async def test_table_without_a_log_has_sequence_zero(tmp_path):
    await written(tmp_path)
    newest = lance.dataset(str(tmp_path / FOLDER)).get_transactions(1)[0]
    assert newest.transaction_properties == sealed({SEQUENCE: "0"})


def test_seal_is_the_checksum_of_the_sorted_properties():
    text = '{"a": "1", "b": "2"}'
    assert sealed({"b": "2", "a": "1"})[SEAL] == f"{zlib.crc32(text.encode()):08x}"


async def test_checksums_are_in_data_file_names_or_in_the_configuration(
    tmp_path,
):
    async with PersistingBackend(0, str(tmp_path)) as backend:
        for n in range(3):
            await backend.put({"n": n, "text": "a b"})
            await backend.flush()
        await backend.compact()
        await backend.create_index("text")
        await backend.put({"n": 0.5, "text": "wide"})
        await backend.flush()
        dataset = lance.dataset(str(tmp_path / FOLDER))
        loose = json.loads(dataset.config()[checksums.LOOSE])
        named = set()
        for fragment in dataset.get_fragments():
            for file in fragment.metadata.files:
                crc = f"{zlib.crc32((tmp_path / FOLDER / 'data' / file.path).read_bytes()):08x}"
                found = re.search(r"-([0-9a-f]{8})\.lance$", file.path)
                named.add(bool(found))
                assert (found[1] if found else loose[f"data/{file.path}"]) == crc
        assert named == {True, False}
        assert any(name.startswith("_indices/") for name in loose)


async def test_start_and_restores_are_table_properties(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        for n in range(3):
            await backend.put({"n": n})
            await backend.flush()
        await backend.retain(rows=1)
        await backend.tag("x")
        await backend.put({"n": 3})
        await backend.restore("x")
    newest = lance.dataset(str(tmp_path / FOLDER)).get_transactions(1)[0].transaction_properties
    assert newest[START] == "2"
    (restored,) = json.loads(newest[RESTORES])
    assert set(restored) == {"end", "token"}
    assert restored["end"] == 3


async def test_index_spec_is_in_indexes_json_and_in_the_index_name(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put({"n": 1, "t": "a", "u": "b"})
        await backend.create_index("n")
        await backend.create_index("t")
        await backend.create_index("u", language="english")
    specs = json.loads((tmp_path / indexes.FILE).read_text())
    assert specs == [
        {"column": "n", "kind": "btree", "metric": "l2", "language": None},
        {"column": "t", "kind": "text", "metric": "l2", "language": None},
        {"column": "u", "kind": "text", "metric": "l2", "language": "english"},
    ]
    found = lance.dataset(str(tmp_path / FOLDER)).describe_indices()
    assert {index.name for index in found} == {
        "persisting_scalar_btree_l2_n",
        "persisting_text_2_words_t",
        "persisting_text_2_english_u",
    }


async def test_topic_tag_is_a_file_and_a_pin_in_every_bucket(tmp_path):
    options = {"num_buckets": 2, "backend": "lance", "storage_path": str(tmp_path)}
    async with (
        await write_queue("t", **options) as writer,
        await read_queue("t", storage_path=str(tmp_path), group="g") as member,
    ):
        await writer.put([{"id": n} for n in range(10)])
        await writer.tag("x")
        await member.get()
        await member.commit()
    tag = json.loads((tmp_path / "t" / "tags" / "x.json").read_text())
    assert set(tag) == {"name", "timestamp", "pin", "buckets"}
    for bucket, part in tag["buckets"].items():
        folder = tmp_path / "t" / f"bucket_{bucket}" / FOLDER
        assert lance.dataset(str(folder)).tags.list()[tag["pin"]]["version"] == part["version"]
    group = json.loads((tmp_path / "t" / "groups" / "g" / "bucket_0.json").read_text())
    assert set(group) == {"offset", "generation", "epoch"}
