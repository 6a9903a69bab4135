"""The files of a table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.faults import FaultyFileSystem

from persisting.fs import FileSystem
from persisting.queue import LanceBackend, TableError
from persisting.table import files


def fragment(path: str, size: int | None) -> Any:
    return SimpleNamespace(files=[SimpleNamespace(path=path, file_size_bytes=size)])


async def make_table(folder: Path, flushes: int = 3) -> Path:
    async with LanceBackend(0, str(folder)) as backend:
        for i in range(flushes):
            await backend.put({"a": i})
            await backend.flush()
    return folder / "data.lance"


async def test_the_newest_version_is_derived_from_manifest_names(folder: Path) -> None:
    assert files.newest_version(folder / "nothing") == 0
    root = await make_table(folder)
    assert files.newest_version(root) == 3
    assert files.manifest_path(root, 3).is_file()
    (root / "_versions" / "rubbish.manifest").write_text("")
    (root / "_versions" / "123.tmp").write_text("")
    assert files.newest_version(root) == 3


def test_check_data_raises_on_missing_and_truncated_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "f.lance").write_bytes(b"12345")
    files.check_data(tmp_path, [fragment("f.lance", 5), fragment("f.lance", None)])
    with pytest.raises(TableError, match="has 5 bytes, its manifest says 6"):
        files.check_data(tmp_path, [fragment("f.lance", 6)])
    with pytest.raises(TableError, match="missing"):
        files.check_data(tmp_path, [fragment("gone.lance", 5)])


async def test_syncing_a_version_syncs_its_transaction_first(folder: Path) -> None:
    root = await make_table(folder)
    watched = FaultyFileSystem()
    files.sync_version(watched, root, 3)
    assert watched.calls == ["sync_file", "sync_folder", "sync_file", "sync_folder"]


async def test_a_broken_manifest_is_moved_aside_and_kept(folder: Path) -> None:
    root = await make_table(folder)
    content = files.manifest_path(root, 3).read_bytes()
    files.set_manifest_aside(FileSystem(), root, 3, "a test")
    assert files.newest_version(root) == 2
    kept = list((folder / files.ASIDE).iterdir())
    assert [p.read_bytes() for p in kept] == [content]


async def test_remove_new_data_removes_only_files_of_the_failed_write(folder: Path) -> None:
    root = await make_table(folder, 1)
    (root / "data" / "old.lance").write_text("")
    before = files.data_on_disk(root)
    (root / "data" / "new.lance").write_text("")
    files.remove_new_data(FileSystem(), root, before)
    assert files.data_on_disk(root) == before


@pytest.mark.parametrize("damage", [b"", b"\0" * 400, b"cut", None], ids=repr)
async def test_a_torn_newest_version_is_taken_back_after_a_crash(
    folder: Path, damage: bytes | None
) -> None:
    root = await make_table(folder)
    manifest = files.manifest_path(root, 3)
    manifest.write_bytes(manifest.read_bytes()[:-30] if damage is None else damage)
    (folder / ".lock").write_text("")
    (folder / "newest").unlink()  # power loss takes the note that the manifest is durable
    async with LanceBackend(0, str(folder)) as backend:
        assert await backend.get() == [{"a": 0}, {"a": 1}]
        await backend.put({"a": 9})
    async with LanceBackend(0, str(folder)) as backend:
        assert await backend.get() == [{"a": 0}, {"a": 1}, {"a": 9}]


async def test_a_broken_manifest_after_a_clean_close_raises_and_changes_nothing(
    folder: Path,
) -> None:
    root = await make_table(folder)
    files.manifest_path(root, 3).write_bytes(b"")
    before = sorted(p.name for p in (root / "_versions").iterdir())
    for _ in range(2):
        with pytest.raises(TableError, match="damage"):
            LanceBackend(0, str(folder))
    assert sorted(p.name for p in (root / "_versions").iterdir()) == before


async def test_a_missing_data_file_of_an_older_flush_raises(folder: Path) -> None:
    root = await make_table(folder)
    oldest = min((root / "data").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    oldest.unlink()
    with pytest.raises(TableError, match="missing"):
        LanceBackend(0, str(folder))
