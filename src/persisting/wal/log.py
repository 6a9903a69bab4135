"""The log in append mode: many segments, one of them written to.

Recovery (:mod:`persisting.wal.recovery`) ends before the first append. Segments have a limited
size. A segment is released, and its file removed, when the tables hold all its records.

After a failed write or sync, nothing more is acknowledged on this log: a later sync that succeeds
proves nothing about pages that the kernel has already dropped. :meth:`Log.reset` starts over, once
the tables hold everything that was acknowledged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple, Protocol

from persisting.errors import WALError
from persisting.fs import FileSystem
from persisting.wal.frame import MORE, Frame, encode_frame
from persisting.wal.segment import Segment, new_name

log = logging.getLogger("persisting")

SEGMENT_BYTES = 16 * 1024 * 1024
"""A segment of this size is sealed, and the next append begins a new one."""
MIN_SEGMENT_BYTES = 64 * 1024


def segment_bytes(max_log_bytes: int) -> int:
    """Return the size of a segment for a log of limited size, which is several segments long, so
    that the oldest can be removed while others are in use."""
    return min(SEGMENT_BYTES, max(MIN_SEGMENT_BYTES, max_log_bytes // 4))


class Payload(NamedTuple):
    """The content of a frame, before it has a sequence in the log."""

    kind: int
    codec: int
    raw_length: int
    data: bytes | memoryview
    head: bytes = b""
    """Bytes before ``data``, kept apart because ``data`` may be large."""


Preamble = Callable[[], Sequence[Payload]]
"""Returns the first frames of a new segment, which form one entry."""


def encode_entries(
    entries: Sequence[Sequence[Payload]], salt: int, sequence: int, synced: int, arrival: int
) -> tuple[list[bytes | memoryview], list[int]]:
    """Return the bytes of entries, in parts, and the last sequence of each entry.

    The first frame gets ``sequence``; ``synced`` is the last sequence known to be durable.
    """
    chunks: list[bytes | memoryview] = []
    lasts: list[int] = []
    for entry in entries:
        for place, payload in enumerate(entry, start=1):
            frame = Frame(
                kind=payload.kind,
                codec=payload.codec,
                flags=MORE if place < len(entry) else 0,
                raw_length=payload.raw_length,
                sequence=sequence,
                synced=synced,
                arrival=arrival,
                payload=payload.data,
            )
            chunks += encode_frame(frame, salt, payload.head)
            sequence += 1
        lasts.append(sequence - 1)
    return chunks, lasts


class SealedSegment(NamedTuple):
    """A segment that is no longer written to and waits to be released."""

    path: Path
    last_sequence: int
    size: int


class AppendLog(Protocol):
    """What group commit needs of a log, in a folder or in an object store."""

    @property
    def folder(self) -> PurePath:
        """The place of the log, for messages."""

    @property
    def last_sequence(self) -> int: ...

    @property
    def last_written(self) -> int: ...

    @property
    def synced_sequence(self) -> int: ...

    @property
    def failed(self) -> str | None: ...

    @property
    def closed(self) -> bool: ...

    @property
    def size(self) -> int: ...

    @property
    def oldest_end(self) -> int: ...

    def skip_to(self, sequence: int) -> None: ...

    def append(
        self, entries: Sequence[Sequence[Payload]], preamble: Preamble, arrival: int
    ) -> list[int]: ...

    def retract(self) -> None: ...

    def sync(self) -> None: ...

    def seal(self) -> int: ...

    def release(self, sequence: int) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class Log:
    """Appends entries, syncs them, and releases what the table holds. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        fs: FileSystem,
        *,
        next_sequence: int,
        kept: Sequence[SealedSegment] = (),
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """``kept`` are the segments that recovery found; they are released like all others."""
        self._folder = folder
        self._fs = fs
        self._next_sequence = next_sequence
        self._last_written = next_sequence - 1
        self._kept = list(kept)
        self._unsynced: list[Segment] = []
        self._active: Segment | None = None
        self._synced = self._released = next_sequence - 1
        self._failure: str | None = None  # text, since an exception would keep its frames alive
        self._unpromised: int | None = None
        self._closed = False
        self._process = os.getpid()
        self._segment_bytes = segment_bytes
        self._removals = self._removals_synced = 0
        """How many segments were removed, and how many of the removals are durable."""
        self._size = sum(k.size for k in kept)
        self._guard = threading.Lock()
        self._syncing = threading.Lock()
        self._releasing = threading.Lock()

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def last_sequence(self) -> int:
        """The last sequence that was assigned."""
        return self._next_sequence - 1

    @property
    def last_written(self) -> int:
        """The last sequence before the next segment; :attr:`last_sequence` may be a skipped one."""
        return self._last_written

    @property
    def synced_sequence(self) -> int:
        """The last sequence that is durable, in the log or in the table."""
        return max(self._synced, self._released)

    @property
    def failed(self) -> str | None:
        """Why nothing can be appended, or None."""
        return self._failure

    @property
    def closed(self) -> bool:
        """Whether the log is closed: its content is in the table or left for the next recovery."""
        return self._closed

    @property
    def size(self) -> int:
        """Bytes of the log on disk. Read without the guard, which is held during writes."""
        return self._size

    @property
    def oldest_end(self) -> int:
        """The last sequence of the oldest segment. Read without the guard, as :attr:`size`."""
        sealed = [kept.last_sequence for kept in list(self._kept)]
        return min(sealed, default=self.last_sequence)

    def skip_to(self, sequence: int) -> None:
        """Give the next frame at least this sequence: a bucket's table holds all lower ones.

        The skipped numbers lie between two segments, where readers expect a gap.
        """
        with self._guard:
            if self._next_sequence < sequence:
                self._seal_active()
                # They do not count as synced: the next frames would report their own torn segment
                # as damage to durable records.
                self._next_sequence = sequence

    def append(
        self, entries: Sequence[Sequence[Payload]], preamble: Preamble, arrival: int
    ) -> list[int]:
        """Write entries, each of one or more frames; return the last sequence of each.

        A new segment begins with the frames of ``preamble``. When this returns, the entries survive
        a kill of the process; after the next :meth:`sync` they survive power loss.
        """
        while True:
            with self._guard:
                self._unpromised = None
                self._refuse_after_failure()
                if not self._must_sync_first():
                    return self._append(entries, preamble, arrival)
            self.sync()

    def _must_sync_first(self) -> bool:
        """Whether a segment must begin and the ones before it are not synced.

        Power loss must not take a segment and leave the next one: a reader of one bucket could
        not tell that from a segment that was released.
        """
        if self._active is not None and self._active.size >= self._segment_bytes:
            self._seal_active()
        if self._active is not None:
            return False
        return any(s.last_sequence > self._synced or not s.named for s in self._unsynced)

    def _append(
        self, entries: Sequence[Sequence[Payload]], preamble: Preamble, arrival: int
    ) -> list[int]:
        try:
            return self._append_entries(entries, preamble, arrival)
        except BaseException as exc:
            self._failure = _reason(exc)
            raise WALError(
                f"cannot write to the log in {self.folder}: {_reason(exc)}; nothing of this "
                "put was stored. Fix the cause and retry"
            ) from exc

    def _append_entries(
        self, entries: Sequence[Sequence[Payload]], preamble: Preamble, arrival: int
    ) -> list[int]:
        if self._active is None:
            first_frames = preamble()
            self._active = self._begin_segment(self._next_sequence)
            self._size += self._active.size
            entries = [first_frames, *entries]
            lasts = self._write(entries, arrival, self._active)[1:]
        else:
            lasts = self._write(entries, arrival, self._active)
        return lasts

    def _begin_segment(self, first: int) -> Segment:
        name = new_name(first)
        try:
            return Segment(self.folder, self._fs, name)
        except BaseException:
            # The file may exist and not have been removed; the reset that must follow removes it.
            self._kept.append(SealedSegment(self.folder / str(name), first - 1, 0))
            raise

    def _write(
        self, entries: Sequence[Sequence[Payload]], arrival: int, segment: Segment
    ) -> list[int]:
        chunks, lasts = encode_entries(
            entries, segment.salt, self._next_sequence, self._synced, arrival
        )
        data = b"".join(chunks)
        self._unpromised = segment.size
        self._next_sequence = lasts[-1] + 1
        self._last_written = lasts[-1]
        segment.append(data, self._last_written)
        self._size += len(data)
        return lasts

    def retract(self) -> None:
        """After a failure, try to truncate the last append, which was not acknowledged.

        If that fails, the append may reappear after a crash, like any put whose outcome is unknown.
        """
        with self._guard:
            if self._unpromised is None or self._active is None:
                return
            if self._failure is None:
                self._failure = "the last append was rolled back"
            written = self._active.size
            try:
                self._active.cut(self._unpromised)
            except OSError as exc:
                log.warning("cannot truncate %s: %s", self._active.path, exc)
            else:
                self._size -= written - self._active.size

    def sync(self) -> None:
        """Make everything appended so far durable; appends may continue meanwhile."""
        with self._syncing:
            with self._guard:
                self._refuse_after_failure()
                target = self._last_written
                segments = [*self._unsynced, *([self._active] if self._active else [])]
            try:
                for segment in segments:
                    if segment.last_sequence > self._synced or not segment.named:
                        self._sync_segment(segment)
            except BaseException as exc:
                with self._guard:
                    self._failure = _reason(exc)
                raise WALError(
                    f"cannot sync the log in {self.folder}: {_reason(exc)}; records put since the "
                    "last sync are not acknowledged as durable"
                ) from exc
            with self._guard:
                self._synced = max(self._synced, target)
                for segment in segments:
                    # A segment that was sealed meanwhile may hold frames that this sync missed.
                    if segment in self._unsynced and segment.last_sequence <= target:
                        self._unsynced.remove(segment)
                        segment.close()

    def _sync_segment(self, segment: Segment) -> None:
        removals, syncs_folder = self._removals, not segment.named
        segment.sync()
        if syncs_folder:
            self._removals_synced = max(self._removals_synced, removals)

    def seal(self) -> int:
        """End the active segment; return the last sequence in the sealed ones."""
        with self._guard:
            self._seal_active()
            return self._next_sequence - 1

    def _seal_active(self) -> None:
        if self._active is not None:
            active, self._active = self._active, None
            self._kept.append(SealedSegment(active.path, active.last_sequence, active.size))
            self._unpromised = None
            self._unsynced.append(active)

    def release(self, sequence: int) -> None:
        """Remove the segments up to ``sequence``, whose records the tables hold.

        The last removal is not synced: a segment that reappears after power loss holds nothing
        above the sequences of the tables, and recovery skips it. An earlier removal is synced
        first, so that segments without a gap between them remain.
        """
        with self._releasing:
            for kept in self._seal_released(sequence):
                self._remove(kept)

    def _seal_released(self, sequence: int) -> list[SealedSegment]:
        with self._syncing, self._guard:
            if self._active is not None and self._active.last_sequence <= sequence:
                self._seal_active()
            for segment in [s for s in self._unsynced if s.last_sequence <= sequence]:
                self._unsynced.remove(segment)
                segment.close()
            # Not written to frames: recovery would report unsynced frames as damage.
            self._released = max(self._released, min(sequence, self._next_sequence - 1))
            return [kept for kept in self._kept if kept.last_sequence <= sequence]

    def _remove(self, kept: SealedSegment) -> None:
        try:
            if self._removals_synced < self._removals:
                self._fs.sync_folder(self.folder)
                self._removals_synced = self._removals
            self._fs.remove(kept.path)
            self._removals += 1
        except OSError as exc:
            raise WALError(
                f"cannot remove the log segment {kept.path}, whose records are in the table: "
                f"{exc.strerror or exc}; the next flush tries again"
            ) from exc
        with self._guard:
            self._kept.remove(kept)
            self._size -= kept.size

    def reset(self) -> None:
        """After a failure, drop the whole log; the tables hold everything that was acknowledged.

        The newest segment goes first, so that a crash leaves a log without a gap.
        """
        self._close_segments()
        with self._releasing:
            for kept in reversed(list(self._kept)):
                self._remove(kept)
            try:
                self._fs.sync_folder(self.folder)
            except OSError as exc:
                raise WALError(f"cannot sync the log's folder {self.folder}: {exc}") from exc
        with self._guard:
            self._removals_synced = self._removals
            self._synced = self._released = self._next_sequence - 1
            self._size = 0
            self._failure = None

    def close(self) -> None:
        """Close the files for good; their content stays for the next recovery.

        The caller releases the bucket's lock next, and another process may then write a log here.
        Does nothing in a forked child: the files belong to its parent, and a thread that held one
        of our locks does not exist there.
        """
        if os.getpid() != self._process:
            return
        with self._guard:
            self._closed = True
        self._close_segments()

    def _close_segments(self) -> None:
        self.seal()
        with self._syncing, self._guard:
            for segment in self._unsynced:
                segment.close()
            self._unsynced = []

    def _refuse_after_failure(self) -> None:
        if self._closed or os.getpid() != self._process:
            raise WALError(
                f"the log in {self.folder} is closed, or belongs to the process that this one was "
                "forked from; nothing of this put was stored"
            )
        if self._failure is not None:
            raise WALError(
                f"the log in {self.folder} failed earlier ({self._failure}) and accepts nothing "
                "until a flush has written all acknowledged records to the table; call flush()"
            )


def _reason(exc: BaseException) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc) or type(exc).__name__
