"""An index of a log that is not written to any more: where the records of each bucket are.

A dead owner's log holds the records of many buckets, and the buckets are opened one after the
other. The log is checked and read through once; each bucket then reads its own frames. The log is
never changed: a torn tail is skipped.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from persisting.bucket.log_records import read_schema, read_sections
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
_CACHED = 8


@dataclass
class _Indexing(Recovery):
    """Reads a log through, and notes where each frame is."""

    position: int = 0
    """Where the last frame begins in its segment."""
    segments: list[Path] = field(default_factory=list)
    last_header: int | None = None
    """Behind broken bytes, the last sequence that any intact header has; None if nothing is
    broken."""

    def _scan(
        self, path: Path, data: memoryview, expected: int | None
    ) -> Generator[Frame, None, Scan]:
        self.segments.append(path)
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

    def _torn_or_damaged(
        self, paths: list[Path], data: memoryview, scan: Scan, broken: Broken
    ) -> None:
        headers = self._later(paths, data, broken.position)
        self.last_header = max((header.sequence for _, header in headers), default=0)
        super()._torn_or_damaged(paths, data, scan, broken)

    def _keep_copy(self, path: Path, rest: bytes, position: int) -> None:
        self.trimmed_bytes += len(rest)


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
        self._places: defaultdict[int, array[int]] = defaultdict(lambda: array("Q"))
        self._schema_places: list[int] = []
        self._schemas: list[pa.Schema] = []
        self._start: SegmentStart | None = None
        self._problem: WALError | None = None
        self.last_sequence = 0
        scan = _Indexing(folder, ReadOnlyFileSystem(), 0, bucket=-1)
        try:
            for frame in scan.frames():
                self._add(frame, len(scan.segments) - 1, scan.position)
        except WALError as exc:
            self._problem = exc
        self._segments, self._last_header = scan.segments, scan.last_header
        self._sync()

    def _sync(self) -> None:
        """Make the log durable. A killed owner may have left frames only in the page cache, and a
        put to several buckets must not become durable in one bucket alone."""
        for path in self._segments:
            self._fs.sync_file(path)
        self._fs.sync_folder(self.folder)

    def _add(self, frame: Frame, segment: int, position: int) -> None:
        place = segment << _POSITION_BITS | position
        self.last_sequence = frame.sequence
        if frame.kind in (BATCH, RECORDS):
            for bucket in {section.bucket for section in read_sections(frame, self.folder)}:
                self._places[bucket].append(place)
        elif frame.kind == SCHEMA:
            self._schema_places.append(place)
            self._schemas.append(read_schema(frame, self.folder))
        elif frame.kind == START and self._start is None:
            self._start = decode_start(frame.payload, position)

    @property
    def is_damaged(self) -> bool:
        return self._problem is not None

    def check(self, bucket: int, after: int) -> None:
        """Raise if the log may have lost records of a bucket above sequence ``after``."""
        # Damage below the last sequence of the bucket's table is no loss for it.
        if self._problem is not None and (self._last_header is None or self._last_header > after):
            raise self._problem
        if self._start is not None and self._start.buckets.get(bucket, 0) > after:
            raise WALError(
                f"the first segments of the log {self.folder} are missing: they hold records of "
                f"bucket {bucket} above sequence {after}. Restore them from a copy"
            )

    def frames(self, bucket: int) -> Iterator[tuple[Frame, pa.Schema]]:
        """Yield the frames with records of a bucket, each with its schema."""
        opened, data, salt = -1, memoryview(b""), 0
        for place in self._places.get(bucket, ()):
            segment, position = place >> _POSITION_BITS, place & ((1 << _POSITION_BITS) - 1)
            if segment != opened:
                path = self._segments[segment]
                name = parse_name(path.name)
                assert name is not None
                opened, data, salt = segment, memoryview(self._fs.read(path)), name.salt
            try:
                frame, _ = decode_frame(data, position, salt)
            except Broken as exc:
                raise WALError(f"log segment {self._segments[segment]} has changed: {exc}") from exc
            index = bisect_right(self._schema_places, place) - 1
            if index < 0:
                raise WALError(
                    f"the log in {self.folder} has records at sequence {frame.sequence} without a "
                    "schema before them"
                )
            yield frame, self._schemas[index]


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
