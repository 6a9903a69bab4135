"""The real system calls, including Lance's: promised data is synced after its last write.

The other tests trust ``persisting.fs``. This test records the calls of the whole process with a
shared object that is loaded before the C library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import TESTS
from support.compiling import shared_object

pytestmark = pytest.mark.nightly

RECORDER = TESTS / "support" / "crash" / "recorder.c"

PROGRAM = """
import asyncio, os, sys
from persisting.queue import LanceBackend, PersistingBackend, write_queue

def mark(name):
    os.close(os.open(os.path.join(sys.argv[2], "mark-" + name), os.O_CREAT | os.O_WRONLY))

async def fill(backend, name, durable_puts):
    await backend.put({"id": 0, "v": 1})
    if durable_puts:
        mark(name + "-put-1")
    await backend.flush()
    mark(name + "-flush-1")
    await backend.put_batch([{"id": i, "v": 2} for i in range(50)])
    await backend.flush()
    mark(name + "-flush-2")
    if name != "lance":
        await backend.put({"id": 51, "v": 2.5, "new": "field"})
        if durable_puts:
            mark(name + "-put-2")
        await backend.flush()
        mark(name + "-flush-3")
    await backend.put({"id": 52, "v": 2} if name == "lance" else {"id": 52, "v": 2, "new": "x"})
    await backend.close()
    mark(name + "-close")

async def main(folder):
    log = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}
    wal = PersistingBackend(0, folder + "/made/topic/bucket_wal", **log)
    await fill(wal, "wal", True)
    off = PersistingBackend(1, folder + "/made/topic/bucket_off", flush_interval=None)
    await fill(off, "off", False)
    await fill(LanceBackend(2, folder + "/made/topic/bucket_lance"), "lance", False)
    writer = await write_queue("shared", storage_path=folder + "/made", num_buckets=3,
                               backend="persisting", backend_options=log)
    for number in (1, 2):
        await writer.put([{"id": f"{number}.{n}", "n": n} for n in range(30)])
        mark(f"shared-put-{number}")
    await writer.close()

asyncio.run(main(sys.argv[1]))
"""


@dataclass
class Seen:
    """The calls up to a mark."""

    written: dict[int, int] = field(default_factory=dict)
    """Number of the last write, by inode."""
    bytes: dict[int, int] = field(default_factory=dict)
    synced: dict[int, int] = field(default_factory=dict)
    named: dict[str, int] = field(default_factory=dict)
    """Number of the call that created or renamed a path, or of the first call that used it: some
    renames of Lance bypass the C library."""


def marks(record: Path) -> Iterator[tuple[str, Seen]]:
    """Yield each mark of the program with the calls before it."""
    seen = Seen()
    lines = [line.split("\t") for line in record.read_text().splitlines()]
    for number, call, inode, count, path in sorted(lines, key=lambda line: int(line[0])):
        at, node = int(number), int(inode)
        name = os.path.basename(path)
        if call == "create" and name.startswith("mark-"):
            yield name.removeprefix("mark-"), seen
            continue
        seen.named.setdefault(path, at)
        if call == "write":
            seen.written[node] = at
            seen.bytes[node] = seen.bytes.get(node, 0) + int(count)
        elif call == "sync":
            seen.synced[node] = at
        else:
            seen.named[path] = at
            if call == "create":
                seen.written.setdefault(node, at)


def must_be_synced(bucket: Path, version: int) -> list[Path]:
    """Return the files of a version: its manifest, its transaction and its data files."""
    import lance

    root = bucket / "data.lance"
    dataset = lance.dataset(str(root), version=version)
    data = [root / "data" / f.path for part in dataset.get_fragments() for f in part.data_files()]
    manifest = root / "_versions" / f"{2**64 - 1 - version:020d}.manifest"
    transactions = list((root / "_transactions").glob(f"{version - 1}-*.txn"))
    assert len(transactions) == 1
    return [manifest, *transactions, *data]


def check(path: Path, base: Path, seen: Seen) -> None:
    """Raise unless a file, its name, and the names of its parent folders are durable."""
    node = path.stat().st_ino
    assert seen.bytes.get(node, 0) >= path.stat().st_size, f"the recorder missed writes to {path}"
    assert seen.synced.get(node, 0) > seen.written[node], f"{path} was written after its last sync"
    while path != base:
        named = seen.named.get(str(path))
        assert named is not None, f"the recorder missed how {path} came to its name"
        folder = path.parent
        synced = seen.synced.get(folder.stat().st_ino, 0)
        assert synced > named, f"{folder} was not synced after {path.name} appeared in it"
        path = folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("recorded")
    library = shared_object(RECORDER, base / "recorder.so")
    record, marked = base / "record", base / "marks"
    marked.mkdir()
    disk = base / "disk"
    disk.mkdir()
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(disk), str(marked)],
        check=True,
        env={**os.environ, "LD_PRELOAD": str(library), "RECORD": str(record)},
    )
    return disk, record


VERSIONS = {
    "lance": {"flush-1": 1, "flush-2": 2, "close": 3},
    "off": {"flush-1": 1, "flush-2": 2},
    "wal": {"flush-1": 1, "flush-2": 2},
}


@pytest.mark.parametrize("kind", VERSIONS)
def test_flushed_files_are_synced_after_their_last_write(
    recorded: tuple[Path, Path], kind: str
) -> None:
    import lance

    disk, record = recorded
    bucket = disk / "made" / "topic" / f"bucket_{kind}"
    newest = lance.dataset(str(bucket / "data.lance")).version
    versions = {**VERSIONS[kind], "close": newest}
    checked = 0
    for name, seen in marks(record):
        version = versions.get(name.removeprefix(f"{kind}-"))
        if name.startswith(f"{kind}-") and version is not None:
            for path in must_be_synced(bucket, version):
                check(path, disk, seen)
                checked += 1
    assert checked >= 3 * len(versions)


def test_every_version_is_synced_before_the_next_is_started(
    recorded: tuple[Path, Path],
) -> None:
    """This makes it possible to roll back a torn newest version."""
    import lance

    disk, record = recorded
    lines = [line.split("\t") for line in record.read_text().splitlines()]
    for kind in VERSIONS:
        root = disk / "made" / "topic" / f"bucket_{kind}" / "data.lance"
        versions = lance.dataset(str(root)).version
        assert versions >= 3
        for version in range(1, versions):
            older, newer = (
                root / "_versions" / f"{2**64 - 1 - v:020d}.manifest"
                for v in (version, version + 1)
            )
            began = min(int(n) for n, call, _, _, path in lines if path == str(newer))
            node, folder = older.stat().st_ino, older.parent.stat().st_ino
            for inode in (node, folder):
                synced = [
                    int(n)
                    for n, call, i, _, _ in lines
                    if call == "sync" and int(i) == inode and int(n) < began
                ]
                assert synced, f"{older} of {kind} was not synced before version {version + 1}"


def test_lock_file_is_synced_by_a_clean_close(recorded: tuple[Path, Path]) -> None:
    disk, record = recorded
    seen = {name: state for name, state in marks(record) if name.endswith("-close")}
    assert len(seen) == 3
    for kind in VERSIONS:
        note = disk / "made" / "topic" / f"bucket_{kind}" / ".lock"
        state, node = seen[f"{kind}-close"], note.stat().st_ino
        assert b'"clean":true' in note.read_bytes()
        assert state.synced[node] > state.written[node]


def test_acknowledged_put_is_synced_after_its_last_write(recorded: tuple[Path, Path]) -> None:
    disk, record = recorded
    log = str(disk / "made" / "topic" / "bucket_wal" / "wal")
    lines = [line.split("\t") for line in record.read_text().splitlines()]
    by_number = sorted(lines, key=lambda line: int(line[0]))
    for name in ("wal-put-1", "wal-put-2"):
        end = next(i for i, line in enumerate(by_number) if line[4].endswith(f"mark-{name}"))
        before = by_number[:end]
        segments = {line[4] for line in before if line[4].startswith(f"{log}/")}
        segments = {path for path in segments if path.endswith(".wal")}
        assert segments
        for path in segments:
            calls = [line[1] for line in before if line[4] == path]
            assert calls[0] == "create"
            assert calls[-1] == "sync", f"{path}: {calls}"
            named = next(i for i, line in enumerate(before) if line[4] == path)
            assert any(line[1] == "sync" and line[4] == log for line in before[named:])


def test_acknowledged_list_is_synced_in_the_log_that_its_buckets_share(
    recorded: tuple[Path, Path],
) -> None:
    disk, record = recorded
    topic = disk / "made" / "shared"
    lines = [line.split("\t") for line in record.read_text().splitlines()]
    by_number = sorted(lines, key=lambda line: int(line[0]))
    for name in ("shared-put-1", "shared-put-2"):
        end = next(i for i, line in enumerate(by_number) if line[4].endswith(f"mark-{name}"))
        calls = [(call, path) for _, call, _, _, path in by_number[:end]]
        written = {path for _, path in calls if path.startswith(f"{topic}/log/")}
        (segment,) = [path for path in written if path.endswith(".wal")]
        assert [call for call, path in calls if path == segment][-1] == "sync"
        log = os.path.dirname(segment)
        for path in (segment, log, *(f"{topic}/bucket_{n}/log.json" for n in range(3))):
            appeared = next(i for i, (_, used) in enumerate(calls) if used == path)
            assert ("sync", os.path.dirname(path)) in calls[appeared:], f"{path} is not durable"
