"""Inspects and repairs the logs that the buckets of a topic share. Blocking.

Inspection changes nothing, and judges a log as :mod:`persisting.bucket.log_index` does when a
bucket is opened. It also reads on after damage, to say what a repair would lose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from persisting.bucket import log_note
from persisting.bucket.log_records import Section, read_sections
from persisting.errors import BucketLocked, WALError
from persisting.fs import FileSystem, os_errors_as
from persisting.lock import LOCK_FILE, LockedFile, described, last_note, owner_of
from persisting.wal.frame import (
    BATCH,
    RECORDS,
    START,
    Broken,
    Frame,
    SegmentStart,
    decode_segment_header,
    decode_start,
)
from persisting.wal.inspection import (
    Inspection,
    ReadOnlyFileSystem,
    SegmentReport,
    cut_off,
    remove_before,
)
from persisting.wal.recovery import TRIMMED, Scan

_TRIES = 5


class LostRecords(msgspec.Struct):
    """What damage takes from a bucket, as far as known."""

    first_sequence: int
    last_sequence: int | None
    first_offset: int | None = None
    """None if the log does not say; then it is the table's end."""
    last_offset: int | None = None
    """The last offset that can still be read after the damage."""


class LoggedBucketReport(msgspec.Struct):
    """What a log holds of one bucket."""

    bucket: int
    noted: bool
    """Whether the bucket's table may lack records of this log."""
    table_sequence: int
    pending_frames: int = 0
    pending_records: int = 0
    first_offset: int | None = None
    end_offset: int | None = None
    """The offset after the last pending record."""
    lost: LostRecords | None = None


class OwnerLogReport(msgspec.Struct):
    """The state of a log that buckets share."""

    folder: Path
    state: str
    """A state of :class:`~persisting.wal.inspection.LogReport`, or ``missing``."""
    owner: dict[str, Any] | None = None
    """The note of the process that has it open, or had it open last."""
    owned: bool = False
    problem: str | None = None
    """The error that opening a bucket would raise; None if the buckets that note it can be
    opened."""
    damage: str | None = None
    """The same without advice."""
    segments: list[SegmentReport] = []
    torn_bytes: int = 0
    pending_frames: int = 0
    """Frames with records that a table lacks."""
    buckets: list[LoggedBucketReport] = []
    cut: tuple[str, int] | None = None
    """The segment and the byte where the damage begins; None if no cut repairs it."""
    intact_from: str | None = None
    """The segment after the damage from which on no bucket loses anything, if there is one."""

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def noting(self) -> list[LoggedBucketReport]:
        return [bucket for bucket in self.buckets if bucket.noted]


SequenceOf = Callable[[int], int]
"""Returns the last log sequence that the table of a bucket holds."""


def inspect_logs(topic: Path, sequence_of: SequenceOf, fs: FileSystem) -> list[OwnerLogReport]:
    """Inspect all logs of a topic, and those that are noted and missing.

    Owners may be writing: then a tail may look torn, and segments may disappear.
    """
    notes = log_note.notes_in(topic, fs)
    folders = {*log_note.logs_in(topic, fs), *notes.values()}
    reports = [
        inspect_log(folder, [b for b, noted in notes.items() if noted == folder], sequence_of, fs)
        for folder in sorted(folders)
    ]
    return [report for report in reports if report is not None]


def inspect_log(
    folder: Path, noting: list[int], sequence_of: SequenceOf, fs: FileSystem
) -> OwnerLogReport | None:
    """Inspect one log, which these buckets note; None if it was removed meanwhile."""
    report = None
    for _ in range(_TRIES):
        is_there = folder.is_dir()
        # After that: a log is removed only once no bucket notes it.
        noting = [b for b in noting if log_note.noted_log(_bucket(folder, b), fs) == folder]
        sequences = {bucket: sequence_of(bucket) for bucket in noting}
        if not is_there:
            return _missing(folder, sequences) if noting else None
        reading = _Reading(folder, sequences, sequence_of)
        try:
            reading.read()
        except FileNotFoundError:  # the owner has just released a segment
            partial = reading.report()
            report = partial if partial.state != "damaged" else report
            continue
        report = reading.report()
        # The owner may have flushed since, and released the first segments.
        if report.state != "damaged" or sequences == {b: sequence_of(b) for b in noting}:
            break
    return report


def read_report(
    place: Path, sequences: Mapping[int, int], sequence_of: SequenceOf, segment_files: FileSystem
) -> OwnerLogReport:
    """Inspect a log that is not in a folder; ``sequences`` are those of the tables of the buckets
    that note it."""
    reading = _Reading(place, sequences, sequence_of, segment_files=segment_files)
    reading.read()
    return reading.report()


def _missing(folder: Path, sequences: Mapping[int, int]) -> OwnerLogReport:
    damage = (
        f"the log {folder} is missing: it holds records that were acknowledged and are not in the "
        f"tables of {numbered(sequences)} yet"
    )
    return OwnerLogReport(
        folder,
        "missing",
        problem=f"{damage}. Restore the folder from a copy",
        damage=damage,
        buckets=[
            LoggedBucketReport(bucket, True, after, lost=LostRecords(after + 1, None))
            for bucket, after in sequences.items()
        ],
    )


@dataclass
class _Pass(Inspection):
    """Reads the segments from number ``skip`` on, until the end or the first damage."""

    skip: int = 0
    damage: _Damage | None = None
    in_folder: bool = True

    def _segments(self) -> list[Path]:
        if self.in_folder:
            return super()._segments()[self.skip :]
        return [self.folder / name for name in self.fs.list(self.folder)][self.skip :]

    def _torn_or_damaged(
        self, paths: list[Path], data: memoryview, scan: Scan, broken: Broken
    ) -> None:
        last = max((h.sequence for _, h in self._later(paths, data, broken.position)), default=0)
        readable = scan.whole == 0 and _has_header(data)
        text = (
            f"log segment {paths[0]} is damaged: {broken}, where sequence {scan.missing} was "
            "stored durably"
        )
        self.damage = _Damage(paths[0].name, scan.whole, scan.next_sequence, last, readable, text)
        super()._torn_or_damaged(paths, data, scan, broken)


@dataclass(frozen=True)
class _Damage:
    file: str
    whole: int
    first_sequence: int
    last_sequence: int
    """The last sequence of any intact header from the damage on."""
    is_gap: bool
    """Whether the segment itself can be read, and those before it are missing."""
    text: str


def _has_header(data: memoryview) -> bool:
    try:
        decode_segment_header(data)
    except Broken:
        return False
    return True


@dataclass
class _Reading:
    """Reads a log through, and collects what it holds of each bucket."""

    folder: Path
    sequences: Mapping[int, int]
    """The sequences of the tables of the buckets that note the log."""
    sequence_of: SequenceOf
    segments: list[SegmentReport] = field(default_factory=list)
    buckets: dict[int, LoggedBucketReport] = field(default_factory=dict)
    torn_bytes: int = 0
    pending_frames: int = 0
    problem: WALError | None = None
    damage: _Damage | None = None
    intact_from: str | None = None
    cut: tuple[str, int] | None = None
    first: SegmentStart | None = None
    segment_files: FileSystem | None = None
    """Lists and reads the segments of a log that is not in a folder."""

    def read(self) -> None:
        for bucket, after in self.sequences.items():
            self.buckets[bucket] = LoggedBucketReport(bucket, True, after)
        skip = 0
        while True:
            work = _Pass(
                self.folder,
                self.segment_files or ReadOnlyFileSystem(),
                0,
                bucket=-1,
                skip=skip,
                in_folder=self.segment_files is None,
            )
            try:
                for frame in work.frames():
                    self._add(frame, work.segments[-1].file)
            except WALError as exc:
                self.problem = self.problem or exc
                if work.damage is None:  # files that were copied or renamed, or a newer version
                    self.segments += work.segments
                    self.damage = None
                    return
                self.damage = self.damage or work.damage
                read = work.segments[:-1] if work.damage.is_gap else work.segments
                self.segments += read
                skip += len(read)
                continue
            self.segments += work.segments
            self.torn_bytes = work.trimmed_bytes
            return

    def _add(self, frame: Frame, file: str) -> None:
        if frame.kind == START:
            start = decode_start(frame.payload, 0)
            self.first = self.first or start
            if self.damage is not None and self.intact_from is None:
                held = [start.buckets.get(b, 0) <= after for b, after in self.sequences.items()]
                self.intact_from = file if all(held) else None
        elif frame.kind in (BATCH, RECORDS):
            pending = [self._add_section(frame, s) for s in read_sections(frame, self.folder)]
            self.pending_frames += any(pending)

    def _add_section(self, frame: Frame, section: Section) -> bool:
        """Count the records of a bucket; return whether its table lacks them."""
        bucket = self.buckets.get(section.bucket)
        if bucket is None:
            after = self.sequence_of(section.bucket)
            bucket = self.buckets[section.bucket] = LoggedBucketReport(section.bucket, False, after)
        if not bucket.noted or frame.sequence <= bucket.table_sequence:
            return False
        end = section.offset + section.rows
        if self.damage is not None:
            self._lost(bucket, self.damage).last_offset = end - 1
            return False
        bucket.pending_frames += 1
        bucket.pending_records += section.rows
        if bucket.first_offset is None:
            bucket.first_offset = section.offset
        bucket.end_offset = end
        return True

    def _lost(self, bucket: LoggedBucketReport, damage: _Damage) -> LostRecords:
        if bucket.lost is None:
            first = max(damage.first_sequence, bucket.table_sequence + 1)
            last = max(first, damage.last_sequence)
            bucket.lost = LostRecords(first, last, bucket.end_offset)
        return bucket.lost

    def report(self) -> OwnerLogReport:
        damage, advice = self._problem() or (None, "")
        if damage is not None:
            state = "damaged"
        elif not self.segments:
            state = "empty"
        else:
            state = "torn" if self.torn_bytes else "whole"
        owner = owner_of(self.folder)
        return OwnerLogReport(
            self.folder,
            state,
            owner or last_note(self.folder) or None,
            owner is not None,
            None if damage is None else damage + advice,
            damage,
            sorted(self.segments, key=lambda segment: segment.file),
            self.torn_bytes,
            self.pending_frames,
            sorted(self.buckets.values(), key=lambda bucket: bucket.bucket),
            self.cut,
            self.intact_from,
        )

    def _problem(self) -> tuple[str, str] | None:
        """Return why a bucket that notes the log cannot be opened and what to do; None if all
        can."""
        noting = [bucket for bucket in self.buckets.values() if bucket.noted]
        if self.problem is not None and self.damage is None:
            return str(self.problem), ""
        if self.problem is not None and self.damage is not None:
            # Damaged records that the tables hold are not lost.
            lacking = [b for b in noting if b.table_sequence < self.damage.last_sequence]
            if lacking:
                for bucket in lacking:
                    self._lost(bucket, self.damage)
                self.cut = self.damage.file, self.damage.whole
                return self.damage.text, (
                    ". Nothing was changed; restore the file from a copy, or cut the log off there "
                    "with 'persisting wal repair'"
                )
        self.intact_from = None
        return self._missing_begin(noting)

    def _missing_begin(self, noting: list[LoggedBucketReport]) -> tuple[str, str] | None:
        begin = {} if self.first is None else self.first.buckets
        lacking = [b for b in noting if begin.get(b.bucket, 0) > b.table_sequence]
        if not lacking:
            return None
        for bucket in lacking:
            last = None if bucket.end_offset is None else bucket.end_offset - 1
            bucket.lost = LostRecords(bucket.table_sequence + 1, None, None, last)
        self.cut = self.segments[0].file, 0
        return (
            f"the first segments of the log {self.folder} are missing: they hold records of "
            f"{numbered([b.bucket for b in lacking])} above sequence "
            f"{min(b.table_sequence for b in lacking)}",
            ". Restore them from a copy, or give the log up with 'persisting wal repair'",
        )


# Repair


class LogRepair(msgspec.Struct):
    """What a repair did, or would do."""

    report: OwnerLogReport
    """The log before the repair."""
    cut_bytes: int = 0
    copies: list[Path] = []

    @property
    def lost(self) -> list[LoggedBucketReport]:
        """The buckets that lose records."""
        if self.report.state == "damaged" and self.report.intact_from is not None:
            return []
        return [bucket for bucket in self.report.buckets if bucket.lost is not None]


def plan_repair(report: OwnerLogReport) -> LogRepair:
    """Return what a repair would do; raise if it cannot help."""
    if report.state != "damaged":
        return LogRepair(report)
    if report.intact_from is not None:
        removed = [s.size for s in report.segments if s.file < report.intact_from]
        return LogRepair(report, sum(removed))
    if report.cut is None:
        raise WALError(f"{report.problem}. 'wal repair' cannot help here")
    first, whole = report.cut
    return LogRepair(report, sum(s.size for s in report.segments if s.file >= first) - whole)


def repair(report: OwnerLogReport, fs: FileSystem) -> LogRepair:
    """Repair a log, so that the buckets that note it can be opened. The caller holds their locks.

    Damage whose records are all in the tables is removed, with the segments before it. Other damage
    is cut off with everything after it. A missing log is forgotten.
    """
    plan = plan_repair(report)
    if report.state == "missing":
        for bucket in report.noting:
            log_note.clear(_bucket(report.folder, bucket.bucket), fs)
        return plan
    if report.state != "damaged":
        return plan
    # Not in the log's folder, which is removed when the buckets have been opened.
    copies = report.folder.parent / TRIMMED / report.folder.name
    with exclusive(report.folder), os_errors_as("repair the log in", report.folder):
        if report.intact_from is not None:
            plan.copies = remove_before(report.folder, report.intact_from, fs, copies)
        else:
            assert report.cut is not None
            plan.copies = cut_off(report.folder, *report.cut, fs, copies)
    return plan


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of a dead owner's log; raise if its owner is alive."""
    with os_errors_as("open the lock file of", folder):
        lock = LockedFile(folder / LOCK_FILE)
    try:
        lock.lock()
        yield
    except BlockingIOError as exc:
        raise BucketLocked(
            f"the log {folder} is open for writing by {described(last_note(folder))}",
            owner=last_note(folder),
            hint="close the topic there",
        ) from exc
    finally:
        lock.free()


def numbered(buckets: Mapping[int, Any] | list[int]) -> str:
    """Return the numbers of buckets as readable text."""
    numbers = ", ".join(map(str, buckets))
    return f"bucket {numbers}" if len(buckets) == 1 else f"buckets {numbers}"


def _bucket(log: Path, bucket: int) -> Path:
    """Return the folder of a bucket of the topic that a log belongs to."""
    return log.parent.parent / f"bucket_{bucket}"
