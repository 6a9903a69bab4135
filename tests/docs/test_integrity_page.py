"""What docs/guide/integrity.md says that verify() finds, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import both, code, table_with

from persisting.errors import TableError
from persisting.queue import LanceBackend, PersistingBackend, read_queue, write_queue
from persisting.table import checksums, files

pages = pytest.mark.parametrize("page", both("guide/integrity.md"), ids=["en", "zh"])


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": n, "text": f"word {n}"} for n in range(first, first + count)]


@pytest.fixture
async def bucket(tmp_path: Path):
    """Three fragments, a tag, an index, and a column that was widened after the tag."""
    async with PersistingBackend(0, str(tmp_path), flush_interval=None) as backend:
        for n in range(3):
            await backend.put_batch(rows(n * 10, 10))
            await backend.flush()
        await backend.create_index("text")
        await backend.tag("x")
        await backend.put({"id": 0.5, "text": "wide"})
        await backend.flush()
        yield backend


def data_files(folder: Path) -> list[Path]:
    return sorted((folder / "data.lance" / "data").iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pages
async def test_the_keys_are_those_of_the_report(page: Path, bucket, tmp_path):
    report = await bucket.verify()
    assert {code(row[0]) for row in table_with(page, "ok", "unchecked")} == set(report)
    flip(data_files(tmp_path)[0])
    damage = (await bucket.verify())["damaged"][0]
    listed = {code(row[0]) for row in table_with(page, "file", "offsets")}
    assert listed == {*damage, "bucket"}


async def test_a_flipped_bit_in_any_data_file_or_index_is_found(bucket, tmp_path):
    assert (await bucket.verify())["ok"]
    root = tmp_path / "data.lance"
    index_files = [p for p in (root / "_indices").rglob("*.*") if p.is_file() and p.suffix]
    paths = [*data_files(tmp_path), *(p for p in index_files if not p.name.startswith("."))]
    assert len(paths) > 5
    held = []
    for path in paths:
        flip(path)
        report = await bucket.verify()
        named = [d for d in report["damaged"] if d["file"] == str(path.relative_to(root))]
        assert named, path
        assert report["ok"] is False
        held.append(named[0]["offsets"])
        flip(path)
    assert [0, 10] in held  # of the newest version, or of the tag
    assert None in held  # an index
    assert (await bucket.verify()) == {**report, "ok": True, "damaged": []}


@pytest.mark.parametrize("harm", ["missing", "cut"])
async def test_a_missing_or_cut_file_is_found(bucket, tmp_path, harm):
    path = data_files(tmp_path)[0]
    path.unlink() if harm == "missing" else path.write_bytes(path.read_bytes()[:-7])
    problems = [d["problem"] for d in (await bucket.verify())["damaged"]]
    assert any(p == "is missing" or "bytes, " in p for p in problems)


async def test_what_the_page_says_is_not_covered_is_not(bucket, tmp_path):
    await bucket.put({"id": 99, "text": "buffered"})
    assert (await bucket.verify())["rows"] == 31
    root = tmp_path / "data.lance"
    older = files.manifest_path(root, 1)
    for path in (older, next((root / "_transactions").glob("0-*.txn"))):
        flip(path)
        assert (await bucket.verify())["ok"]
        flip(path)


async def test_a_changed_newest_manifest_is_found_and_also_at_the_opening_after_a_clean_close(
    bucket, tmp_path
):
    newest = files.manifest_path(tmp_path / "data.lance", (await bucket.stats())["version"])
    content = newest.read_bytes()
    newest.write_bytes(files.manifest_path(tmp_path / "data.lance", 1).read_bytes())
    report = await bucket.verify()
    assert [d["file"] for d in report["damaged"]] == [f"_versions/{newest.name}"]
    newest.write_bytes(content)
    await bucket.close()
    newest = files.manifest_path(tmp_path / "data.lance", (await bucket.stats())["version"])
    flip(newest)
    with pytest.raises(TableError, match="is damaged"):
        LanceBackend(0, str(tmp_path))


async def test_files_without_a_checksum_are_told_and_get_one_when_rewritten(tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(checksums, "signed_metadata", lambda fs, root, fragments: list(fragments))
        async with LanceBackend(0, str(tmp_path)) as backend:
            for n in range(2):
                await backend.put_batch(rows(n * 10, 10))
                await backend.flush()
            report = await backend.verify()
            assert report["ok"]
            assert len(report["unchecked"]) == 2
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.compact()
        assert (await backend.verify())["unchecked"] == []
        assert await backend.get() == rows(0, 20)


async def test_opening_reads_no_data_and_verify_needs_no_lock(bucket, tmp_path):
    flip(data_files(tmp_path)[0])
    async with LanceBackend(0, str(tmp_path), read_only=True) as reader:
        assert (await reader.verify())["ok"] is False


async def test_a_topic_checks_every_bucket(tmp_path):
    options = {"num_buckets": 2, "backend": "lance", "storage_path": str(tmp_path)}
    async with await write_queue("t", **options) as writer:
        await writer.put(rows(0, 20))
        await writer.flush()
        whole = await writer.verify()
        assert (whole["ok"], whole["rows"], whole["files"]) == (True, 20, 2)
        flip(data_files(tmp_path / "t" / "bucket_1")[0])
        async with await read_queue("t", storage_path=str(tmp_path)) as reader:
            (damage,) = (await reader.verify())["damaged"]
        assert damage["bucket"] == 1
        assert damage["offsets"][0] == 0


async def test_a_damaged_index_is_replaced_by_create_index(bucket, tmp_path):
    for path in (tmp_path / "data.lance" / "_indices").rglob("*.lance"):
        flip(path)
    await bucket.delete_tag("x")
    assert (await bucket.verify())["ok"] is False
    await bucket.create_index("text")
    assert (await bucket.verify())["ok"]
    assert len(await bucket.search(text="word", k=100)) == 30
