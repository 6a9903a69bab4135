"""Presents the group commits of a log in an object store as the segments of a log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from persisting.bucket.log_index import Indexing, LogIndex
from persisting.wal.frame import decode_segment_header
from persisting.wal.inspection import ReadOnlyFileSystem
from persisting.wal.segment import SegmentName


class SlotFiles(ReadOnlyFileSystem):
    """Segments in memory: a slot has the bytes of a segment, and a segment's name is in its
    header."""

    def __init__(self, folder: Path, contents: Sequence[bytes]) -> None:
        self.folder = folder
        self._contents: dict[Path, bytes] = {}
        for data in contents:
            header = decode_segment_header(memoryview(data))
            name = SegmentName(header.first_sequence, header.salt)
            self._contents[folder / str(name)] = data

    def list(self, path: Path) -> list[str]:
        return sorted(segment.name for segment in self._contents)

    def read(self, path: Path) -> bytes:
        return self._contents[path]

    def sync_file(self, path: Path) -> None: ...

    def sync_folder(self, path: Path) -> None: ...


class _SlotIndexing(Indexing):
    def _segments(self) -> list[Path]:
        return [self.folder / name for name in self.fs.list(self.folder)]


def index_slots(place: str, contents: Sequence[bytes]) -> LogIndex:
    """Return the index of a log in an object store, given its group commits."""
    files = SlotFiles(Path(place), contents)
    return LogIndex(files.folder, files, _SlotIndexing(files.folder, files, 0))
