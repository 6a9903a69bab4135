"""Inspects a log without changing it, and repairs one by cutting off what is damaged.

Both are a :class:`~persisting.wal.recovery.Recovery`, so they judge a log as opening a bucket does.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from persisting.errors import WALError
from persisting.fs import FileSystem
from persisting.wal.frame import Broken, Frame
from persisting.wal.recovery import Recovery, Scan


class SegmentReport(msgspec.Struct):
    """The state of one segment."""

    file: str
    size: int
    frames: int = 0
    first_sequence: int | None = None
    last_sequence: int | None = None
    synced: int = 0
    """The last sequence that a frame in it records as durable."""
    last_arrival: int | None = None
    broken: str | None = None
    """Why the rest of the file is not a complete entry, if there is a rest."""


class LogReport(msgspec.Struct):
    """The state of a log."""

    segments: list[SegmentReport]
    state: str
    """``empty``, ``whole``, ``torn`` (the tail was never acknowledged as durable), ``damaged``."""
    problem: str | None = None
    torn_bytes: int = 0
    pending_frames: int = 0
    """Complete frames that the table does not hold yet."""

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)


class ReadOnlyFileSystem(FileSystem):
    """Reads from the file system, and changes nothing."""

    def make_folder(self, path: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def cut_file(self, path: Path, size: int) -> None: ...

    def sync_folder(self, path: Path) -> None: ...


@dataclass
class Inspection(Recovery):
    """Reports every segment, and cuts nothing off."""

    segments: list[SegmentReport] = field(default_factory=list)

    def _scan(
        self, path: Path, data: memoryview, expected: int | None
    ) -> Generator[Frame, None, Scan]:
        report = SegmentReport(path.name, len(data))
        self.segments.append(report)
        scan = super()._scan(path, data, expected)
        while True:
            try:
                frame = next(scan)
            except StopIteration as end:
                result: Scan = end.value
                report.broken = None if result.broken is None else str(result.broken)
                return result
            _count(frame, report)
            yield frame

    def _keep_copy(self, path: Path, rest: bytes, position: int) -> None:
        self.trimmed_bytes += len(rest)


def _count(frame: Frame, report: SegmentReport) -> None:
    report.frames += 1
    if report.first_sequence is None:
        report.first_sequence = frame.sequence
    report.last_sequence, report.last_arrival = frame.sequence, frame.arrival
    report.synced = max(report.synced, frame.synced)


def inspect(folder: Path, after: int) -> LogReport:
    """Inspect the log in ``folder``; the table holds everything up to sequence ``after``.

    Its owner may be writing: then the tail may look torn, and segments may disappear.
    """
    inspection = Inspection(folder, ReadOnlyFileSystem(), after)
    pending, problem, state = 0, None, "whole"
    try:
        for frame in inspection.frames():
            pending += frame.sequence > after
    except WALError as exc:
        problem, state = str(exc), "damaged"
    except FileNotFoundError:
        state = "whole"  # its owner has just released a segment
    if state == "whole" and inspection.trimmed_bytes:
        state = "torn"
    if not inspection.segments and not inspection.kept:
        state = "empty"
    scanned = {report.file for report in inspection.segments}
    released = [
        SegmentReport(segment.path.name, segment.size)
        for segment in inspection.kept
        if segment.path.name not in scanned
    ]
    return LogReport(
        sorted([*inspection.segments, *released], key=lambda report: report.file),
        state,
        problem,
        inspection.trimmed_bytes,
        pending,
    )


class RepairReport(msgspec.Struct):
    """What a repair did, or would do."""

    problem: str | None
    """The damage; None if there was none, so that nothing had to be done."""
    kept_frames: int
    """Complete frames before the damage that the table does not hold yet: they stay."""
    cut_bytes: int = 0
    lost_sequences: tuple[int, int] | None = None
    """The first and the last sequence that is cut off, as far as known."""
    copies: list[str] = []
    """The files that hold what was cut off."""


@dataclass
class _Repair(Recovery):
    """Cuts damage off as if it were a torn tail."""

    problem: str | None = None
    lost: tuple[int, int] | None = None
    first_lost: int = 0

    def _torn_or_damaged(
        self, paths: list[Path], data: memoryview, scan: Scan, broken: Broken
    ) -> None:
        self.first_lost = scan.next_sequence  # of the entry, whose first frames may be complete
        super()._torn_or_damaged(paths, data, scan, broken)

    def _proof(
        self, paths: list[Path], data: memoryview, position: int, expected: int
    ) -> str | None:
        proof = super()._proof(paths, data, position, expected)
        if proof is not None:
            last = max(header.sequence for _, header in self._later(paths, data, position))
            self.lost = (max(self.first_lost, self.after + 1), max(expected, last))
            self.problem = (
                f"log segment {paths[0]} is damaged at byte {position}: sequence {expected} was "
                f"stored durably ({proof})"
            )
        return None


class _DryRun(_Repair):
    """Reports what a repair would do, and changes nothing."""

    def _keep_copy(self, path: Path, rest: bytes, position: int) -> None:
        self.trimmed_bytes += len(rest)


def repair(folder: Path, after: int, fs: FileSystem | None) -> RepairReport:
    """Cut a damaged log off where the damage begins, and keep a copy of what is cut off.

    The caller holds the bucket's lock. Everything before the damage stays. Acknowledged records
    after it are lost to the queue, so use this only if no copy of the log is left. Without ``fs``
    this is a dry run.
    """
    work = (
        _DryRun(folder, ReadOnlyFileSystem(), after) if fs is None else _Repair(folder, fs, after)
    )
    kept = sum(frame.sequence > after for frame in work.frames())
    return RepairReport(
        work.problem,
        kept,
        work.trimmed_bytes,
        work.lost,
        [str(copy) for copy in work.copies],
    )


def whole_bytes(path: Path, data: memoryview) -> int:
    """Return how many bytes of a segment are complete entries: all but a torn tail.

    A damaged segment counts as complete, so that a copy of it has everything that is left.
    """
    recovery = Recovery(path.parent, ReadOnlyFileSystem(), 0, bucket=-1)
    frames = recovery._scan(path, data, None)
    while True:
        try:
            next(frames)
        except StopIteration as end:
            scan: Scan = end.value
            break
        except WALError:  # not a segment of this version
            return len(data)
    if scan.broken is None:
        return len(data)
    proof = recovery._proof([path], data, scan.broken.position, scan.missing)
    return scan.whole if proof is None else len(data)


def cut_off(folder: Path, first: str, position: int, fs: FileSystem, copies: Path) -> list[Path]:
    """Cut a log off at a byte of segment ``first``; return the files that hold what was cut off.

    Nobody else may be using the log.
    """
    work = Recovery(folder, fs, 0, bucket=-1, trimmed=copies)
    paths = [path for path in work._segments() if path.name >= first]
    for path in reversed(paths[1:]):
        work._keep_copy(path, fs.read(path), 0)
        fs.remove(path)
    # Before the cut: a later segment must not outlive the frames before it.
    fs.sync_folder(folder)
    data = memoryview(fs.read(paths[0]))
    work._cut_to_whole(paths[0], data, Scan(position, 0, None, 0))
    return work.copies


def remove_before(folder: Path, first: str, fs: FileSystem, copies: Path) -> list[Path]:
    """Remove the segments before ``first``; return the files that hold copies of them."""
    work = Recovery(folder, fs, 0, bucket=-1, trimmed=copies)
    for path in [path for path in work._segments() if path.name < first]:
        work._keep_copy(path, fs.read(path), 0)
        fs.remove(path)
    fs.sync_folder(folder)
    return work.copies
