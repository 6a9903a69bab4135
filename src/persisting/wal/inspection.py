"""Looking at a log without changing it, and cutting off what is damaged.

Both are a :class:`~persisting.wal.recovery.Recovery`: they judge a log as opening the bucket does.
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
    """What a look at one segment found."""

    file: str
    size: int
    frames: int = 0
    first_sequence: int | None = None
    last_sequence: int | None = None
    synced: int = 0
    """The last sequence that some frame in it calls durable."""
    first_arrival: int | None = None
    last_arrival: int | None = None
    broken: str | None = None
    """Why the rest of the file is no whole entry, if it is not."""


class LogReport(msgspec.Struct):
    """What a look at a log found."""

    segments: list[SegmentReport]
    state: str
    """``empty``, ``whole``, ``torn`` (what follows was never promised) or ``damaged``."""
    problem: str | None = None
    torn_bytes: int = 0
    pending_frames: int = 0
    """Whole frames that the table does not hold yet."""

    @property
    def size(self) -> int:
        return sum(one.size for one in self.segments)


class _Untouched(FileSystem):
    """Reads from the file system, and leaves it as it is."""

    def make_folder(self, path: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def cut_file(self, path: Path, size: int) -> None: ...

    def sync_folder(self, path: Path) -> None: ...


@dataclass
class _Look(Recovery):
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
                found: Scan = end.value
                report.broken = None if found.broken is None else str(found.broken)
                return found
            _count(frame, report)
            yield frame

    def _keep_copy(self, path: Path, rest: bytes, position: int) -> None:
        self.trimmed_bytes += len(rest)


def _count(frame: Frame, report: SegmentReport) -> None:
    report.frames += 1
    if report.first_sequence is None:
        report.first_sequence, report.first_arrival = frame.sequence, frame.arrival
    report.last_sequence, report.last_arrival = frame.sequence, frame.arrival
    report.synced = max(report.synced, frame.synced)


def inspect(folder: Path, after: int) -> LogReport:
    """Look at the log in ``folder``; the table holds everything up to sequence ``after``.

    Its owner may be writing: then the tail may look torn, and segments may go meanwhile.
    """
    look, pending, problem, state = _Look(folder, _Untouched(), after), 0, None, "whole"
    try:
        for frame in look.frames():
            pending += frame.sequence > after
    except WALError as exc:
        problem, state = str(exc), "damaged"
    except FileNotFoundError:
        state = "whole"  # its owner has just released it
    if state == "whole" and look.trimmed_bytes:
        state = "torn"
    if not look.segments and not look.kept:
        state = "empty"
    released = [SegmentReport(one.path.name, one.size) for one in look.kept]
    known = {one.file for one in look.segments}
    return LogReport(
        sorted(
            [*look.segments, *(one for one in released if one.file not in known)],
            key=lambda one: one.file,
        ),
        state,
        problem,
        look.trimmed_bytes,
        pending,
    )


class RepairReport(msgspec.Struct):
    """What a repair did, or would do."""

    problem: str | None
    """The damage; None if there was none, and nothing was to be done."""
    kept_frames: int
    """Whole frames before it that the table does not hold yet: they stay."""
    cut_bytes: int = 0
    lost_sequences: tuple[int, int] | None = None
    """The first and the last sequence of what is cut off, as far as it can be told."""
    copies: list[str] = []
    """Where what was cut off is kept."""


@dataclass
class _Repair(Recovery):
    """Cuts damage off as if it were a torn tail."""

    problem: str | None = None
    lost: tuple[int, int] | None = None
    first_lost: int = 0

    def _torn_or_damaged(
        self, paths: list[Path], data: memoryview, scan: Scan, broken: Broken
    ) -> None:
        self.first_lost = scan.next_sequence  # of the entry, whose first frames may be whole
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


class _Rehearsal(_Repair):
    def _keep_copy(self, path: Path, rest: bytes, position: int) -> None:
        self.trimmed_bytes += len(rest)


def repair(folder: Path, after: int, fs: FileSystem | None) -> RepairReport:
    """Cut a damaged log off where the damage begins, and keep a copy of what is cut.

    The caller holds the bucket's lock. Everything before the damage stays; acknowledged records
    behind it are lost to the queue, so this is for when no copy of the log can be had. Without
    ``fs`` nothing is changed.
    """
    found = _Rehearsal(folder, _Untouched(), after) if fs is None else _Repair(folder, fs, after)
    kept = sum(frame.sequence > after for frame in found.frames())
    return RepairReport(
        found.problem,
        kept,
        found.trimmed_bytes,
        found.lost,
        [str(copy) for copy in found.copies],
    )
