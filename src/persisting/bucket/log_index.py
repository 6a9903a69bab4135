"""An index of a log that is no longer written to: where the records of each bucket are.

A dead owner's log holds the records of many buckets, and the buckets are opened one after the
other. The log is checked and read through once; each bucket then reads its own frames. The log is
never changed: a torn tail is skipped.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa

from persisting import codec
from persisting.bucket.chunk import ROWS_AT_ONCE, Chunk
from persisting.bucket.log_records import (
    Section,
    array_head,
    chunk_of_columns,
    join_elements,
    read_columns,
    read_many_sections,
    read_schema,
    row_sizes,
    split_payload,
    unknown_kind,
)
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.errors import WALError
from persisting.fs import FileSystem
from persisting.records import RecordEncoder
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
from persisting.wal.frame_run import FrameRun, bytes_at, read_run
from persisting.wal.inspection import ReadOnlyFileSystem
from persisting.wal.recovery import Recovery, Scan
from persisting.wal.segment import parse_name

_POSITION_BITS = 40
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_SECTIONS_HEAD = 4
"""Bytes before the list of sections, which have its length."""

_SHORT_ARRAY = 0x90
_SHORT_ARRAY_MOST = 15
"""The first byte of a MessagePack array of up to 15 elements; their number is added to it."""

_CACHED = 8
_BLOCK_BYTES = 4 * 1024 * 1024


@dataclass
class Indexing(Recovery):
    """Reads a log through in runs of frames."""

    segments: list[Path] = field(default_factory=list)
    contents: list[tuple[int, int]] = field(default_factory=list)
    """The length and the checksum of each segment."""
    last_damaged: int | None = None
    """The last sequence in the damaged part; None if the log was not read so far."""

    def runs(self) -> Iterator[FrameRun]:
        """Yield the frames of all complete entries, in order."""
        return self._read_through(self._scan_runs)

    def _scan_runs(
        self, path: Path, data: memoryview, expected: int | None
    ) -> Generator[FrameRun, None, Scan]:
        if expected is None:
            # The segments before the first one were released: all their records are in the tables.
            name = parse_name(path.name)
            assert name is not None
            self.last_sequence = name.first_sequence - 1
        self.segments.append(path)
        self.contents.append((len(data), crc32(data)))
        header = self._begin_scan(path, data, expected)
        if isinstance(header, Scan):
            return header
        content = data.obj
        assert isinstance(content, bytes)
        scan = Scan(SEGMENT_HEADER_SIZE, header.first_sequence, None, header.first_sequence)
        while scan.whole < len(content) and scan.broken is None:
            run = read_run(content, scan.whole, header.salt, scan.next_sequence)
            if len(run.positions):
                yield run
            scan = Scan(run.end, run.next_sequence, run.broken, run.missing)
            self.last_sequence = max(self.last_sequence, scan.next_sequence - 1)
        return scan

    def _check_begin(
        self, path: Path, first: int, start: SegmentStart | None, expected: int | None
    ) -> None:
        # Each bucket checks for itself whether it needs the segments before the first one.
        if expected is not None:
            super()._check_begin(path, first, start, expected)

    def _torn_or_damaged(
        self, paths: list[Path], data: memoryview, scan: Scan, broken: Broken
    ) -> None:
        headers = self._later(paths, data, broken.position)
        self.last_damaged = max((header.sequence for _, header in headers), default=0)
        super()._torn_or_damaged(paths, data, scan, broken)

    def _keep_copy(self, path: Path, rest: bytes, position: int) -> None:
        self.trimmed_bytes += len(rest)


_SECTION = np.dtype(
    [
        ("place", "<u8"),  # the segment and the position of the frame
        ("sequence", "<u8"),
        ("arrival", "<i8"),
        ("start", "<u4"),  # where its plain rows begin in the frame; 0 if it must be decoded
        ("size", "<u4"),  # bytes of these rows
        ("first", "<u4"),  # first row in the frame
        ("rows", "<u4"),
        ("epoch", "<u4"),
        ("offset", "<u8"),
    ]
)
"""A section in the index. Packed, because a log may hold a million of them."""

_MOST = (1 << 32) - 1


class LogIndex:
    """Where the sections of each bucket are in a log, in order."""

    def __init__(self, folder: Path, fs: FileSystem, scan: Indexing | None = None) -> None:
        """Read the log through. Blocking.

        ``scan`` reads a log that is not in a folder, through ``fs``.
        """
        if scan is None and not folder.is_dir():
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
        scan = scan or Indexing(folder, ReadOnlyFileSystem(), 0)
        try:
            for run in scan.runs():
                self._add_run(run, len(scan.segments) - 1)
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

    def _add_run(self, run: FrameRun, segment: int) -> None:
        kinds = run.headers["kind"]
        without_sections = np.flatnonzero((kinds != RECORDS) & (kinds != BATCH)).tolist()
        begin = 0
        for index in (*without_sections, len(kinds)):
            if index > begin:
                self._add_sections(run, segment, begin, index)
                self.last_sequence = int(run.headers["sequence"][index - 1])
            if index < len(kinds):
                self._add_frame(run.frame(index), segment, int(run.positions[index]))
            begin = index + 1

    def _add_frame(self, frame: Frame, segment: int, position: int) -> None:
        if frame.kind == SCHEMA:
            self._schema_places.append(segment << _POSITION_BITS | position)
            self._schemas.append(read_schema(frame, self.folder))
        elif frame.kind == START:
            if self._start is None:
                self._start = self._read_start(frame, position)
        else:
            raise unknown_kind(frame, self.folder)
        self.last_sequence = frame.sequence

    def _add_sections(self, run: FrameRun, segment: int, begin: int, end: int) -> None:
        """Index frames that hold records."""
        listed = _Sections(run, begin, end, self.folder)
        entries = np.zeros(len(listed.fields), _SECTION)
        headers, frames = run.headers[begin:end], listed.frames
        places = run.positions[begin:end].astype("u8") | np.uint64(segment << _POSITION_BITS)
        entries["place"] = places[frames]
        entries["sequence"] = headers["sequence"][frames]
        entries["arrival"] = headers["arrival"][frames]
        for name in ("rows", "epoch", "offset"):
            entries[name] = listed.fields[name]
        entries["first"] = listed.first_rows(entries["rows"])
        listed.find_rows(entries)
        buckets = listed.fields["bucket"]
        for bucket in np.unique(buckets).tolist():
            self._sections[bucket] += entries[buckets == bucket].tobytes()
        for index, producers in listed.producers.items():
            sequence = int(entries["sequence"][index])
            self._producers[int(buckets[index])][sequence] = producers

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
            # Damaged records that the table holds are not lost.
            if self._last_damaged is None or self._last_damaged > after:
                raise self._problem
        if self._start is not None and self._start.buckets.get(bucket, 0) > after:
            raise WALError(
                f"the first segments of the log {self.folder} are missing: they hold records of "
                f"bucket {bucket} above sequence {after}. Restore them from a copy"
            )

    def blocks(self, bucket: int, after: int) -> Iterator[PlainRows | StoredSection]:
        """Yield the rows of a bucket above sequence ``after``, many plain rows at a time."""
        table = np.frombuffer(self._sections.get(bucket, b""), _SECTION)
        table = table[np.searchsorted(table["sequence"], np.uint64(after), "right") :]
        if not len(table):
            return
        schemas = np.searchsorted(np.array(self._schema_places, "u8"), table["place"], "right")
        opened, data = -1, b""
        for begin, end in pairwise(_bounds(table, schemas)):
            part = table[begin:end]
            segment = int(part["place"][0]) >> _POSITION_BITS
            if segment != opened:
                opened, data = segment, self._read(segment)
            schema = self._schema(int(schemas[begin]), int(part["sequence"][0]))
            if part["start"][0]:
                for some in _split(part):
                    yield self._plain_rows(bucket, some, data, schema)
            else:
                yield self._stored_section(bucket, part[0].tolist(), data, schema)

    def _read(self, segment: int) -> bytes:
        """Return the content of a segment, checked as a whole: rows are read without their frames'
        checksums, perhaps long after the log was indexed."""
        length, checksum = self._contents[segment]
        data = self._fs.read(self._segments[segment])[:length]
        if len(data) < length or crc32(data) != checksum:
            raise self._changed(segment)
        return data

    def _plain_rows(
        self, bucket: int, part: np.ndarray, data: bytes, schema: pa.Schema
    ) -> PlainRows:
        begins = (part["place"] & np.uint64(_POSITION_MASK)) + part["start"]
        ends, width, count = begins + part["size"], None, int(part["rows"].sum())
        if count == len(part) and 0 < len(schema) <= _SHORT_ARRAY_MOST:
            heads = np.frombuffer(data, "u1")[begins]
            if (heads == _SHORT_ARRAY + len(schema)).all():
                width = len(schema)
                begins += np.uint64(1)
        bounds = zip(begins.tolist(), ends.tolist(), strict=True)
        rows = [data[begin:end] for begin, end in bounds]
        sequences = part["sequence"].tolist()
        known = self._producers.get(bucket)
        producers = [p for s in sequences for p in known.get(s, ())] if known else []
        return PlainRows(
            (sequences[0], sequences[-1]),
            np.repeat(part["arrival"], part["rows"]),
            (int(part["epoch"][0]), int(part["offset"][0])),
            producers,
            schema,
            join_elements(count * (width or 1), rows),
            width,
        )

    def _stored_section(
        self, bucket: int, section: tuple[int, ...], data: bytes, schema: pa.Schema
    ) -> StoredSection:
        place, sequence, arrival, *_, first, rows, epoch, offset = section
        segment, position = place >> _POSITION_BITS, place & _POSITION_MASK
        name = parse_name(self._segments[segment].name)
        assert name is not None
        producers = self._producers[bucket].get(sequence, ()) if bucket in self._producers else ()
        frame = self._frame(memoryview(data), position, name.salt, segment)
        return StoredSection(
            sequence, arrival, (epoch, offset), first, rows, producers, schema, frame
        )

    def _schema(self, number: int, sequence: int) -> pa.Schema:
        """Return a schema, counted from 1."""
        if not number:
            raise WALError(
                f"the log in {self.folder} has records at sequence {sequence} without a schema "
                "before them"
            )
        return self._schemas[number - 1]

    def _changed(self, segment: int) -> WALError:
        return WALError(
            f"log segment {self._segments[segment]} has changed since it was indexed: its disk "
            "may be failing. Open the bucket again"
        )

    def _frame(self, data: memoryview, position: int, salt: int, segment: int) -> Frame:
        try:
            return decode_frame(data, position, salt)[0]
        except Broken as exc:
            raise self._changed(segment) from exc


_FIELDS = np.dtype([("bucket", "u8"), ("epoch", "u4"), ("offset", "u8"), ("rows", "u4")])

_SINGLE = {7: (-1, 0), 8: (0xCC, 1), 9: (0xCD, 2), 11: (0xCE, 4), 15: (0xCF, 8)}
"""The list of one section without producers, as single puts have it, by its length: the byte before
the offset, -1 if the offset is a byte below 128, and the bytes of the offset after it."""

_SMALL = 0x80
"""MessagePack has numbers below this as one byte."""


class _Sections:
    """The sections of several frames, and where their rows are."""

    def __init__(self, run: FrameRun, begin: int, end: int, folder: Path) -> None:
        self._run, self._headers = run, run.headers[begin:end]
        self._positions = run.positions[begin:end]
        self.fields = np.empty(0, _FIELDS)
        self.producers: dict[int, list[ProducerSequence]] = {}
        """The numbered puts, by the section that completes them."""
        if not self._read_at_once():  # raises if one of the lists cannot be read
            by_frame = [split_payload(run.frame(i), folder)[0] for i in range(begin, end)]
            self._counts = np.array([len(sections) for sections in by_frame], "int64")
            self._take([section for sections in by_frame for section in sections])
        self.frames = np.repeat(np.arange(end - begin), self._counts)
        """The frame of each section."""

    def _read_at_once(self) -> bool:
        """Read the sections of all frames; return False if they must be read one by one."""
        data, starts = self._run.data, self._positions + FRAME_HEADER_SIZE
        self._ends = starts + self._headers["length"]
        if (self._headers["length"] <= _SECTIONS_HEAD).any():
            return False
        content = np.frombuffer(data, "u1")
        heads = bytes_at(content, starts, _SECTIONS_HEAD)
        starts += _SECTIONS_HEAD
        self._rows_begin = starts + heads.view("<u4")[:, 0]
        # An array of up to 15 elements begins with one byte that has their number.
        self._counts = content[starts].astype("int64") - _SHORT_ARRAY
        if (
            (self._rows_begin > self._ends).any()
            or (self._rows_begin <= starts).any()
            or (self._counts < 0).any()
            or (self._counts > _SHORT_ARRAY_MOST).any()
        ):
            return False
        fields = _single_sections(content, starts, self._rows_begin - starts)
        if fields is not None:
            self.fields = fields
            return True
        bounds = zip((starts + 1).tolist(), self._rows_begin.tolist(), strict=True)
        elements = [data[begin:end] for begin, end in bounds]
        sections = read_many_sections(int(self._counts.sum()), elements)
        if sections is not None:
            self._take(sections)
        return sections is not None

    def _take(self, sections: list[Section]) -> None:
        self.fields = np.array([(s.bucket, s.epoch, s.offset, s.rows) for s in sections], _FIELDS)
        self.producers = {i: s.producers for i, s in enumerate(sections) if s.producers}

    def first_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the first row of each section in its frame."""
        begins = np.concatenate(([0], np.cumsum(rows, dtype="int64")))
        of_frames = begins[np.cumsum(self._counts) - self._counts]
        return np.minimum(begins[:-1] - np.repeat(of_frames, self._counts), _MOST)

    def find_rows(self, entries: np.ndarray) -> None:
        """Note where the rows of each section are, if they are plain and complete."""
        headers = self._headers
        plain = (headers["kind"] == RECORDS) & (headers["codec"] == codec.NONE)
        single = plain & (self._counts == 1) & (self._rows_begin < self._ends)
        content = np.frombuffer(self._run.data, "u1")
        first = np.where(single, content[np.where(single, self._rows_begin, 0)], 0)
        rows = np.zeros(len(plain), "u4")
        rows[single] = entries["rows"][(np.cumsum(self._counts) - 1)[single]]
        quick = single & (first == _SHORT_ARRAY + rows) & (rows > 0) & (rows <= _SHORT_ARRAY_MOST)
        found, begins = quick[self.frames], self._rows_begin[quick] + 1
        entries["start"][found] = begins - self._positions[quick]
        entries["size"][found] = self._ends[quick] - begins
        starts = (np.cumsum(self._counts) - self._counts).tolist()
        for index in np.flatnonzero(plain & ~quick & (self._counts > 0)).tolist():
            position = starts[index]
            self._divide_rows(index, entries[position : position + int(self._counts[index])])

    def _divide_rows(self, index: int, entries: np.ndarray) -> None:
        """Find the rows of each section of one frame; they stay unknown if they do not add up."""
        frame_begin, begin = int(self._positions[index]), int(self._rows_begin[index])
        rows = self._run.data[begin : int(self._ends[index])]
        counts = entries["rows"].tolist()
        sizes = row_sizes(rows) if min(counts) > 0 else None
        if sizes is None or len(sizes) != sum(counts):
            return
        row, position = 0, array_head(len(sizes))
        for entry, count in enumerate(counts):
            size = sum(sizes[row : row + count])
            entries["start"][entry] = begin - frame_begin + position
            entries["size"][entry] = size
            row, position = row + count, position + size


def _single_sections(
    content: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> np.ndarray | None:
    """Read lists of one section without producers and with small numbers, except for the offset;
    return None if one of the lists is another."""
    width = max(_SINGLE)
    own = content[starts[0] : starts[-1] + width]
    padded = np.concatenate((own, np.zeros(width, "u1")))
    data = bytes_at(padded, starts - starts[0], width)
    known = (data[:, 0] == _SHORT_ARRAY + 1) & (data[:, 1] == _SHORT_ARRAY + 5)
    known &= (data[:, 2] < _SMALL) & (data[:, 3] < _SMALL) & np.isin(sizes, list(_SINGLE))
    if not known.all():
        return None
    fields = np.zeros(len(starts), _FIELDS)
    fields["bucket"], fields["epoch"] = data[:, 2], data[:, 3]
    for size, (head, width) in _SINGLE.items():
        chosen = sizes == size
        some = data[chosen]
        known = (some[:, 4] == head) if width else (some[:, 4] < _SMALL)
        known &= (some[:, size - 2] < _SMALL) & (some[:, size - 1] == _SHORT_ARRAY)
        if not known.all():
            return None
        number = np.ascontiguousarray(some[:, 5 : 5 + width] if width else some[:, 4:5])
        fields["offset"][chosen] = number.view(f">u{width or 1}")[:, 0]
        fields["rows"][chosen] = some[:, size - 2]
    return fields


def _bounds(table: np.ndarray, schemas: np.ndarray) -> list[int]:
    """Return where sections begin that cannot be read together with the ones before them."""
    before, after = table[:-1], table[1:]
    joined = (before["start"] > 0) & (after["start"] > 0) & (schemas[:-1] == schemas[1:])
    joined &= before["place"] >> np.uint64(_POSITION_BITS) == after["place"] >> np.uint64(
        _POSITION_BITS
    )
    joined &= before["epoch"] == after["epoch"]
    joined &= before["offset"] + before["rows"] == after["offset"]
    return [0, *(np.flatnonzero(~joined) + 1).tolist(), len(table)]


def _split(part: np.ndarray) -> Iterator[np.ndarray]:
    """Split sections that may be read together into blocks of limited size."""
    rows, nbytes = (np.cumsum(part[name], dtype="int64") for name in ("rows", "size"))
    begin = 0
    while begin < len(part):
        before = (rows[begin - 1], nbytes[begin - 1]) if begin else (0, 0)
        end = min(
            np.searchsorted(rows, before[0] + ROWS_AT_ONCE, "right"),
            np.searchsorted(nbytes, before[1] + _BLOCK_BYTES, "right"),
        )
        end = max(begin + 1, int(end))
        yield part[begin:end]
        begin = end


class PlainRows(NamedTuple):
    """Rows of one bucket that follow each other, from one or more frames."""

    sequences: tuple[int, int]
    """The sequences of the first and of the last frame."""
    arrivals: np.ndarray
    """The arrival time of each row."""
    place: tuple[int, int]
    """Epoch and offset of the first row."""
    producers: Sequence[ProducerSequence]
    schema: pa.Schema
    values: bytes
    """All rows as in a frame, or all values of them."""
    width: int | None
    """How many values each row has, if ``values`` are all values; otherwise None."""

    def chunk(self, encoder: RecordEncoder, place: Path) -> Chunk:
        """Return the rows as a chunk with the arrival time of each."""
        first, last = self.sequences
        columns = read_columns(self.values, self.width, last, place)
        chunk = chunk_of_columns(encoder, columns, len(self.arrivals), last, place)
        chunk.logged(last, max(1, chunk.nbytes))
        chunk.first_sequence = first
        chunk.times = np.maximum.accumulate(self.arrivals)
        chunk.arrival = int(chunk.times[-1])
        return chunk


class StoredSection(NamedTuple):
    """The rows of one bucket in one frame, which must be decoded."""

    sequence: int
    arrival: int
    place: tuple[int, int]
    """Epoch and offset of the first row."""
    first: int
    rows: int
    producers: Sequence[ProducerSequence]
    schema: pa.Schema
    frame: Frame


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
