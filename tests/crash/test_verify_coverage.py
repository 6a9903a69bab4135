"""What verify() covers besides data files, and what it does not cover."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.indexed_bucket import flip, indexed_bucket, text_rows

from persisting.errors import TableError
from persisting.queue import LanceBackend
from persisting.table import checksums, files


@pytest.fixture
async def bucket(tmp_path: Path):
    async with indexed_bucket(tmp_path) as backend:
        yield backend


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
                await backend.put_batch(text_rows(n * 10, 10))
                await backend.flush()
            report = await backend.verify()
            assert report["ok"]
            assert len(report["unchecked"]) == 2
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.compact()
        assert (await backend.verify())["unchecked"] == []
        assert await backend.get() == text_rows(0, 20)


async def test_create_index_replaces_a_damaged_index(bucket, tmp_path):
    for path in (tmp_path / "data.lance" / "_indices").rglob("*.lance"):
        flip(path)
    await bucket.delete_tag("x")
    assert (await bucket.verify())["ok"] is False
    await bucket.create_index("text")
    assert (await bucket.verify())["ok"]
    assert len(await bucket.search(text="word", k=100)) == 30
