"""The file system seam: every call, atomic writes of small files, and its replacement."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
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


def test_create_raises_if_the_file_exists(tmp_path: Path) -> None:
    files = FileSystem()
    files.close(files.create(tmp_path / "f"))
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "f")


def test_write_writes_all_bytes_of_a_large_buffer(tmp_path: Path) -> None:
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


def test_write_continues_after_a_short_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:7]))
    files = FileSystem()
    fd = files.create(tmp_path / "f")
    files.write(fd, bytes(range(100)))
    files.close(fd)
    assert (tmp_path / "f").read_bytes() == bytes(range(100))


def test_write_file_replaces_the_file_and_leaves_no_draft(tmp_path: Path) -> None:
    files = FileSystem()
    files.write_file(tmp_path / "f", b"one")
    files.write_file(tmp_path / "f", b"two")
    assert files.read(tmp_path / "f") == b"two"
    assert files.list(tmp_path) == ["f"]


def test_two_concurrent_writes_of_one_file_both_succeed(tmp_path: Path) -> None:
    both_drafts_written = threading.Barrier(2, timeout=30)

    class Meeting(FileSystem):
        def rename(self, old: Path, new: Path) -> None:
            both_drafts_written.wait()
            super().rename(old, new)

    files = Meeting()
    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(files.write_file, tmp_path / "f", data) for data in (b"one", b"two")]
        for write in writes:
            write.result()
    assert files.read(tmp_path / "f") in (b"one", b"two")
    assert files.list(tmp_path) == ["f"]


def test_remove_drafts_removes_what_a_crash_left_and_nothing_else(tmp_path: Path) -> None:
    class Killed(FileSystem):
        def rename(self, old: Path, new: Path) -> None:
            raise OSError("killed")

        def remove(self, path: Path) -> None:
            raise OSError("killed")

    FileSystem().write_file(tmp_path / "f", b"old")
    with pytest.raises(OSError, match="killed"):
        Killed().write_file(tmp_path / "f", b"new")
    assert len(FileSystem().list(tmp_path)) == 2
    foreign = ["download.tmp", "f.tmp", "notes.cafe.tmp"]
    for name in foreign:
        (tmp_path / name).write_text("not a draft of write_file")
    FileSystem().remove_drafts(tmp_path, of="g")
    assert len(FileSystem().list(tmp_path)) == 2 + len(foreign)
    FileSystem().remove_drafts(tmp_path, of="f")
    assert FileSystem().list(tmp_path) == sorted(["f", *foreign])
    with pytest.raises(OSError, match="killed"):
        Killed().write_file(tmp_path / "f", b"new")
    FileSystem().remove_drafts(tmp_path)
    assert FileSystem().list(tmp_path) == sorted(["f", *foreign])
    FileSystem().remove_drafts(tmp_path / "missing")


def test_a_failed_write_file_leaves_the_old_content_and_no_draft(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    files.write_file(tmp_path / "f", b"old")
    for call in ("create", "write", "sync", "rename"):
        files.fail_always(call)
        with pytest.raises(OSError, match="injected"):
            files.write_file(tmp_path / "f", b"new")
        files.heal()
        assert files.read(tmp_path / "f") == b"old"
        assert files.list(tmp_path) == ["f"]


def test_cut_file_shortens_the_file(tmp_path: Path) -> None:
    files = FileSystem()
    (tmp_path / "f").write_bytes(b"abcdef")
    files.cut_file(tmp_path / "f", 2)
    assert files.read(tmp_path / "f") == b"ab"


def test_remove_ignores_a_missing_file(tmp_path: Path) -> None:
    FileSystem().remove(tmp_path / "nothing")


async def test_use_replaces_the_file_system_of_buckets_opened_inside(tmp_path: Path) -> None:
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


async def test_a_flush_syncs_data_before_its_commit_and_the_commit_after(
    tmp_path: Path,
) -> None:
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
