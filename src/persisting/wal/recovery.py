"""The log in read mode: replays it, cuts off a torn tail, and detects damage.

Every frame carries the last sequence that was synced when it was written. That decides what broken
bytes mean:

- broken **above** it: a torn tail, as power loss leaves it. It is cut off, and a copy is kept.
- broken **at or below** it: damage to durable data. :class:`WALError` names the file and the
  position, and nothing is changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from persisting.errors import WALError
from persisting.fs import FileSystem
from persisting.wal.frame import (
    FORMAT_VERSION,
    MORE,
    SEGMENT_HEADER_SIZE,
    Broken,
    Frame,
    SegmentHeader,
    SegmentStart,
    decode_frame,
    decode_segment_header,
    first_frame_start,
    later_headers,
)
from persisting.wal.log import SEGMENT_BYTES, Log, SealedSegment
from persisting.wal.segment import SUFFIX, parse_name

log = logging.getLogger("persisting")

_T = TypeVar("_T")

TRIMMED = "trimmed"
"""Folder, beside the segments, for copies of the parts cut off."""


class Scan(NamedTuple):
    """How far a segment is complete, and what follows."""

    whole: int
    """Bytes up to the end of the last complete entry; 0 without a header."""

    next_sequence: int
    """The sequence after that entry."""

    broken: Broken | None
    """Why the scan ended before the end of the segment, if it did."""

    missing: int
    """The sequence of the broken frame."""


@dataclass
class Recovery:
    """One pass over the log in ``folder``, above the table's sequence ``after``."""

    folder: Path
    fs: FileSystem
    after: int
    bucket: int | None = None
    """The bucket that ``after`` belongs to; None if all records are of one bucket."""
    kept: list[SealedSegment] = field(default_factory=list)
    last_sequence: int = 0
    trimmed_bytes: int = 0
    copies: list[Path] = field(default_factory=list)
    """The files that hold the parts cut off."""
    trimmed: Path | None = None
    """Folder for these files; by default beside the segments."""

    def frames(self) -> Iterator[Frame]:
        """Yield every frame of every complete entry, in order; then cut off a torn tail.

        Includes frames at or below ``after``, since their schemas may be needed.
        """
        yield from self._read_through(self._scan)

    def _read_through(
        self, scan_segment: Callable[[Path, memoryview, int | None], Generator[_T, None, Scan]]
    ) -> Iterator[_T]:
        """Yield what ``scan_segment`` yields for each segment; then cut off a torn tail."""
        paths = self._without_released(self._segments())
        self.last_sequence = self.after
        expected: int | None = None
        for index, path in enumerate(paths):
            data = memoryview(self.fs.read(path))
            scan = yield from scan_segment(path, data, expected)
            expected = scan.next_sequence
            if scan.broken is None or self._continues(paths[index + 1 :], expected):
                self._cut_to_whole(path, data, scan)
            else:
                self._torn_or_damaged(paths[index:], data, scan, scan.broken)
                return

    def open_log(self, segment_bytes: int = SEGMENT_BYTES) -> Log:
        """Make the replayed frames durable, and open the log to append after them.

        A killed process may have left frames only in the page cache, and the next frame will
        record them as synced.
        """
        for kept in self.kept:
            self.fs.sync_file(kept.path)
        self.fs.sync_folder(self.folder)
        return Log(
            self.folder,
            self.fs,
            next_sequence=self.last_sequence + 1,
            kept=self.kept,
            segment_bytes=segment_bytes,
        )

    def _scan(
        self, path: Path, data: memoryview, expected: int | None
    ) -> Generator[Frame, None, Scan]:
        """Yield the frames of a segment's complete entries; return how far it is complete."""
        header = self._begin_scan(path, data, expected)
        if isinstance(header, Scan):
            return header
        sequence, position = header.first_sequence, SEGMENT_HEADER_SIZE
        whole, next_sequence = position, sequence
        entry: list[Frame] = []
        while position < len(data):
            try:
                frame, following = decode_frame(data, position, header.salt)
                if frame.sequence != sequence:
                    raise Broken(position, f"sequence {frame.sequence} follows {sequence - 1}")
            except Broken as broken:
                return Scan(whole, next_sequence, broken, sequence)
            sequence, position = sequence + 1, following
            if frame.flags & MORE:
                entry.append(frame)
                continue
            if entry:
                yield from entry
                entry = []
            yield frame
            whole, next_sequence = position, sequence
            if self.last_sequence < sequence:
                self.last_sequence = sequence - 1
        broken_entry = Broken(whole, "the last entry is incomplete") if entry else None
        return Scan(whole, next_sequence, broken_entry, sequence)

    def _begin_scan(
        self, path: Path, data: memoryview, expected: int | None
    ) -> SegmentHeader | Scan:
        """Return the header of a segment that continues the log, or why the log ends before it."""
        try:
            header = decode_segment_header(data)
        except Broken as broken:
            return Scan(0, self.last_sequence + 1, broken, self.last_sequence + 1)
        self._check_header(path, header)
        try:
            start = first_frame_start(data, header)
            self._check_begin(path, header.first_sequence, start, expected)
        except Broken as broken:
            missing = max(expected or 0, self.after + 1)
            return Scan(0, missing, broken, missing)
        return header

    def _continues(self, later: list[Path], sequence: int) -> bool:
        """Whether the next segment begins at ``sequence``: then nothing after the break was
        acknowledged as durable."""
        if not later:
            return False
        data = memoryview(self.fs.read(later[0]))
        try:
            header = decode_segment_header(data)
        except Broken:
            return False
        start = first_frame_start(data, header)
        return _previous(header.first_sequence, start) == sequence - 1

    def _torn_or_damaged(
        self, paths: list[Path], data: memoryview, scan: Scan, broken: Broken
    ) -> None:
        proof = self._proof(paths, data, broken.position, scan.missing)
        if proof is not None:
            raise WALError(
                f"log segment {paths[0]} is damaged: {broken}, where sequence {scan.missing} was "
                f"stored durably ({proof}). Nothing was changed; restore the file from a copy, or "
                "cut the log off there with 'persisting wal repair'"
            )
        for path in paths[1:]:
            self._keep_copy(path, self.fs.read(path), 0)
            self.fs.remove(path)
        # Before the cut: a later segment must not outlive the frames before it.
        self.fs.sync_folder(self.folder)
        self._cut_to_whole(paths[0], data, scan)

    def _cut_to_whole(self, path: Path, data: memoryview, scan: Scan) -> None:
        """Keep the complete entries of a segment. Without any, remove it: the next segment begins
        at the same sequence."""
        self._keep_copy(path, bytes(data[scan.whole :]), scan.whole)
        if scan.whole <= SEGMENT_HEADER_SIZE:
            self.fs.remove(path)
            self.fs.sync_folder(self.folder)
            return
        if scan.whole < len(data):
            self.fs.cut_file(path, scan.whole)
        self.kept.append(SealedSegment(path, scan.next_sequence - 1, scan.whole))

    def _proof(
        self, paths: list[Path], data: memoryview, position: int, expected: int
    ) -> str | None:
        """The evidence that ``expected`` had been synced, None if there is none."""
        for path, header in self._later(paths, data, position):
            # Records that the table holds are not lost, unless records above them follow.
            beyond = expected > self.after or header.sequence > self.after
            if header.synced >= expected and beyond:
                return f"{path.name} says so in the frame of sequence {header.sequence}"
        return None

    def _later(
        self, paths: list[Path], data: memoryview, position: int
    ) -> Iterator[tuple[Path, Frame]]:
        """Yield the intact frame headers from ``position`` of the first segment on."""
        for path in paths:
            rest, start = (
                (data, position) if path is paths[0] else (memoryview(self.fs.read(path)), 0)
            )
            name = parse_name(path.name)
            assert name is not None
            for header in later_headers(rest, start, name.salt):
                yield path, header

    def _keep_copy(self, path: Path, rest: bytes, position: int) -> None:
        """Copy a part that is about to be cut off a segment."""
        if not rest:
            return
        folder = self.trimmed or self.folder / TRIMMED
        self.fs.make_folder(folder)
        copy = folder / f"{path.name}.{position}.{time.time_ns()}"
        self.fs.write_file(copy, rest)
        self.copies.append(copy)
        self.trimmed_bytes += len(rest)
        log.warning(
            "log segment %s: truncated at byte %d; the %d bytes removed are kept as %s",
            path,
            position,
            len(rest),
            copy,
        )

    def _check_begin(
        self, path: Path, first: int, start: SegmentStart | None, expected: int | None
    ) -> None:
        """Raise if there is a gap or an overlap before a segment; the table may fill a gap."""
        if expected is not None and first < expected:
            raise WALError(
                f"log segment {path} begins at sequence {first}, which an earlier segment "
                "already holds: one of them was copied. Restore the original files of the log"
            )
        last = max(expected or 0, self.after + 1) - 1
        if expected is None and start is not None:
            # The segments before it were released, unless they held records above ``after``.
            is_missing = self._last_before(start) > self.after
        else:
            is_missing = _previous(first, start) > last
        if is_missing:
            raise Broken(
                0,
                f"it begins at sequence {first}, but the one before it ends at {last}: a "
                f"segment is missing in {self.folder}",
            )

    def _last_before(self, start: SegmentStart) -> int:
        """Return the last sequence before a segment that holds records of the bucket."""
        if self.bucket is None:
            return max(start.buckets.values(), default=0)
        return start.buckets.get(self.bucket, 0)

    def _segments(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        names = [name for name in self.fs.list(self.folder) if name.endswith(SUFFIX)]
        for name in names:
            if parse_name(name) is None:
                raise WALError(
                    f"{self.folder / name} is not named like a log segment: it was copied or "
                    "renamed. Restore the original files of the log"
                )
        return [self.folder / name for name in sorted(names)]

    def _without_released(self, paths: list[Path]) -> list[Path]:
        """Skip segments whose records are all in the table: the next one begins where it ends.

        They were released and reappeared after power loss, perhaps torn. The name of a segment
        says where it begins, even if power loss took its header.
        """
        for index in range(len(paths) - 1, 0, -1):
            first = _first_sequence(paths[index])
            if first <= self.after + 1:
                if _first_sequence(paths[index - 1]) == first:
                    continue
                for path in paths[:index]:
                    self.kept.append(SealedSegment(path, self.after, path.stat().st_size))
                return paths[index:]
        return paths

    def _check_header(self, path: Path, header: SegmentHeader) -> None:
        if header.version > FORMAT_VERSION:
            raise WALError(
                f"log segment {path} has format {header.version}, but this version reads "
                f"up to {FORMAT_VERSION}; upgrade persisting"
            )
        if parse_name(path.name) != (header.first_sequence, header.salt):
            raise WALError(
                f"the header of log segment {path} does not match its name: it was copied or "
                "renamed. Restore the original files of the log"
            )


def _previous(first: int, start: SegmentStart | None) -> int:
    """Return the last sequence of the log before a segment that begins at ``first``."""
    return first - 1 if start is None else start.previous


def _first_sequence(path: Path) -> int:
    name = parse_name(path.name)
    assert name is not None
    return name.first_sequence
