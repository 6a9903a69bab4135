"""One file of the log, open for appending."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import NamedTuple

from persisting.fs import FileSystem
from persisting.wal.frame import SegmentHeader, encode_segment_header

SUFFIX = ".wal"
_NAME = re.compile(r"(\d{20})-([0-9a-f]{8})\.wal")


class SegmentName(NamedTuple):
    """The parts of a segment's file name."""

    first_sequence: int
    salt: int

    def __str__(self) -> str:
        return f"{self.first_sequence:020d}-{self.salt:08x}{SUFFIX}"


def new_name(first_sequence: int) -> SegmentName:
    """Return the name of a new segment, with a new salt."""
    return SegmentName(first_sequence, secrets.randbits(32))


def parse_name(name: str) -> SegmentName | None:
    """Return the parts of a segment's file name, None for any other name."""
    match = _NAME.fullmatch(name)
    return SegmentName(int(match[1]), int(match[2], 16)) if match else None


class Segment:
    """A new segment: its file exists and its header is written; nothing is synced yet."""

    def __init__(self, folder: Path, fs: FileSystem, name: SegmentName) -> None:
        self.salt = name.salt
        self.path = folder / str(name)
        self.last_sequence = name.first_sequence - 1
        self.named = False
        """Whether the folder's entry of the file is synced."""
        self._fs = fs
        header = encode_segment_header(SegmentHeader(name.first_sequence, name.salt))
        self._fd: int | None = fs.create(self.path)
        try:
            fs.write(self._fd, header)
        except BaseException:
            self.close()
            fs.remove(self.path)
            raise
        self.size = len(header)

    def append(self, data: bytes, last_sequence: int) -> None:
        """Write complete frames; on failure cut the file back to its old size, and raise."""
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
        """Make the file durable, and the first time also its folder entry."""
        assert self._fd is not None
        self._fs.sync(self._fd)
        if not self.named:
            self._fs.sync_folder(self.path.parent)
            self.named = True

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._fs.close(fd)
