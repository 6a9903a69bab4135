"""What a reader without the lock sees of a bucket: the table, then the log of the bucket's owner.

The log of a live owner is read up to what is acknowledged (:mod:`log_follower`). A dead owner's
log is read as it stands, to its last complete entry (:mod:`log_index`), and never changed. Sections
of the log say at which epoch and offset their records belong. So records pass from the log to the
table without a gap or a repetition: those at or below the table's sequence are in the table, and
the next ones begin where the table ends. If they do not, the reader's table is older than what it
has read of the log, and is refreshed.

Loading a version of the table takes longer than records of the log should wait. While a caller
follows the log, whose rows the reader already holds, a version is loaded in the background.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from persisting.bucket import log_index, log_note
from persisting.bucket.buffer import Buffer
from persisting.bucket.chunk import Chunk
from persisting.bucket.delays import DELAYS, Delay, Delays, due_of
from persisting.bucket.log_follower import (
    DeadLogRows,
    LogFollower,
    LoggedRows,
    Released,
    follower_of,
    stored_rows,
)
from persisting.bucket.log_index import LogIndex
from persisting.bucket.log_note import LogNote
from persisting.bucket.log_positions import is_alive
from persisting.bucket.path_watch import ENTRIES, path_watch
from persisting.bucket.producer_sequences import WRITERS, ProducerSequence, ProducerSequences
from persisting.bucket.schema_state import EVOLVING, SchemaState
from persisting.bucket.waiters import Waiters
from persisting.concurrency.pool import pool
from persisting.errors import StorageError, WALError
from persisting.fs import FileSystem
from persisting.records import RecordEncoder
from persisting.records.arrow import merge
from persisting.table.files import VERSIONS
from persisting.table.table import Table

_TABLE_SECONDS = 0.05
_BUSY_TABLE_SECONDS = 0.5
"""Seconds between two checks of the table, unless the log or the folder of versions shows a change.
A check may take longer than new records of the log should wait, so it waits for a pause between
them."""

_FOLLOWED_SECONDS = 2.0
"""For how long after the last wait a reader counts as following the log."""

_PROBE_SECONDS = 0.1
"""Seconds between two checks whether a silent owner is alive."""

_WATCHED_SECONDS = 0.25
_UNWATCHED_SECONDS = 0.05
"""How long a reader waits for a change at most, with and without inotify: a watch does not see the
changes of other machines."""

_ATTEMPTS = 6


class OutOfStep(Exception):
    """The log does not continue where the table ends."""


class LogView:
    """Keeps the buffer of a bucket that is open for reading at what its owner's log holds.

    Not thread-safe: the caller holds the table's lock, except where it says otherwise.
    """

    def __init__(
        self,
        folder: Path,
        table: Table,
        buffer: Buffer,
        schema: SchemaState,
        fs: FileSystem,
        waiters: Waiters,
        lock: threading.Lock,
    ) -> None:
        """``lock`` is the table's."""
        self._folder, self._fs, self._lock = folder, fs, lock
        self._table, self._buffer, self._schema = table, buffer, schema
        self._waiters = waiters
        self._log: LogNote | None = None
        self._follower: LogFollower | None = None
        self._index: LogIndex | None = None
        self._probed = 0.0
        self._gaps = 0
        self._refreshed_at = time.monotonic()
        self._versions_changed_at = 0
        """The timestamp of the folder of versions at the last check of the table."""
        self._shown_sequence = table.sequence
        """The table's sequence when the buffer was last brought up to date."""
        self._taken = table.sequence
        """The log was taken into the buffer up to this sequence."""
        self._encoder = buffer.encoder
        self._watched_at = -_FOLLOWED_SECONDS
        self._loading: Future[None] | None = None
        """The load of a version in the background."""
        self._load_failed = False

    # Waiting

    @property
    def wait_seconds(self) -> float:
        """How long to wait for a wake at most. May be called from any thread."""
        return _UNWATCHED_SECONDS if path_watch().polls else _WATCHED_SECONDS

    @property
    def is_waiting(self) -> bool:
        return not self._waiters.is_empty

    def on_change(self, *, gone: bool) -> bool:
        """Wake the waiting readers: the bucket got another log, or the table another version."""
        self._waiters.wake()
        return True

    def watch(self) -> None:
        """Have the next change wake the readers that are already waiting."""
        self._watched_at = time.monotonic()
        watch = path_watch()
        watch.add(self._folder, ENTRIES, self)
        watch.add(self._table.root / VERSIONS, ENTRIES, self)
        if self._follower is not None:
            self._follower.watch()

    # Refreshing

    def expire(self) -> None:
        """Make the next refresh check the table, however recent the last check was."""
        self._refreshed_at = 0.0

    def refresh(self) -> None:
        """Show everything that is acknowledged. Blocking."""
        problem: Exception | None = None
        for attempt in range(_ATTEMPTS):
            try:
                moved = self._find_log()
                through = self._advance()
                is_due = self._table_is_due(busy=through > self._taken)
                if moved or attempt or self._missed_segments() or self._load_failed:
                    self._refresh_table()
                elif is_due and self._is_followed:
                    self._load_in_background()
                elif is_due:
                    self._refresh_table()
                self._show(through)
                return
            except (OutOfStep, Released, FileNotFoundError) as exc:
                problem = exc
            except WALError as exc:
                if log_note.read(self._folder, self._fs) == self._log:
                    raise
                problem = exc  # a new owner has just removed the log
        raise WALError(
            f"the table and the log of {self._folder} do not match ({problem}): a part of "
            "one of them is missing. Restore the missing files from a copy"
        ) from problem

    def _find_log(self) -> bool:
        """Follow the log that the bucket notes now; return whether that is another one.

        When the note changes, the table holds all records of the log before.
        """
        noted = log_note.read(self._folder, self._fs)
        if noted == self._log:
            return False
        self._log, self._follower, self._index = noted, None, None
        self._probed = 0.0
        self._taken = 0  # another log may number its frames from the table's sequence on
        return True

    def _advance(self) -> int:
        """Read the log on; return up to which sequence it may be shown."""
        if self._log is None:
            return 0
        folder = self._log.folder
        if self._index is None and self._follower is None:
            if is_alive(folder):
                self._follower = follower_of(folder, self._fs)
                self._follower.subscribe(self._log.bucket, self._waiters)
                self._gaps = self._follower.gaps
            else:
                self._index = log_index.index_of(folder, self._fs)
        if self._follower is not None:
            through = self._follower.advance()
            if through > self._taken or not self._has_lost_owner(folder):
                return through
            self._follower, self._index = None, log_index.index_of(folder, self._fs)
        assert self._index is not None
        return self._index.last_sequence

    def _has_lost_owner(self, log: Path) -> bool:
        """Whether the owner of a log that brings nothing new is dead."""
        if time.monotonic() - self._probed < _PROBE_SECONDS:
            return False
        self._probed = time.monotonic()
        return not is_alive(log)

    def _missed_segments(self) -> bool:
        """Whether segments were released before they were read, since the last call."""
        if self._follower is None or self._follower.gaps == self._gaps:
            return False
        self._gaps = self._follower.gaps
        return True

    def _table_is_due(self, *, busy: bool) -> bool:
        seconds = _BUSY_TABLE_SECONDS if busy else _TABLE_SECONDS
        if time.monotonic() - self._refreshed_at > seconds:
            return True
        # Without a log, what was flushed is only in the table: its readers do not wait.
        return self._log is None and self._changed_at() != self._versions_changed_at

    def _changed_at(self) -> int:
        try:
            return (self._table.root / VERSIONS).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @property
    def _is_followed(self) -> bool:
        """Whether a caller follows the log of a live owner: then all rows come from there."""
        recently = time.monotonic() - self._watched_at < _FOLLOWED_SECONDS
        return recently and self._follower is not None

    def _load_in_background(self) -> None:
        self._refreshed_at = time.monotonic()
        if (self._loading is None or self._loading.done()) and self._table.is_behind:
            self._loading = pool().submit(self._load)

    def _load(self) -> None:
        """Load the newest version and show it, without keeping the log's records waiting."""
        try:
            newer = self._table.load_newer()
            with self._lock:
                if newer is not None and self._table.is_newest(newer):
                    self._table.follow(newer)
                    self._use_schema()
                    self._show(self._taken)
        except Exception:  # the next refresh finds the same problem, and reports or solves it
            self._load_failed = True
            self._waiters.wake()

    def _refresh_table(self) -> None:
        before, changed_at = self._table.view, self._changed_at()
        self._table.refresh()
        self._versions_changed_at = changed_at
        self._load_failed = False
        self._refreshed_at = time.monotonic()
        if self._table.view is not before or not self._encoder.defined:
            self._use_schema()

    def _use_schema(self) -> None:
        """Take over the schema of the table."""
        encoder = self._schema.encoder_for(self._table.view)
        if encoder.defined:
            self._encoder = encoder

    def _show(self, through: int) -> None:
        """Bring the buffer to the table's version and the log up to ``through``."""
        table, buffer = self._table, self._buffer
        view, epoch, sequence = table.view, len(table.restores), table.sequence
        # A version that could not be made durable is rolled back: the log still holds its records.
        continues = (
            epoch == buffer.epoch
            and sequence >= self._shown_sequence
            and view.end >= buffer.view.end
        )
        taken = max(self._taken, sequence) if continues else sequence
        end = max(buffer.end, view.end) if continues else view.end
        chunks: list[tuple[Chunk, int]] = []
        producers: list[ProducerSequence] = []
        delays: list[Delay] = []
        encoder = self._encoder
        for rows in self._rows(taken, through):
            if rows.place != (epoch, end):
                raise OutOfStep(
                    f"the log continues at offset {rows.place[1]} (epoch {rows.place[0]}), but the "
                    f"table ends at offset {end} (epoch {epoch})"
                )
            chunk = rows.chunk()
            chunks.append((chunk, rows.arrival))
            producers += rows.producers
            due = due_of(rows.producers)
            if due is not None:
                delays.append((end, chunk.count, due))
            end += chunk.count
            encoder = self._including(encoder, chunk)
        self._taken = max(taken, through)
        self._shown_sequence, self._encoder = sequence, encoder
        is_new_version = view is not buffer.view
        if not chunks and not is_new_version and encoder is buffer.encoder:
            return
        stored = ProducerSequences(table.properties.get(WRITERS) if is_new_version else None)
        stored_delays = Delays(table.properties.get(DELAYS) if is_new_version else None)
        with self._schema.lock:
            if continues:
                buffer.show(view, epoch)
                buffer.remember(stored.all())
            else:
                buffer.replace(view, epoch)
                buffer.producers = stored
                buffer.delays = stored_delays
            # They have passed, or the log has them again: a table has only those before its end.
            buffer.delays.add_all([*stored_delays.pending(0), *delays])
            for chunk, arrival in chunks:
                buffer.accept([chunk], arrival)
            buffer.remember(producers)
            buffer.encoder = encoder
        if chunks or is_new_version:
            self._waiters.wake()

    def _including(self, encoder: RecordEncoder, chunk: Chunk) -> RecordEncoder:
        if chunk.schema.equals(encoder.schema):
            return encoder
        merged = merge(encoder.schema, chunk.schema, EVOLVING)
        if encoder.defined and merged.equals(encoder.schema):
            return encoder
        return RecordEncoder(merged, encoder.rules)

    def _rows(self, after: int, through: int) -> Iterator[LoggedRows | DeadLogRows]:
        if self._log is None:
            return
        bucket = self._log.bucket
        if self._follower is not None and after < through:
            yield from self._follower.rows(bucket, after, through)
        elif self._index is not None:
            self._index.check(bucket, after)
            encoder: RecordEncoder | None = None
            for block in self._index.blocks(bucket, after):
                if encoder is None or encoder.schema is not block.schema:
                    encoder = RecordEncoder(block.schema, EVOLVING)
                yield from stored_rows(block, bucket, encoder, self._index.folder)

    # Durability

    def sync_through(self, offset: int) -> int:
        """Make the records before ``offset`` durable; return up to which offset all are.

        A dead owner's log is synced when it is read. The version of the table is synced here: its
        owner may not have done so yet, and rows that were imported are in no log. Blocking.
        """
        if offset > self._buffer.end:
            self.refresh()
        for _ in range(_ATTEMPTS):
            if self._table.sync_followed():
                break
            self._load_failed = True  # its owner has just rolled it back, or cleaned it up
            self.refresh()
        else:
            raise StorageError(f"{self._folder} changes too often to be synced; try again")
        if offset > self._buffer.view.end and self._follower is not None:
            self._follower.sync_through(self._taken)
        return self._buffer.end if offset > self._buffer.view.end else self._buffer.view.end
