"""Follows the log of a live owner in another process, without its lock.

A log has one follower in a process, however many of its buckets are read and by how many readers.
The follower reads the log up to the acknowledged sequence that the owner publishes, and notes where
the records of each bucket are. Readers then decode the frames of their own bucket.

Nothing is ever written. Segments disappear when the tables hold their records; a reader that misses
them finds the records in its table.
"""

from __future__ import annotations

import os
import threading
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from persisting.bucket.chunk import Chunk
from persisting.bucket.log_index import PlainRows, StoredSection
from persisting.bucket.log_positions import POSITIONS_FILE, Positions, read_positions
from persisting.bucket.log_records import (
    check_rows,
    decompressed,
    read_batch,
    read_schema,
    read_values,
    split_payload,
    unknown_kind,
)
from persisting.bucket.path_watch import CHANGED, CLOSED, path_watch
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.bucket.waiters import Waiters
from persisting.errors import WALError
from persisting.fs import FileSystem, os_errors_as
from persisting.records import RecordEncoder, Rules
from persisting.wal.frame import (
    BATCH,
    FORMAT_VERSION,
    RECORDS,
    SCHEMA,
    SEGMENT_HEADER_SIZE,
    START,
    Broken,
    Frame,
    decode_frame,
    decode_segment_header,
    decode_start,
)
from persisting.wal.segment import SegmentName, parse_name

_POSITION_BITS = 40
_READ_BYTES = 1 << 20
_CACHED_BYTES = 16 * 1024 * 1024
"""Frames kept in memory, so that the readers of several buckets decode them once."""
_VALUE_BYTES = 32
"""A rough size of a plain value in memory."""
_EVOLVING = Rules(evolving=True)


class Released(Exception):
    """A segment was removed: the tables hold its records."""


class LoggedRows(NamedTuple):
    """The records of one bucket in one frame."""

    sequence: int
    arrival: int
    place: tuple[int, int]
    """Epoch and offset of the first record."""
    producers: Sequence[ProducerSequence]
    encoder: RecordEncoder
    data: Any
    """Rows of values, or an Arrow batch."""

    def chunk(self) -> Chunk:
        """Return the records as a chunk of its own; readers change their chunks."""
        if isinstance(self.data, pa.RecordBatch):
            chunk = Chunk(self.encoder, batch=self.data)
        else:
            names = self.encoder.schema.names
            rows = [dict(zip(names, values, strict=True)) for values in self.data]
            chunk = Chunk(self.encoder, rows=rows, nbytes=_VALUE_BYTES * len(names) * len(rows))
        chunk.logged(self.sequence, max(1, chunk.nbytes))
        return chunk


class DeadLogRows(NamedTuple):
    """Records of one bucket in a log that is no longer written to, from one or more frames."""

    rows: PlainRows
    encoder: RecordEncoder
    folder: Path

    @property
    def arrival(self) -> int:
        return int(self.rows.arrivals.max())

    @property
    def place(self) -> tuple[int, int]:
        return self.rows.place

    @property
    def producers(self) -> Sequence[ProducerSequence]:
        return self.rows.producers

    def chunk(self) -> Chunk:
        """Return the records as a chunk."""
        return self.rows.chunk(self.encoder, self.folder)


def stored_rows(
    block: PlainRows | StoredSection, bucket: int, encoder: RecordEncoder, folder: Path
) -> Iterator[LoggedRows | DeadLogRows]:
    """Yield the records that the index of a dead log holds."""
    if isinstance(block, PlainRows):
        yield DeadLogRows(block, encoder, folder)
    else:
        for rows in DecodedFrame(block.frame, encoder, folder).rows_of(bucket):
            if rows.place == block.place:  # the frame may hold several sections of the bucket
                yield rows


class DecodedFrame:
    """The rows of a frame, of all its buckets."""

    def __init__(self, frame: Frame, encoder: RecordEncoder, folder: Path) -> None:
        self.frame, self._encoder = frame._replace(payload=b""), encoder
        self._sections, stored = split_payload(frame, folder)
        if frame.kind == RECORDS:
            self._data: Any = read_values(decompressed(frame, stored), frame.sequence, folder)
            rows = len(self._data)
        else:
            self._data = read_batch(frame, stored, encoder, folder)
            rows = self._data.num_rows
        needed = sum(section.rows for section in self._sections)
        check_rows(frame.sequence, needed, rows, folder)

    def rows_of(self, bucket: int) -> Iterator[LoggedRows]:
        """Yield the rows of one bucket."""
        first = 0
        for section in self._sections:
            last = first + section.rows
            if section.bucket == bucket:
                data = self._data
                batch = isinstance(data, pa.RecordBatch)
                part = data.slice(first, section.rows) if batch else data[first:last]
                yield LoggedRows(
                    self.frame.sequence,
                    self.frame.arrival,
                    (section.epoch, section.offset),
                    section.producers,
                    self._encoder,
                    part,
                )
            first = last


@dataclass
class _Segment:
    """A segment that is being read."""

    number: int
    name: SegmentName
    path: Path
    fd: int
    position: int = SEGMENT_HEADER_SIZE


class LogFollower:
    """Where the records of each bucket are in a log that is in use. Thread-safe, blocking."""

    def __init__(self, folder: Path, fs: FileSystem) -> None:
        """Raise ``FileNotFoundError`` if the log has no published positions, or was removed."""
        self.folder, self._fs = folder, fs
        self._positions_fd = os.open(folder / POSITIONS_FILE, os.O_RDONLY | os.O_CLOEXEC)
        self._open_fds = {self._positions_fd}
        weakref.finalize(self, _close_all, self._open_fds).atexit = False
        self._guard = threading.Lock()
        self._current: _Segment | None = None
        self._paths: dict[int, Path] = {}
        self._through = 0
        """Everything acknowledged up to here was read."""
        self._sequence = 0
        """The last frame that was read."""
        self.gaps = 0
        """How many times segments were released before they were read."""
        self._places: defaultdict[int, array[int]] = defaultdict(lambda: array("Q"))
        self._sequences: defaultdict[int, array[int]] = defaultdict(lambda: array("Q"))
        """By bucket, the frames with records of it: where they are, and their sequences."""
        self._forgotten: dict[int, int] = {}
        """By bucket, the last sequence of it in segments that were read, and then removed."""
        self._encoders: list[tuple[int, RecordEncoder]] = []
        """Where each schema begins."""
        self._cache: OrderedDict[int, DecodedFrame] = OrderedDict()
        self._cached_bytes = 0
        self._synced = 0
        self._syncing = threading.Lock()
        self._waiters: defaultdict[int, weakref.WeakSet[Waiters]] = defaultdict(weakref.WeakSet)

    # Waiting

    def subscribe(self, bucket: int, waiters: Waiters) -> None:
        """Wake these when there are new records of a bucket."""
        with self._guard:
            self._waiters[bucket].add(waiters)

    def watch(self) -> None:
        """Follow the log while a caller waits."""
        path_watch().add(self.folder / POSITIONS_FILE, CHANGED | CLOSED, self)

    @property
    def is_waiting(self) -> bool:
        with self._guard:
            return any(not w.is_empty for group in self._waiters.values() for w in group)

    def on_change(self, *, gone: bool) -> bool:
        """Read on, and wake the readers of buckets that have more; all if the owner may be dead."""
        before = self._through
        try:
            self.advance()
        except (OSError, WALError, Released):
            gone = True  # the readers find the same problem, and report it
        if gone:
            self._wake(list(self._waiters))
        return gone or self._through != before

    def _wake(self, buckets: list[int]) -> None:
        with self._guard:
            found = [w for bucket in buckets for w in self._waiters.get(bucket, ())]
        for waiters in found:
            waiters.wake()

    # Reading

    def advance(self) -> int:
        """Read what was acknowledged since the last call; return the acknowledged sequence."""
        with self._guard:
            acknowledged = read_positions(self._positions_fd).acknowledged
            if acknowledged <= self._through:
                return self._through
            news: set[int] = set()
            self._read_through(acknowledged, news)
            self._through = acknowledged
        self._wake(list(news))
        return acknowledged

    def _read_through(self, sequence: int, news: set[int]) -> None:
        """Index the frames up to ``sequence``, which are all written."""
        while True:
            broken = self._read_current(sequence, news)
            if self._sequence >= sequence:
                return
            following = self._following()
            # The owner may have written to the segment between the read and the listing.
            broken = self._read_current(sequence, news)
            if following is None:
                if broken is not None and self._is_in_place():
                    raise WALError(
                        f"log segment {self._current.path if self._current else self.folder} is "
                        f"damaged: {broken}, where acknowledged records were stored. A flush by "
                        "its owner writes them to the table"
                    )
                self.gaps += 1
                return
            self._begin(following)

    def _read_current(self, sequence: int, news: set[int]) -> Broken | None:
        """Read the open segment on; return why it ends before its file does, if it does."""
        segment = self._current
        if segment is None:
            return None
        size, step = os.fstat(segment.fd).st_size, _READ_BYTES
        while segment.position < size and self._sequence < sequence:
            data = memoryview(
                os.pread(segment.fd, min(step, size - segment.position), segment.position)
            )
            used, broken = self._index(segment, data, sequence, news)
            segment.position += used
            if used:
                step = _READ_BYTES
            elif broken is None:
                return None  # the next frame is not acknowledged
            elif len(data) < size - segment.position:
                step *= 4  # the frame is longer than what was read
            else:
                return broken
        return None

    def _index(
        self, segment: _Segment, data: memoryview, sequence: int, news: set[int]
    ) -> tuple[int, Broken | None]:
        """Note the complete frames in ``data``; return their length and what follows them."""
        position = 0
        while position < len(data):
            try:
                frame, following = decode_frame(data, position, segment.name.salt)
            except Broken as broken:
                return position, broken
            if frame.sequence > sequence:
                return position, None
            self._add(frame, segment, segment.position + position, news)
            position = following
        return position, None

    def _add(self, frame: Frame, segment: _Segment, position: int, news: set[int]) -> None:
        place = segment.number << _POSITION_BITS | position
        if frame.kind == START and position == SEGMENT_HEADER_SIZE:
            if decode_start(frame.payload, position).previous > self._sequence:
                self.gaps += 1
        elif frame.kind == SCHEMA:
            self._use_schema(place, read_schema(frame, self.folder))
        elif frame.kind in (BATCH, RECORDS):
            buckets = {section.bucket for section in split_payload(frame, self.folder)[0]}
            for bucket in buckets:
                self._places[bucket].append(place)
                self._sequences[bucket].append(frame.sequence)
            news |= buckets
            if any(len(self._waiters.get(bucket, ())) for bucket in buckets):
                self._remember(place, self._decoded(frame, place))
        elif frame.kind != START:
            raise unknown_kind(frame, self.folder)
        self._sequence = frame.sequence

    def _use_schema(self, place: int, schema: pa.Schema) -> None:
        last = self._encoders[-1][1] if self._encoders else None
        if last is None or not last.schema.equals(schema, check_metadata=True):
            self._encoders.append((place, RecordEncoder(schema, _EVOLVING)))

    def _following(self) -> _Segment | None:
        """Open the segment after the current one, if there is one; forget removed segments."""
        parsed = [(parse_name(name), name) for name in self._fs.list(self.folder)]
        present = sorted((name, self.folder / text) for name, text in parsed if name is not None)
        self._forget_removed({path for _, path in present})
        begun = self._current.name.first_sequence if self._current else -1
        later = [item for item in present if item[0].first_sequence > begun]
        if not later:
            return None
        name, path = later[0]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.gaps += 1
            raise Released from None
        self._open_fds.add(fd)
        try:
            header = decode_segment_header(memoryview(os.pread(fd, SEGMENT_HEADER_SIZE, 0)))
        except Broken:
            self._close(fd)
            return None  # it is being created: nothing in it is acknowledged
        if header.version > FORMAT_VERSION:
            self._close(fd)
            raise WALError(
                f"log segment {path} has format {header.version}, but this version reads "
                f"up to {FORMAT_VERSION}; upgrade persisting"
            )
        return _Segment(self._current.number + 1 if self._current else 0, name, path, fd)

    def _begin(self, following: _Segment) -> None:
        if self._current is not None:
            self._close(self._current.fd)
        self._current = following
        self._paths[following.number] = following.path

    def _close(self, fd: int) -> None:
        self._open_fds.discard(fd)
        os.close(fd)

    def _is_in_place(self) -> bool:
        """Whether the open segment still exists; otherwise the tables hold its records."""
        return self._current is not None and os.fstat(self._current.fd).st_nlink > 0

    def _forget_removed(self, present: set[Path]) -> None:
        """Drop the index of segments that were removed."""
        removed = [number for number, path in self._paths.items() if path not in present]
        for number in removed:
            del self._paths[number]
        if not removed:
            return
        first = min(self._paths, default=max(removed) + 1) << _POSITION_BITS
        for bucket, places in self._places.items():
            count = bisect_left(places, first)
            if count:
                self._forgotten[bucket] = self._sequences[bucket][count - 1]
            del places[:count]
            del self._sequences[bucket][:count]
        while len(self._encoders) > 1 and self._encoders[1][0] <= first:
            del self._encoders[0]

    # Handing out

    def rows(self, bucket: int, after: int, through: int) -> Iterator[LoggedRows]:
        """Yield the records of a bucket in the frames above ``after``, up to ``through``.

        Raise :class:`Released` if one of the frames was removed: the table holds it.
        """
        with self._guard:
            if self._forgotten.get(bucket, 0) > after:
                raise Released
            sequences = self._sequences[bucket]
            first, last = bisect_right(sequences, after), bisect_right(sequences, through)
            places = self._places[bucket][first:last]
        data, number, begin = memoryview(b""), -1, 0
        for place in places:
            with self._guard:
                decoded = self._cache.get(place)
            if decoded is None:
                segment, position = place >> _POSITION_BITS, place & ((1 << _POSITION_BITS) - 1)
                if segment != number:
                    number, begin = segment, position
                    data = self._read_from(segment, position)
                decoded = self._decode(data, place, position - begin)
            yield from decoded.rows_of(bucket)

    def _read_from(self, number: int, position: int) -> memoryview:
        with self._guard:
            path = self._paths.get(number)
        try:
            if path is None:
                raise Released
            with path.open("rb") as file:
                file.seek(position)
                return memoryview(file.read())
        except FileNotFoundError:
            raise Released from None

    def _decode(self, data: memoryview, place: int, position: int) -> DecodedFrame:
        with self._guard:
            path = self._paths.get(place >> _POSITION_BITS)
        name = parse_name(path.name) if path is not None else None
        if name is None:
            raise Released
        try:
            frame, _ = decode_frame(data, position, name.salt)
        except Broken as exc:
            raise WALError(f"log segment {path} has changed: {exc}") from exc
        with self._guard:
            decoded = self._decoded(frame, place)
            self._remember(place, decoded)
        return decoded

    def _decoded(self, frame: Frame, place: int) -> DecodedFrame:
        index = bisect_right(self._encoders, place, key=lambda begun: begun[0]) - 1
        if index < 0:
            raise WALError(
                f"the log in {self.folder} has records at sequence {frame.sequence} without a "
                "schema before them"
            )
        return DecodedFrame(frame, self._encoders[index][1], self.folder)

    def _remember(self, place: int, decoded: DecodedFrame) -> None:
        if place not in self._cache:
            self._cache[place] = decoded
            self._cached_bytes += decoded.frame.raw_length
        while self._cached_bytes > _CACHED_BYTES:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.frame.raw_length

    # Durability

    def sync_through(self, sequence: int) -> None:
        """Wait until power loss cannot take the frames up to ``sequence``.

        The owner may sync only at intervals. A sync from this process does the same work.
        """
        with self._syncing:
            positions: Positions = read_positions(self._positions_fd)
            synced = max(self._synced, positions.synced)
            if synced >= sequence:
                return
            through = self._through
            with os_errors_as("sync the log in", self.folder):
                self._sync_above(synced)
            self._synced = max(synced, through)

    def _sync_above(self, synced: int) -> None:
        """Sync the segments that may hold frames above ``synced``.

        A segment or log that no longer exists was released: the tables hold its records.
        """
        with suppress(FileNotFoundError):
            names = sorted(n for n in map(parse_name, self._fs.list(self.folder)) if n is not None)
            for index, name in enumerate(names):
                if index + 1 == len(names) or names[index + 1].first_sequence > synced + 1:
                    with suppress(FileNotFoundError):
                        self._fs.sync_file(self.folder / str(name))
            self._fs.sync_folder(self.folder)


def _close_all(fds: set[int]) -> None:
    for fd in fds:
        os.close(fd)


_followers: weakref.WeakValueDictionary[Path, LogFollower] = weakref.WeakValueDictionary()
_followers_guard = threading.Lock()


def follower_of(folder: Path, fs: FileSystem) -> LogFollower:
    """Return the follower of a log in this process; raise ``FileNotFoundError`` if it is
    removed."""
    with _followers_guard:
        follower = _followers.get(folder)
        if follower is None:
            follower = _followers[folder] = LogFollower(folder, fs)
        return follower


def _reset_after_fork() -> None:
    """A forked process follows logs by itself: a lock may have been held during the fork."""
    global _followers, _followers_guard
    _followers, _followers_guard = weakref.WeakValueDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
