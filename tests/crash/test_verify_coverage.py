"""What verify() covers besides data files, and what it does not cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from persisting.errors import TableError
from persisting.queue import LanceBackend, PersistingBackend
from persisting.table import checksums, files


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": n, "text": f"word {n}"} for n in range(first, first + count)]


@pytest.fixture
async def bucket(tmp_path: Path):
    """A bucket with several fragments, a tag, an index, and a column widened after the tag."""
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


async def test_verify_ignores_the_buffer_and_older_manifests_and_transactions(bucket, tmp_path):
    await bucket.put({"id": 99, "text": "buffered"})
    assert (await bucket.verify())["rows"] == 31
    root = tmp_path / "data.lance"
    older = files.manifest_path(root, 1)
    for path in (older, next((root / "_transactions").glob("0-*.txn"))):
        flip(path)
        assert (await bucket.verify())["ok"]
        flip(path)


async def test_changed_newest_manifest_is_found_by_verify_and_on_open(bucket, tmp_path):
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


async def test_file_without_checksum_is_reported_and_gets_one_when_rewritten(tmp_path, monkeypatch):
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


async def test_create_index_replaces_a_damaged_index(bucket, tmp_path):
    for path in (tmp_path / "data.lance" / "_indices").rglob("*.lance"):
        flip(path)
    await bucket.delete_tag("x")
    assert (await bucket.verify())["ok"] is False
    await bucket.create_index("text")
    assert (await bucket.verify())["ok"]
    assert len(await bucket.search(text="word", k=100)) == 30
