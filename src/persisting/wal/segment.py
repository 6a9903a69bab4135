"""One file of the log, open for appending."""

from __future__ import annotations

from pathlib import Path

from persisting.fs import FileSystem
from persisting.wal.frame import SegmentHeader, encode_segment_header

SUFFIX = ".wal"


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:016d}{SUFFIX}"


def segment_number(name: str) -> int | None:
    """The number in a segment's file name, None for other files."""
    stem = name.removesuffix(SUFFIX)
    return int(stem) if stem != name and stem.isdigit() else None


class Segment:
    """A new segment: its file exists and its header is written, nothing is synced yet."""

    def __init__(self, folder: Path, fs: FileSystem, number: int, first_sequence: int) -> None:
        self.path = segment_path(folder, number)
        self.last_sequence = first_sequence - 1
        self.named = False
        """Whether the folder's entry for the file was synced."""
        self._fs = fs
        header = encode_segment_header(SegmentHeader(number, first_sequence))
        self._fd: int | None = fs.create(self.path)
        try:
            fs.write(self._fd, header)
        except BaseException:
            self.close()
            fs.remove(self.path)
            raise
        self.size = len(header)

    def append(self, data: bytes, last_sequence: int) -> None:
        """Write whole frames; on failure cut the file back to what it was, and raise."""
        assert self._fd is not None
        try:
            self._fs.write(self._fd, data)
        except BaseException:
            self.cut(self.size)
            raise
        self.size += len(data)
        self.last_sequence = last_sequence

    def cut(self, size: int) -> None:
        """Shorten the file to ``size``."""
        assert self._fd is not None
        self._fs.truncate(self._fd, size)
        self.size = size

    def sync(self) -> None:
        """Make the file durable, and the first time its name too."""
        assert self._fd is not None
        self._fs.sync(self._fd)
        if not self.named:
            self._fs.sync_folder(self.path.parent)
            self.named = True

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._fs.close(fd)
