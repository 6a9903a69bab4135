"""The one seam for file calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.faults import FaultyFileSystem

from persisting import fs
from persisting.fs import FileSystem
from persisting.queue import LanceBackend


def test_make_folder_makes_the_chain_and_syncs_each_parent(tmp_path: Path) -> None:
    class Recording(FileSystem):
        def __init__(self) -> None:
            self.synced: list[Path] = []

        def sync_folder(self, path: Path) -> None:
            super().sync_folder(path)
            self.synced.append(path)

    files = Recording()
    files.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert files.synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    files.make_folder(tmp_path / "a" / "b" / "c")
    assert len(files.synced) == 3


def test_create_refuses_a_file_that_exists(tmp_path: Path) -> None:
    files = FileSystem()
    files.close(files.create(tmp_path / "f"))
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "f")


def test_write_appends_all_of_it(tmp_path: Path) -> None:
    files = FileSystem()
    fd = files.create(tmp_path / "f")
    files.write(fd, b"abc")
    files.write(fd, memoryview(b"x" * 3_000_000))
    files.sync(fd)
    files.truncate(fd, 1_000_000)
    files.write(fd, b"end")
    files.close(fd)
    data = files.read(tmp_path / "f")
    assert data == b"abc" + b"x" * 999_997 + b"end"


def test_write_goes_on_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:7]))
    files = FileSystem()
    fd = files.create(tmp_path / "f")
    files.write(fd, bytes(range(100)))
    files.close(fd)
    assert (tmp_path / "f").read_bytes() == bytes(range(100))


def test_write_file_replaces_atomically_and_survives_a_stale_draft(tmp_path: Path) -> None:
    files = FileSystem()
    (tmp_path / "f.tmp").write_text("stale")
    files.write_file(tmp_path / "f", b"one")
    files.write_file(tmp_path / "f", b"two")
    assert files.read(tmp_path / "f") == b"two"
    assert files.list(tmp_path) == ["f"]


def test_a_failed_write_file_leaves_the_old_content(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    files.write_file(tmp_path / "f", b"old")
    for call in ("create", "write", "sync", "rename"):
        files.fail_always(call)
        with pytest.raises(OSError, match="injected"):
            files.write_file(tmp_path / "f", b"new")
        files.heal()
        assert files.read(tmp_path / "f") == b"old"


def test_cut_file_shortens(tmp_path: Path) -> None:
    files = FileSystem()
    (tmp_path / "f").write_bytes(b"abcdef")
    files.cut_file(tmp_path / "f", 2)
    assert files.read(tmp_path / "f") == b"ab"


def test_remove_of_what_is_not_there_is_fine(tmp_path: Path) -> None:
    FileSystem().remove(tmp_path / "nothing")


async def test_use_replaces_the_seam_for_buckets_opened_inside(tmp_path: Path) -> None:
    outside = fs.current()
    watched = FaultyFileSystem()
    with fs.use(watched):
        assert fs.current() is watched
        backend = LanceBackend(0, str(tmp_path / "b"))
    assert fs.current() is outside
    before = len(watched.calls)
    await backend.put({"a": 1})
    await backend.close()
    assert len(watched.calls) > before


async def test_a_flush_syncs_data_before_it_commits_and_the_commit_after(tmp_path: Path) -> None:
    class Ordered(FileSystem):
        def __init__(self) -> None:
            self.synced: list[str] = []

        def sync_file(self, path: Path) -> None:
            super().sync_file(path)
            self.synced.append(path.suffix)

        def sync_folder(self, path: Path) -> None:
            super().sync_folder(path)
            self.synced.append(path.name)

    with fs.use(Ordered()) as files:
        assert isinstance(files, Ordered)
        async with LanceBackend(0, str(tmp_path / "b")) as backend:
            for i in range(3):
                files.synced.clear()
                await backend.put({"a": i})
                await backend.flush()
                order = files.synced
                assert order.index(".lance") < order.index("data") < order.index(".manifest")
                assert order.index(".txn") < order.index(".manifest") < order.index("_versions")
