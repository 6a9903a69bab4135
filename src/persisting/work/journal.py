"""The journal of a work group: operations in a log, and a snapshot at the start of each segment.

A segment begins with the whole state, so the segments before it are removed once it is durable. The
log's own recovery cuts off a torn tail and detects damage to what was synced. Blocking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from persisting.codec import NONE
from persisting.errors import StorageError, WALError
from persisting.fs import FileSystem
from persisting.wal.frame import START, Frame, SegmentStart, encode_start
from persisting.wal.inspection import Inspection, ReadOnlyFileSystem
from persisting.wal.log import Log, Payload
from persisting.wal.recovery import Recovery
from persisting.work.state import GroupState, Operation

SNAPSHOT = 8
OPERATIONS = 9
"""Kinds of frames. The kinds of buckets' logs are below them."""

SEGMENT_BYTES = 4 * 1024 * 1024
"""After this many bytes of operations, or as many as the snapshot has, a new segment begins."""

_UNLIMITED = 1 << 62
_TRIES = 20


class JournalEntry(NamedTuple):
    """What a keeper makes durable together."""

    first: int
    """The number of operations before these."""
    operations: Sequence[Operation]
    now: int
    snapshot: Callable[[], bytes]
    """Returns the present state, with these operations applied."""


class Journal:
    """The journal of one group, open for appending. One thread at a time."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._released = log.last_sequence
        """The last sequence before the present segment."""
        self._unreleased = True
        self._limit = SEGMENT_BYTES
        self._segment_bytes = 0
        """Bytes of the present segment. Not from the log's size, which shrinks when the segment
        before is removed."""
        self._snapshot_bytes = 0

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self._log.size

    def write(self, entry: JournalEntry) -> None:
        """Make an entry durable."""
        payload = operations_payload(entry)
        before = self._log.size
        try:
            self._log.append([[payload]], lambda: self._preamble(entry.snapshot()), entry.now)
            self._segment_bytes += self._log.size - before
            self._log.sync()
        except WALError:
            self._log.retract()
            raise
        if self._unreleased:
            self._log.release(self._released)
            self._unreleased = False
        if self._segment_bytes - self._snapshot_bytes > self._limit:
            self._released = self._log.seal()
            self._unreleased = True

    def _preamble(self, state: bytes) -> list[Payload]:
        self._segment_bytes, self._snapshot_bytes = 0, len(state)
        self._limit = segment_limit(len(state))
        return [start_payload(self._log.last_written), snapshot_payload(state)]

    def close(self) -> None:
        self._log.close()


def start_payload(last_written: int) -> Payload:
    start = encode_start(SegmentStart(last_written, {}))
    return Payload(START, NONE, len(start), start)


def snapshot_payload(state: bytes) -> Payload:
    return Payload(SNAPSHOT, NONE, len(state), state)


def operations_payload(entry: JournalEntry) -> Payload:
    data = msgspec.msgpack.encode((entry.first, entry.operations))
    return Payload(OPERATIONS, NONE, len(data), data)


def segment_limit(snapshot_bytes: int) -> int:
    """Return how many bytes of operations follow a snapshot in its segment."""
    return max(SEGMENT_BYTES, snapshot_bytes)


def replay(folder: Path, fs: FileSystem) -> tuple[GroupState, Log]:
    """Return the state that a journal holds, and its log, open for appending."""
    recovery = Recovery(folder, fs, after=0)
    state = replayed(recovery.frames(), str(folder))
    state.take_operations()
    return state, recovery.open_log(_UNLIMITED)


def read_state(folder: Path) -> GroupState:
    """Return the state that a journal holds, without opening it; its keeper may be writing.

    Nothing is changed. What the keeper has not written yet is missing.
    """
    for _ in range(_TRIES):
        inspection = Inspection(folder, ReadOnlyFileSystem(), after=0)
        try:
            return replayed(inspection.frames(), str(folder))
        except FileNotFoundError:  # its keeper has just released a segment
            continue
    raise WALError(f"the journal in {folder} changes too often to be read; try again")


def replayed(frames: Iterable[Frame], place: str) -> GroupState:
    """Return the state that the frames of a journal hold; ``place`` is for messages."""
    return replayed_until(frames, place)[0]


def replayed_until(frames: Iterable[Frame], place: str) -> tuple[GroupState, int]:
    """Like :func:`replayed`, but also return the time of the last frame, by its keeper's clock."""
    state, latest = GroupState(), 0
    for frame in frames:
        latest = max(latest, frame.arrival)
        if frame.kind == SNAPSHOT:
            state = _load(frame, place)
        elif frame.kind == OPERATIONS:
            _apply(state, frame, place)
    return state, max(latest, state.time)


def _load(frame: Frame, place: str) -> GroupState:
    try:
        return GroupState.load(frame.payload)
    except StorageError as exc:
        raise WALError(f"{exc} (the journal in {place})") from exc


def _apply(state: GroupState, frame: Frame, place: str) -> None:
    try:
        first, operations = msgspec.msgpack.decode(
            frame.payload, type=tuple[int, list[list[object]]]
        )
        if first > state.operations:
            raise WALError(
                f"the journal in {place} lacks operations {state.operations} to {first - 1}: "
                "restore the topic from a backup"
            )
        for operation in operations[state.operations - first :]:
            state.apply(operation)
    except StorageError as exc:
        raise WALError(f"{exc} (the journal in {place})") from exc
    except Exception as exc:  # intact frames that make no sense: a later version wrote them
        raise WALError(
            f"the journal in {place} cannot be replayed: {type(exc).__name__}: {exc}; upgrade "
            "persisting, or restore the topic from a backup"
        ) from exc
