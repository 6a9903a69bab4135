"""An index of a log that is not written to any more: where the records of each bucket are.

A dead owner's log holds the records of many buckets, and the buckets are opened one after the
other. The log is checked and read through once; each bucket then reads its own frames. The log is
never changed: a torn tail is skipped.
"""

from __future__ import annotations

import os
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pyarrow as pa

from persisting import codec
from persisting.bucket.log_records import read_schema, split_payload, unknown_kind
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.errors import WALError
from persisting.fs import FileSystem
from persisting.wal.frame import (
    BATCH,
    FRAME_HEADER_SIZE,
    RECORDS,
    SCHEMA,
    SEGMENT_HEADER_SIZE,
    START,
    Broken,
    Frame,
    SegmentStart,
    decode_frame,
    decode_start,
)
from persisting.wal.inspection import ReadOnlyFileSystem
from persisting.wal.recovery import Recovery, Scan
from persisting.wal.segment import parse_name

_POSITION_BITS = 40
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_CACHED = 8
_WITH_SECTIONS = (RECORDS, BATCH)


@dataclass
class _Indexing(Recovery):
    """Reads a log through, and notes where each frame is."""

    position: int = 0
    """Where the last frame begins in its segment."""
    segments: list[Path] = field(default_factory=list)
    contents: list[tuple[int, int]] = field(default_factory=list)
    """The length and the checksum of each segment."""
    last_damaged: int | None = None
    """The last sequence in the damaged part; None if the log was not read so far."""

    def _scan(
        self, path: Path, data: memoryview, expected: int | None
    ) -> Generator[Frame, None, Scan]:
        if expected is None:
            # The segments before the first one were released: all their records are in the tables.
            name = parse_name(path.name)
            assert name is not None
            self.last_sequence = name.first_sequence - 1
        self.segments.append(path)
        self.contents.append((len(data), crc32(data)))
        position = SEGMENT_HEADER_SIZE
        scan = super()._scan(path, data, expected)
        while True:
            try:
                frame = next(scan)
            except StopIteration as end:
                result: Scan = end.value
                return result
            self.position = position
            position += FRAME_HEADER_SIZE + len(frame.payload)
            yield frame

    def _check_begin(
        self, path: Path, first: int, start: SegmentStart | None, expected: int | None
    ) -> int:
        # Each bucket checks for itself whether it needs the segments before the first one.
        return first if expected is None else super()._check_begin(path, first, start, expected)

    def _torn_or_damaged(
        self, paths: list[Path], data: memoryview, scan: Scan, broken: Broken
    ) -> None:
        headers = self._later(paths, data, broken.position)
        self.last_damaged = max((header.sequence for _, header in headers), default=0)
        super()._torn_or_damaged(paths, data, scan, broken)

    def _keep_copy(self, path: Path, rest: bytes, position: int) -> None:
        self.trimmed_bytes += len(rest)


_SECTION = struct.Struct("<QQqIIIIIQ")
"""A section in the index: segment and position of its frame, sequence, arrival; where the plain
rows of the frame begin in it (0 for a frame of another kind) and their bytes; first row and rows of
the section; epoch and offset. Packed, because a log may hold a million of them."""


class LogIndex:
    """Where the sections of each bucket are in a log, in order."""

    def __init__(self, folder: Path, fs: FileSystem) -> None:
        """Read the log through. Blocking."""
        if not folder.is_dir():
            raise WALError(
                f"the log {folder} is missing: it holds records that were acknowledged and are not "
                "in the tables yet. Restore the folder from a copy"
            )
        self.folder, self._fs = folder, fs
        self._sections: defaultdict[int, bytearray] = defaultdict(bytearray)
        self._producers: defaultdict[int, dict[int, list[ProducerSequence]]] = defaultdict(dict)
        """By bucket and sequence, the numbered puts that a section completes."""
        self._schema_places: list[int] = []
        self._schemas: list[pa.Schema] = []
        self._start: SegmentStart | None = None
        self._problem: WALError | None = None
        self.last_sequence = 0
        scan = _Indexing(folder, ReadOnlyFileSystem(), 0)
        try:
            for frame in scan.frames():
                self._add(frame, len(scan.segments) - 1, scan.position)
        except WALError as exc:
            self._problem = exc
        self._segments, self._contents = scan.segments, scan.contents
        self._last_damaged = scan.last_damaged
        self._sync()

    def _sync(self) -> None:
        """Make the log durable. A killed owner may have left frames only in the page cache, and a
        put to several buckets must not become durable in one bucket alone."""
        for path in self._segments:
            self._fs.sync_file(path)
        self._fs.sync_folder(self.folder)

    def _add(self, frame: Frame, segment: int, position: int) -> None:
        place = segment << _POSITION_BITS | position
        kind = frame.kind
        self.last_sequence = frame.sequence
        if kind in _WITH_SECTIONS:
            sections, stored = split_payload(frame, self.folder)
            values = size = first = 0
            if kind == RECORDS and frame.codec == codec.NONE:
                size = len(stored)
                values = FRAME_HEADER_SIZE + len(frame.payload) - size
            for section in sections:
                self._sections[section.bucket] += _SECTION.pack(
                    place,
                    frame.sequence,
                    frame.arrival,
                    values,
                    size,
                    first,
                    section.rows,
                    section.epoch,
                    section.offset,
                )
                if section.producers:
                    self._producers[section.bucket][frame.sequence] = section.producers
                first += section.rows
        elif kind == SCHEMA:
            self._schema_places.append(place)
            self._schemas.append(read_schema(frame, self.folder))
        elif kind == START:
            if self._start is None:
                self._start = self._read_start(frame, position)
        else:
            raise unknown_kind(frame, self.folder)

    def _read_start(self, frame: Frame, position: int) -> SegmentStart:
        try:
            return decode_start(frame.payload, position)
        except Broken as exc:
            raise WALError(
                f"the frame at sequence {frame.sequence} of the log in {self.folder} cannot be "
                f"read: {exc}"
            ) from exc

    @property
    def is_damaged(self) -> bool:
        return self._problem is not None

    def check(self, bucket: int, after: int) -> None:
        """Raise if the log may have lost records of a bucket above sequence ``after``."""
        if self._problem is not None:
            # Damaged records that the table holds are no loss.
            if self._last_damaged is None or self._last_damaged > after:
                raise self._problem
        if self._start is not None and self._start.buckets.get(bucket, 0) > after:
            raise WALError(
                f"the first segments of the log {self.folder} are missing: they hold records of "
                f"bucket {bucket} above sequence {after}. Restore them from a copy"
            )

    def sections(self, bucket: int, after: int) -> Iterator[StoredSection]:
        """Yield the rows of a bucket above sequence ``after``."""
        packed = memoryview(self._sections.get(bucket, b""))
        producers = self._producers.get(bucket, {})
        opened, data, salt = -1, memoryview(b""), 0
        schema, schema_end = None, 0
        for section in _SECTION.iter_unpack(packed[_position_after(packed, after) :]):
            place, sequence, arrival, start, size, first, rows, epoch, offset = section
            segment, position = place >> _POSITION_BITS, place & _POSITION_MASK
            if segment != opened:
                name = parse_name(self._segments[segment].name)
                assert name is not None
                opened, data, salt = segment, self._read(segment), name.salt
            if place >= schema_end:
                schema, schema_end = self._schema_at(place, sequence)
            frame, values = None, None
            if start:
                values = data[position + start : position + start + size]
            else:
                frame = self._frame(data, position, salt, segment)
            numbers = producers.get(sequence, ()) if producers else ()
            yield StoredSection(
                sequence, arrival, (epoch, offset), first, rows, numbers, schema, values, frame
            )

    def _read(self, segment: int) -> memoryview:
        """Return the content of a segment, checked as a whole: rows are read without their frames'
        checksums, perhaps long after the log was indexed."""
        length, checksum = self._contents[segment]
        data = memoryview(self._fs.read(self._segments[segment]))[:length]
        if len(data) < length or crc32(data) != checksum:
            raise WALError(
                f"log segment {self._segments[segment]} has changed since it was indexed: its disk "
                "may be failing. Open the bucket again"
            )
        return data

    def _schema_at(self, place: int, sequence: int) -> tuple[pa.Schema, int]:
        """Return the schema of the frame at ``place``, and where the next schema begins."""
        index = bisect_right(self._schema_places, place)
        if not index:
            raise WALError(
                f"the log in {self.folder} has records at sequence {sequence} without a schema "
                "before them"
            )
        following = self._schema_places[index : index + 1]
        return self._schemas[index - 1], following[0] if following else 1 << 63

    def _frame(self, data: memoryview, position: int, salt: int, segment: int) -> Frame:
        try:
            return decode_frame(data, position, salt)[0]
        except Broken as exc:
            raise WALError(f"log segment {self._segments[segment]} has changed: {exc}") from exc


class StoredSection(NamedTuple):
    """The rows of one bucket in one frame."""

    sequence: int
    arrival: int
    place: tuple[int, int]
    """Epoch and offset of the first row."""
    first: int
    rows: int
    producers: Sequence[ProducerSequence]
    schema: pa.Schema
    values: memoryview | None
    """The plain rows of the whole frame, unless it has none or they are compressed."""
    frame: Frame | None
    """The frame, unless ``values`` has its rows."""


def _position_after(packed: memoryview, sequence: int) -> int:
    """Return where the first section above a sequence begins in the index of a bucket."""
    low, high = 0, len(packed) // _SECTION.size
    while low < high:
        middle = (low + high) // 2
        if _SECTION.unpack_from(packed, middle * _SECTION.size)[1] <= sequence:
            low = middle + 1
        else:
            high = middle
    return low * _SECTION.size


_indexes: OrderedDict[tuple[Path, tuple[tuple[str, int, int], ...]], LogIndex] = OrderedDict()
_guard = threading.Lock()


def index_of(folder: Path, fs: FileSystem) -> LogIndex:
    """Return the index of a dead log, which is read once for all buckets. Blocking."""
    with _guard:
        key = folder, _signature(folder)
        index = _indexes.get(key)
        if index is None:
            index = LogIndex(folder, fs)
            if index.is_damaged:  # read again when it is needed again: it may have been restored
                return index
            _indexes[key] = index
        _indexes.move_to_end(key)
        while len(_indexes) > _CACHED:
            _indexes.popitem(last=False)
        return index


def forget(folder: Path) -> None:
    """Drop the index of a log that was removed."""
    with _guard:
        for key in [key for key in _indexes if key[0] == folder]:
            del _indexes[key]


def _reset_after_fork() -> None:
    """A thread of the parent may have held the guard."""
    global _guard
    _guard = threading.Lock()
    _indexes.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


def _signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return the names, sizes and times of the segments, which change while a log is in use."""
    if not folder.is_dir():
        return ()
    stats = [(path.name, path.stat()) for path in sorted(folder.glob("*.wal"))]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
