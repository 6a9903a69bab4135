"""The log in read mode: what it holds, where it is torn, whether it is damaged.

Frames carry the last sequence that was synced when they were written, and that decides:

- broken **above** it: a torn tail, as power loss leaves it. It is cut off, a copy is kept.
- broken **at or below** it: damage to what was durable. :class:`WALError` names file and
  position, and nothing is changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from persisting.errors import WALError
from persisting.fs import FileSystem
from persisting.wal.frame import (
    FORMAT_VERSION,
    MORE,
    SEGMENT_HEADER_SIZE,
    Broken,
    Frame,
    SegmentHeader,
    decode_frame,
    decode_segment_header,
    later_headers,
)
from persisting.wal.log import Kept, Log
from persisting.wal.segment import SUFFIX, parse_name

log = logging.getLogger("persisting")

TRIMMED = "trimmed"
"""Folder, beside the segments, for copies of what was cut off."""


@dataclass
class Recovery:
    """One pass over the log in ``folder``, above the table's sequence ``after``."""

    folder: Path
    fs: FileSystem
    after: int
    kept: list[Kept] = field(default_factory=list)
    last_sequence: int = 0
    trimmed_bytes: int = 0

    def frames(self) -> Iterator[Frame]:
        """Every frame of every whole entry, in order; then the torn tail is cut off.

        Frames at or below ``after`` are among them: their schemas may be needed.
        """
        paths = self._without_passed(self._segments())
        self.last_sequence = self.after
        expected: int | None = None
        for index, path in enumerate(paths):
            data = memoryview(self.fs.read(path))
            try:
                header = decode_segment_header(data)
            except Broken as broken:
                self._torn_or_damaged(paths[index:], data, broken, self.last_sequence + 1)
                return
            self._check_header(path, header)
            expected = self._check_begin(path, header.first_sequence, expected)
            first = expected
            expected = yield from self._whole_entries(paths[index:], data, expected, header.salt)
            if expected is None:
                return
            if expected == first:
                # Without frames; the next segment begins at the same sequence.
                self.fs.remove(path)
                self.fs.sync_folder(self.folder)
            else:
                self._keep(path, len(data), expected - 1)

    def open_log(self) -> Log:
        """The log, ready to append after what was found, all of it durable now.

        A killed process may have left it in the page cache only, and what is appended next will
        say that it was synced.
        """
        for kept in self.kept:
            self.fs.sync_file(kept.path)
        self.fs.sync_folder(self.folder)
        return Log(
            self.folder,
            self.fs,
            next_sequence=self.last_sequence + 1,
            kept=self.kept,
        )

    def _whole_entries(
        self, paths: list[Path], data: memoryview, expected: int, salt: int
    ) -> Generator[Frame, None, int | None]:
        """The frames of one segment; returns the sequence after them, None after a torn end."""
        position, whole = SEGMENT_HEADER_SIZE, SEGMENT_HEADER_SIZE
        entry: list[Frame] = []
        next_whole = expected
        while position < len(data):
            try:
                frame, following = decode_frame(data, position, salt)
                if frame.sequence != expected:
                    raise Broken(position, f"sequence {frame.sequence} follows {expected - 1}")
            except Broken as broken:
                self._torn_or_damaged(paths, data, broken, expected, whole, next_whole)
                return None
            entry.append(frame)
            expected += 1
            position = following
            if not frame.flags & MORE:
                yield from entry
                entry, whole, next_whole = [], position, expected
                self.last_sequence = max(self.last_sequence, expected - 1)
        if entry:
            cut = Broken(whole, "the last entry is not whole")
            self._torn_or_damaged(paths, data, cut, expected, whole, next_whole)
            return None
        return expected

    def _torn_or_damaged(
        self,
        paths: list[Path],
        data: memoryview,
        broken: Broken,
        expected: int,
        whole: int = 0,
        next_whole: int | None = None,
    ) -> None:
        proof = self._proof(paths, data, broken.position, expected)
        if proof is not None:
            raise WALError(
                f"log segment {paths[0]} is damaged: {broken}, where sequence {expected} was "
                f"stored durably ({proof}). Nothing was changed; restore the file from a copy"
            )
        for path in paths[1:]:
            self._set_aside(path, self.fs.read(path), 0)
        # Before the cut: a later segment must not outlive the frames before it.
        self.fs.sync_folder(self.folder)
        self._set_aside(paths[0], data, whole)
        if whole > SEGMENT_HEADER_SIZE and next_whole is not None:
            self._keep(paths[0], whole, next_whole - 1)
        elif whole:
            self.fs.remove(paths[0])
        self.fs.sync_folder(self.folder)

    def _proof(
        self, paths: list[Path], data: memoryview, position: int, expected: int
    ) -> str | None:
        """What shows that ``expected`` had been synced, if anything does."""
        for path in paths:
            rest, start = (
                (data, position) if path is paths[0] else (memoryview(self.fs.read(path)), 0)
            )
            name = parse_name(path.name)
            assert name is not None
            for header in later_headers(rest, start, name.salt):
                if header.synced >= expected:
                    return f"{path.name} says so in the frame of sequence {header.sequence}"
        return None

    def _set_aside(self, path: Path, data: bytes | memoryview, whole: int) -> None:
        """Cut a segment to its ``whole`` bytes, or remove it, keeping a copy of the rest."""
        rest = bytes(data[whole:])
        if rest:
            folder = self.folder / TRIMMED
            self.fs.make_folder(folder)
            copy = folder / f"{path.name}.{whole}.{time.time_ns()}"
            self.fs.write_file(copy, rest)
            self.trimmed_bytes += len(rest)
            log.warning(
                "log segment %s: cut off a torn tail of %d bytes at byte %d, kept as %s",
                path,
                len(rest),
                whole,
                copy,
            )
        if whole:
            self.fs.cut_file(path, whole)
        else:
            self.fs.remove(path)

    def _check_begin(self, path: Path, first: int, expected: int | None) -> int:
        """Segments follow each other without a gap, but for what the table holds already."""
        if first > max(expected or 0, self.after + 1):
            raise WALError(
                f"log segment {path} begins at sequence {first}, but what comes before it ends at "
                f"{max(expected or 0, self.after + 1) - 1}: a segment is missing. Put it back into "
                f"{self.folder}"
            )
        if expected is not None and first < expected:
            raise WALError(
                f"log segment {path} begins at sequence {first}, which a segment before it holds "
                "already: one of them was copied. Put the log back as it was"
            )
        return first

    def _keep(self, path: Path, size: int, last_sequence: int) -> None:
        self.kept.append(Kept(path, last_sequence, size))

    def _segments(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        names = [name for name in self.fs.list(self.folder) if name.endswith(SUFFIX)]
        for name in names:
            if parse_name(name) is None:
                raise WALError(
                    f"{self.folder / name} has the name of no log segment: it was copied or "
                    "renamed. Put the log back as it was"
                )
        return [self.folder / name for name in sorted(names)]

    def _without_passed(self, paths: list[Path]) -> list[Path]:
        """Leave out segments that the table holds whole: the next one begins where it ends.

        They were released, and came back with a power loss, perhaps torn.
        """
        for index in range(len(paths) - 1, 0, -1):
            try:
                header = decode_segment_header(memoryview(self.fs.read(paths[index])))
            except Broken:
                continue
            if header.first_sequence <= self.after + 1:
                if _first_sequence(paths[index - 1]) == header.first_sequence:
                    continue
                for path in paths[:index]:
                    self._keep(path, path.stat().st_size, self.after)
                return paths[index:]
        return paths

    def _check_header(self, path: Path, header: SegmentHeader) -> None:
        if header.version > FORMAT_VERSION:
            raise WALError(
                f"log segment {path} has format {header.version}, this version reads up to "
                f"{FORMAT_VERSION}; upgrade persisting"
            )
        if parse_name(path.name) != (header.first_sequence, header.salt):
            raise WALError(
                f"log segment {path} says it begins at sequence {header.first_sequence}: it was "
                "copied or renamed. Put the log back as it was"
            )


def _first_sequence(path: Path) -> int:
    name = parse_name(path.name)
    assert name is not None
    return name.first_sequence
