"""Builds small logs on disk, recovers them, and fails their file calls."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from persisting.fs import FileSystem
from persisting.wal import Log, Payload, Recovery
from persisting.wal.frame import (
    FRAME_HEADER_SIZE,
    ROWS,
    SEGMENT_HEADER_SIZE,
    START,
    Frame,
    SegmentStart,
    encode_start,
)
from support.filesystems import HookedFileSystem, QuickFileSystem

PREAMBLE_END = SEGMENT_HEADER_SIZE + FRAME_HEADER_SIZE + len(encode_start(SegmentStart(0, {0: 0})))
"""Where the first entry of a segment begins, as long as sequences are below 128."""


def rows(data: bytes) -> Payload:
    return Payload(ROWS, 0, len(data), data)


def entry(*data: bytes) -> list[Payload]:
    return [rows(d) for d in data]


def size_of(*data: bytes) -> int:
    """The number of bytes of the frames with these payloads."""
    return sum(FRAME_HEADER_SIZE + len(d) for d in data)


def new_log(
    folder: Path, fs: FileSystem | None = None, kind: type[Log] = Log, **options: Any
) -> Log:
    return kind(folder, fs or QuickFileSystem(), next_sequence=1, **options)


class UnsyncedLog(Log):
    """Begins a segment before the ones before it are synced, as versions up to 0.5 did."""

    def _must_sync_first(self) -> bool:
        super()._must_sync_first()  # seals a full segment
        return False


def append(log: Log, *entries: Sequence[Payload]) -> list[int]:
    """Append entries of bucket 0 in one write; return their last sequences."""
    return log.append(entries, lambda: [start_of(log.last_written, {0: log.last_written})], 7)


def start_of(previous: int, buckets: dict[int, int]) -> Payload:
    """Return the first frame of a segment."""
    data = encode_start(SegmentStart(previous, buckets))
    return Payload(START, 0, len(data), data)


def write(log: Log, *entries: Sequence[bytes] | bytes, sync: bool = True) -> list[int]:
    """Append each entry by itself and sync it, as with a sync interval of 0; return the last
    sequences."""
    lasts: list[int] = []
    for item in entries:
        parts = [item] if isinstance(item, bytes) else item
        lasts += append(log, entry(*parts))
        if sync:
            log.sync()
    return lasts


def make_log(folder: Path, *segments: Sequence[Any], sync: bool = True) -> list[Path]:
    """Write and close a log of these segments, each a list of entries; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    log = new_log(folder, kind=Log if sync else UnsyncedLog)
    for entries in segments:
        write(log, *entries, sync=sync)
        log.seal()
    log.close()
    return segments_in(folder)


def segments_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.wal"))


def recover(
    folder: Path, *, after: int = 0, fs: FileSystem | None = None
) -> tuple[list[bytes], Recovery]:
    """Return the payloads of the rows that recovery finds, and the recovery."""
    recovery = Recovery(folder, fs or QuickFileSystem(), after)
    return rows_of(recovery.frames(), after), recovery


def rows_of(frames: Any, after: int = 0) -> list[bytes]:
    replayed: list[Frame] = list(frames)
    return [bytes(f.payload) for f in replayed if f.kind == ROWS and f.sequence > after]


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, to check that nothing changed."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def trimmed(folder: Path) -> list[bytes]:
    """The copies of the parts that were cut off."""
    return [path.read_bytes() for path in sorted((folder / "trimmed").glob("*"))]


class FailingFileSystem(HookedFileSystem, QuickFileSystem):
    """Fails the calls that a test selects."""

    def __init__(self) -> None:
        self.fail: Callable[[str, Any], BaseException | None] = lambda name, what: None
        self.calls: list[str] = []

    def fail_on(self, *names: str, error: BaseException | None = None) -> None:
        """Fail every call of these names until :meth:`heal`."""
        raised = error or OSError(errno.EIO, "Input/output error")
        self.fail = lambda name, what: raised if name in names else None

    def fail_at(self, index: int) -> None:
        """Fail every call from the ``index``-th on."""
        end = len(self.calls) + index
        self.fail = lambda name, what: (
            OSError(errno.EIO, "Input/output error") if len(self.calls) > end else None
        )

    def heal(self) -> None:
        self.fail = lambda name, what: None

    def before(self, name: str, *args: Any) -> None:
        if name in ("make_folder", "list"):
            return
        self.calls.append(name)
        error = self.fail(name, args[0])
        if error is not None:
            raise error
