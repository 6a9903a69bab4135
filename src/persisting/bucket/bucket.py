"""The synchronous core of one bucket: the order of buffer, log, flush and read.

Write: check → (log →) acknowledge → buffer → one table commit with the last log sequence → let
the log go. Read: table rows, then buffer. Everything here may be called from any thread; the state
is guarded by a lock that is never held over disk, Lance or conversions.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from persisting import fs as filesystem
from persisting.bucket import exit_flush
from persisting.bucket.chunk import Chunk, Prepared, copy_row
from persisting.bucket.flush_batches import table_batches
from persisting.bucket.group_commit import GroupCommit, PendingPut, ProducerSequence
from persisting.bucket.maintenance import Maintenance
from persisting.bucket.producer_sequences import WRITERS, Writers
from persisting.bucket.shared_schema import SharedSchema
from persisting.bucket.snapshot import Snapshot
from persisting.bucket.snapshot_search import BufferView
from persisting.bucket.waiters import Waiters
from persisting.concurrency import timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.errors import BucketClosed, InvalidArgument, SchemaError, StorageError
from persisting.lock import BucketLock
from persisting.metrics import NO_METRICS, BucketMetrics
from persisting.options import BucketOptions
from persisting.records import RecordEncoder, Rules
from persisting.records.arrow import beyond_float, check_defaults, merge
from persisting.table import versions
from persisting.table.table import SIGNATURE, Table
from persisting.table.versions import Version
from persisting.table.view import TableView

log = logging.getLogger("persisting")

EVOLVING = Rules(evolving=True)
_RETRY_SECONDS = 1.0
FLUSH_PAUSE = 0.1
"""Seconds from one flush that the threshold started to the next."""

READER_REFRESH = 0.05
"""Seconds between looks for a new version by a reader without the lock."""


class Bucket:
    """The records of one bucket folder, opened for writing or for reading only."""

    def __init__(
        self, options: BucketOptions, rules: Rules, metrics: BucketMetrics = NO_METRICS
    ) -> None:
        self.options, self.rules, self.metrics = options, rules, metrics
        self.fs = filesystem.current()
        self._process = os.getpid()
        self.guard = threading.Lock()
        self.journal: GroupCommit | None = None
        self.closed = self._left = False
        self.flush_error: str | None = None
        self.flushes = 0
        self.frozen = False
        """Nothing is accepted for a moment: the bucket is being restored."""
        self._flush_turn = threading.Lock()
        self.table_turn = threading.Lock()
        """Held by whoever writes to the table. The guard is taken inside it, never around it."""
        self.waiters = Waiters()
        self._chunks: list[Chunk] = []
        self._buffered_rows = 0
        self._buffered_bytes = 0
        self._flushing = CoalescedTask(weak_callback(self, Bucket._flush))
        self._flush_due = False
        self._flush_waits = False
        self._flushed_at = 0.0
        self._large: set[str] = set()
        self._searched: set[str] = set()
        self._refreshed = 0.0
        self._lock: BucketLock | None = None
        self.upkeep = Maintenance(self)
        self.buffer_view = BufferView()
        self.table = Table(
            options.storage_path, self.fs, compression=options.compression, defaults=rules.defaults
        )
        self._marked: dict[ProducerSequence, PendingPut] = {}
        self._shared = (
            SharedSchema(Path(options.schema_path), self.fs) if options.schema_path else None
        )
        try:
            if options.read_only:
                self._open_for_reading()
            else:
                self._open_for_writing()
            self._view, self._epoch = self.table.view, len(self.table.restores)
            self.writers = Writers(self.table.properties.get(WRITERS))
            # A reader needs it not, and can look at what it is that is damaged.
            known = self._view.rows and not options.read_only
            self._last_arrival = self._view.arrival(self._view.end - 1) if known else 0
            self._shaper = self._acknowledged = self.shaper_of(self._view)
            self.check_defaults()
            self.metrics.table_is(len(self._view.sizes), self._view.start)
        except OSError as exc:
            self.abandon()
            raise StorageError(f"cannot open {options.storage_path}: {exc}") from exc
        except BaseException:
            self.abandon()
            raise

    # Opening and closing

    def shaper_of(self, view: TableView) -> RecordEncoder:
        """What records are checked against where this is the table, and its topic what it is."""
        schema, defined = view.schema, view.dataset is not None
        agreed = self._shared.read() if self._shared is not None else None
        if agreed is not None:
            schema, defined = merge(agreed, schema, EVOLVING), True
        return RecordEncoder(schema, self.rules, defined=defined)

    def check_defaults(self) -> None:
        """Raise where a default contradicts its field: no record could take it."""
        try:
            check_defaults(self._acknowledged.schema, self.rules)
        except SchemaError as exc:
            raise InvalidArgument(f"schema_defaults: {exc}; give it one of its type") from exc

    def _open_for_reading(self) -> None:
        folder = self.options.storage_path
        if not folder.is_dir():
            raise InvalidArgument(f"storage_path {folder} does not exist; there is nothing to read")
        self.table.refresh()

    def _open_for_writing(self) -> None:
        folder = self.options.storage_path
        try:
            self.fs.make_folder(folder)
            self.fs.sync_chain(folder)
        except OSError as exc:
            raise InvalidArgument(
                f"storage_path {folder} cannot be made: {exc.strerror}; check its permissions"
            ) from exc
        try:
            timer.begin_timer()
        except RuntimeError as exc:
            raise StorageError(f"cannot open {folder}: no thread for its timer ({exc})") from exc
        self._lock = BucketLock(folder, bucket=self.options.bucket_id)
        self._unlock = weakref.finalize(self, self._lock.release, clean=False)
        exit_flush.at_exit(self)
        if self._lock.left_clean:
            self.table.check_signature(self._lock.note)
        self.table.open(left_clean=self._lock.left_clean)
        self.table.set_compression()
        self.upkeep.begin()

    def abandon(self) -> None:
        """Let the lock go after a failed opening; as it was found, if nothing was written."""
        self.closed = self._left = True  # what came from the log stays there
        if self._lock is not None and self._unlock.detach() is not None:
            untouched = self._lock.left_clean and not self.table.touched
            kept = {k: v for k, v in self._lock.note.items() if k in SIGNATURE}
            self._lock.release(clean=untouched, **kept)

    def attach(self, journal: GroupCommit) -> None:
        """Log every record from now on; a bucket that is dropped closes the log's files."""
        self.journal = journal
        weakref.finalize(self, journal.close_files)
        journal.report()
        self._after_accepting(0)

    def begin_close(self) -> None:
        """Refuse further puts; :meth:`finish_close` or :meth:`cancel_close` follows."""
        self._check_process()
        with self.guard:
            self.closed = True

    def cancel_close(self) -> None:
        """The last flush failed: the bucket stays open, and the close can be tried again."""
        with self.guard:
            self.closed = False

    def finish_close(self) -> None:
        """Everything is flushed: give the files and the lock back."""
        self.waiters.wake()
        self.upkeep.end()
        self._left = True
        with self.table_turn:
            pass  # what was under way is done
        try:
            if self.journal is not None:
                self.journal.close()
        finally:
            self.metrics.remove()
            if self._lock is not None and self._unlock.detach() is not None:
                self._leave(self._lock)

    def _leave(self, lock: BucketLock) -> None:
        """Everything is durable: what fails here costs the next owner a check, and no more."""
        if not self.table.noted:  # the next owner trusts no index that nobody could vouch for
            lock.release(clean=False)
            return
        try:
            left = self.table.signature()
        except OSError as exc:
            log.warning(
                "cannot read the newest manifest of %s (%s): the next owner checks the bucket as "
                "after a crash",
                self.options.storage_path,
                exc.strerror or exc,
            )
            lock.release(clean=False)
            return
        try:
            lock.release(clean=True, **left)
        except StorageError as exc:
            log.warning("%s", exc)

    def __del__(self) -> None:
        """What was acknowledged without a log goes with the object: not in silence."""
        rows = getattr(self, "_buffered_rows", 0)
        if rows and self.journal is None and not self.closed and os.getpid() == self._process:
            log.warning(
                "%s was dropped without close(): %d records that were not flushed are lost",
                self.options.storage_path,
                rows,
            )

    def check_open(self) -> None:
        self._check_process()
        if self.closed:
            raise BucketClosed(
                f"the backend of {self.options.storage_path} is closed; open a new one"
            )

    def _check_process(self) -> None:
        """Two processes that both append to one log would destroy each other's records. Looked at
        before any lock: whoever held it at the fork is not here to give it back."""
        if os.getpid() != self._process:
            raise StorageError(
                f"the backend of {self.options.storage_path} was opened by process "
                f"{self._process}, of which this one is a fork; open it in the process that uses it"
            )

    def check_writable(self) -> None:
        self.check_open()
        if self.options.read_only:
            raise StorageError(
                f"{self.options.storage_path} is open with read_only=True and takes no records"
            )

    # Putting

    @property
    def shaper(self) -> RecordEncoder:
        """What the next records are checked against."""
        return self._shaper

    @property
    def is_full(self) -> bool:
        """Whether a put must wait for a flush, which also retries a failed one."""
        self._check_process()
        if self.flush_error is not None or self._buffered_bytes > self.options.max_buffer_bytes:
            return True
        if self.frozen:
            return True
        return self.journal is not None and self.journal.is_full

    def add_row(self, record: Any) -> bool:
        """Accept a plain record; False: it needs :func:`prepare` and :meth:`admit`."""
        shaper = self._shaper
        copied = copy_row(shaper, record)
        if copied is None:
            return False
        with self.guard:
            self.check_writable()
            if self._shaper is not shaper or self.frozen:
                return False
            tail = self._chunks[-1] if self._chunks else None
            if tail is None or not tail.can_take(shaper):
                tail = Chunk(shaper, rows=[])
                self._chunks.append(tail)
                self._acknowledged = shaper
            self._last_arrival = max(self._last_arrival, _now())
            tail.add(*copied, self._last_arrival)
            self._buffered_rows += 1
            self._buffered_bytes += copied[1]
        self._after_accepting(1)
        return True

    def admit(self, prepared: Prepared, mark: ProducerSequence | None = None) -> bool:
        """Accept prepared records, all of them; False if the schema has changed since.

        Records with a mark that was stored before are accepted without storing them again.
        """
        with self.guard:
            self.check_writable()
            if mark is not None and self.writers.has(mark):
                return True
            if self._shaper is not prepared.base or self.frozen:
                return False
            self._check_widening(prepared)
            self._shaper = prepared.shaper
            self._accept(prepared.chunks, _now())
            self.writers.remember([mark] if mark is not None else [])
        self._after_accepting(prepared.rows)
        return True

    def reserve_row(self, record: Any) -> PendingPut | None:
        """Queue a plain record for the log; None: it needs :func:`prepare` and :meth:`reserve`."""
        assert self.journal is not None
        shaper = self._shaper
        copied = copy_row(shaper, record)
        if copied is None:
            return None
        entry = PendingPut([Chunk(shaper, rows=[copied[0]], nbytes=copied[1])])
        with self.guard:
            self.check_writable()
            if self._shaper is not shaper or self.frozen:
                return None
            self.journal.enqueue(entry)
        self.journal.start()
        return entry

    def reserve(
        self, prepared: Prepared, mark: ProducerSequence | None = None
    ) -> PendingPut | None:
        """Queue prepared records for the log; None if the schema has changed since.

        Records that come later are checked against them at once; they count, and can be read, when
        the log has acknowledged them. A mark that waits already gets the entry it waits in.
        """
        assert self.journal is not None
        with self.guard:
            self.check_writable()
            if mark is not None:
                waiting = self._marked.get(mark)
                if waiting is not None:
                    return waiting
                if self.writers.has(mark):
                    return PendingPut.settled()
            if self._shaper is not prepared.base or self.frozen:
                return None
            entry = PendingPut(prepared.chunks, mark)
            self._check_widening(prepared)
            self._shaper = prepared.shaper
            if mark is not None:
                self._marked[mark] = entry
            self.journal.enqueue(entry)
        self.journal.start()
        return entry

    def acknowledge(self, chunks: list[Chunk], arrival: int, marks: list[ProducerSequence]) -> None:
        """The log holds these records: they are accepted, in this order."""
        with self.guard:
            before = self._acknowledged
            self._accept(chunks, arrival)
            if self._shaper is before:
                # Later puts failed and took the schema back, while these were on their way.
                self._shaper = self._acknowledged
            self.writers.remember(marks)
            for mark in marks:
                self._marked.pop(mark, None)
        self._after_accepting(sum(chunk.count for chunk in chunks))

    def acknowledge_recovered(self, chunk: Chunk) -> None:
        """Accept records from a left-over log, and make room for more where it is long.

        The table may know a later schema than the record's: a flush may have died after it had
        changed the schema and before it had added the rows.
        """
        if chunk.shaper is not self._acknowledged:
            schema = merge(self._acknowledged.schema, chunk.schema, EVOLVING)
            if not schema.equals(chunk.schema):
                chunk.shaper = RecordEncoder(schema, self.rules)
        self._shaper = chunk.shaper
        self._accept([chunk], chunk.arrival)
        if self._buffered_bytes > self.options.max_buffer_bytes:
            self._flush_once()

    def flush_recovered(self) -> None:
        """Bring what a left-over log held into the table, while opening."""
        self._flush_once()

    def reject(self, marks: list[ProducerSequence]) -> None:
        """What was reserved and not acknowledged never was. Called under the guard."""
        self._shaper = self._acknowledged
        for mark in marks:
            self._marked.pop(mark, None)

    def _accept(self, chunks: list[Chunk], arrival: int) -> None:
        before, self._last_arrival = self._last_arrival, max(self._last_arrival, arrival)
        for chunk in chunks:
            chunk.arrival = self._last_arrival
            if chunk.times is not None:  # recovered: the clock may have been behind
                chunk.times = np.maximum(chunk.times, before)
            chunk.seal()
            self._buffered_rows += chunk.count
            self._buffered_bytes += chunk.nbytes
        if chunks:
            self._chunks += chunks
            self._acknowledged = chunks[-1].shaper

    def _after_accepting(self, rows: int) -> None:
        self.metrics.accepted(rows, self._buffered_rows)
        self.waiters.wake()
        if self._buffered_rows >= self.options.flush_threshold or (
            self.journal is not None and self.journal.wants_flush
        ):
            self._flush_soon()
        elif not self._flush_due and self.options.flush_interval is not None:
            self._flush_due = True
            timer.after(self.options.flush_interval, weak_callback(self, Bucket._flush_aged))

    def _flush_soon(self) -> None:
        """Flush at the threshold, but not at once after the last flush: many small commits cost
        more than one, and the records that wait are no less safe."""
        if self._flushing.pending:
            return
        rest = self._flushed_at + FLUSH_PAUSE - time.monotonic()
        if self._flushing.active:
            rest = FLUSH_PAUSE  # and longer: its end is yet to come
        if rest <= 0 or self._buffered_bytes > self.options.max_buffer_bytes // 4:
            self.request_flush()
        elif not self._flush_waits:
            self._flush_waits = True
            timer.after(rest, weak_callback(self, Bucket._flush_after_pause))

    def _flush_after_pause(self) -> None:
        self._flush_waits = False
        if self._buffered_rows and not self.closed:
            self._flush_soon()

    def _flush_aged(self) -> None:
        self._flush_due = False
        if self._buffered_rows and not self.closed:
            self.request_flush()

    # Changing the schema

    def agree(self, prepared: Prepared) -> bool:
        """Have the topic agree to a changed schema; False if it has a further one by now."""
        if self._shared is None:
            return True
        schema = self._shared.agree(prepared.shaper.schema, prepared.large, self.rules)
        if schema.equals(prepared.shaper.schema):
            return True
        self.adopt(schema)
        return False

    def adopt(self, schema: pa.Schema) -> None:
        """Check later records against what the topic has agreed on."""
        with self.guard:
            merged = merge(self._shaper.schema, schema, EVOLVING)
            self._shaper = RecordEncoder(merged, self.rules)

    def know(self, schema: pa.Schema) -> None:
        """The table has records of this schema, which came past the buffer."""
        with self.guard:
            merged = merge(self._acknowledged.schema, schema, EVOLVING)
            self._acknowledged = RecordEncoder(merged, self.rules)
            self._shaper = RecordEncoder(merge(self._shaper.schema, merged, EVOLVING), self.rules)

    def restored(self, shaper: RecordEncoder) -> None:
        """The table is an older one again: with its fields, and the marks of its writers."""
        with self.guard:
            self._view, self._epoch = self.table.view, len(self.table.restores)
            self._shaper = self._acknowledged = shaper
            self._large, self._searched = set(), set()
            self.writers = Writers(self.table.properties.get(WRITERS))

    def needs_agreement(self, prepared: Prepared) -> bool:
        """Whether the topic must be asked before these records are accepted."""
        if self._shared is None:
            return False
        return prepared.shaper is not prepared.base or not prepared.large <= self._large

    def learn_large(self, names: list[str]) -> None:
        """Find out whether stored whole numbers of these fields could become floats."""
        while unknown := [name for name in names if name not in self._searched]:
            snapshot, large = self.snapshot(), set()
            # A field that is still on its way to the log is not there, and was looked at.
            stored = [name for name in unknown if name in snapshot.schema.names]
            for batch in snapshot.batches(snapshot.start, None, stored) if stored else ():
                large |= {n for n in stored if beyond_float(batch.column(n))}
            with self.guard:
                if snapshot.epoch == self._epoch:  # else a restore came between
                    self._large |= large
                    self._searched.update(unknown)

    def _check_widening(self, prepared: Prepared) -> None:
        """Raise if a stored whole number would change in a field that becomes float."""
        for name in prepared.widened:
            if name in self._large:
                raise SchemaError(
                    f"field {name!r} cannot change from int to float: it holds whole numbers "
                    "beyond 2**53, which a float cannot keep; put the floats into another field"
                )
        self._large |= prepared.large
        for name in prepared.unsearchable:
            log.warning(
                "field %r of %s held vectors of one length and now takes lists of any: it can no "
                "longer be searched",
                name,
                self.options.storage_path,
            )

    # Reading

    @property
    def end(self) -> int:
        """The offset after the last acknowledged record."""
        self._check_process()
        with self.guard:
            return self._view.end + self._buffered_rows

    @property
    def start(self) -> int:
        """The first offset that is left."""
        return self._view.start

    @property
    def epoch(self) -> int:
        """How often the bucket was restored to an older version."""
        return self._epoch

    @property
    def counts(self) -> tuple[int, int]:
        """(rows in the table, rows in the buffer), of one moment."""
        self._check_process()
        with self.guard:
            return self._view.rows, self._buffered_rows

    def snapshot(self) -> Snapshot:
        """All acknowledged records as they stand now."""
        self.check_open()
        return self.snapshot_of_any()

    def snapshot_of_any(self) -> Snapshot:
        """The same, also of a closed bucket: to count, not to read."""
        with self.guard:
            chunks = [(chunk, chunk.count) for chunk in self._chunks]
            schema = self._acknowledged.schema
            defaults = self.rules.defaults or {}
            return Snapshot(self._view, chunks, schema, defaults, self._epoch)

    def at(self, version: Version) -> Snapshot:
        """The records of an older version."""
        self.check_open()
        dataset = self.table.view.dataset
        if dataset is not None:
            view = self.table.at(versions.resolve(dataset, version))
        elif version == versions.NOTHING or isinstance(version, dt.datetime):
            view = self.table.at(versions.NOTHING)
        else:
            raise InvalidArgument(f"{self.options.storage_path} has no version {version!r} yet")
        return Snapshot(view, [], view.schema, self.rules.defaults or {}, self._epoch)

    def known_schema(self) -> pa.Schema:
        """All fields of the bucket and of its topic."""
        schema = self._acknowledged.schema
        agreed = self._shared.read() if self._shared is not None else None
        return schema if agreed is None else merge(schema, agreed, EVOLVING)

    def look_again(self) -> None:
        """Have the next :meth:`refresh` look, however short ago the last one was."""
        self._refreshed = 0.0

    def refresh(self) -> None:
        """For a reader without the lock: look for a new version, at most every 50 ms."""
        if self.options.read_only and time.monotonic() - self._refreshed > READER_REFRESH:
            with self.table_turn:  # another thread may just be at it
                if time.monotonic() - self._refreshed <= READER_REFRESH:
                    return
                self.table.refresh()
                shaper = self.shaper_of(self.table.view)
                with self.guard:
                    self._view, self._epoch = self.table.view, len(self.table.restores)
                    self._shaper = self._acknowledged = shaper
                self._refreshed = time.monotonic()

    async def wait_beyond(self, offset: int, epoch: int | None = None) -> None:
        """Return when there may be records beyond ``offset``, the epoch is another, or the bucket
        is closed."""
        if self.options.read_only:
            await asyncio.sleep(READER_REFRESH)
            return
        with self.waiters.waiting() as waiter:
            if self.end <= offset and not self.closed and epoch in (None, self._epoch):
                await waiter

    # Flushing

    def settle(self) -> None:
        """The program ends without :meth:`finish_close`: keep what was acknowledged, at least."""
        if os.getpid() != self._process or self.closed or not self._unlock.alive:
            return
        if self._lock is None or not self._lock.in_place:
            return
        try:
            if self.journal is None or not self.journal.settle():
                with self._flush_turn:
                    self._flush_once()
        except Exception as exc:
            log.error(
                "%s was not closed, and %d acknowledged records in it are lost: %s",
                self.options.storage_path,
                self._buffered_rows,
                exc,
            )

    def request_flush(self) -> Future[None]:
        """A future of a flush that takes everything acknowledged before this call."""
        return self._flushing.request()

    def flush_now(self) -> None:
        """Flush in this thread."""
        self._flush()

    def _flush(self) -> None:
        started = time.perf_counter()
        try:
            with self._flush_turn:
                flushed = not self._left and self._flush_once()
        except BaseException as exc:
            self.flush_error = str(exc) or type(exc).__name__
            self.metrics.flush_failed()
            log.error("flush of %s failed: %s", self.options.storage_path, exc)
            timer.after(_RETRY_SECONDS, weak_callback(self, Bucket._retry_flush))
            raise
        self.flush_error = None
        self._flushed_at = time.monotonic()
        if flushed:
            self.flushes += 1
            self.metrics.flushed(time.perf_counter() - started, self._buffered_rows)
            self.upkeep.look()

    def _retry_flush(self) -> None:
        if self.flush_error is not None and not self.closed:
            self.request_flush()

    def _flush_once(self) -> bool:
        """Bring the buffer into the table, then let its part of the log go."""
        log_failed = self.journal is not None and self.journal.failed
        if self.journal is not None and log_failed:
            # No further append succeeds; once the last one is acknowledged, all is in the buffer.
            self.journal.wait_idle()
        with self.guard:
            chunks, schema = list(self._chunks), self._acknowledged.schema
            writers = self.writers.encode()
            if chunks:
                chunks[-1].seal()
        if chunks:
            sequence = max(self.table.sequence, chunks[-1].sequence)
            if self.journal is not None:
                self.journal.seal()
                if log_failed:
                    # Also past the frames that were written and never acknowledged.
                    sequence = max(sequence, self.journal.last_sequence)
            batches = table_batches(chunks, schema, self.rules)
            beside = {WRITERS: writers} if writers else {}
            with self.table_turn:
                self.table.append(batches, schema, sequence, beside)
                self.adopt_table(len(chunks))
        if self.journal is not None:
            if log_failed:
                self.journal.restart(self.table.sequence)
            else:
                self.journal.release(self.table.sequence)
        return bool(chunks)

    def adopt_table(self, flushed: int = 0) -> None:
        """Read from the table's newest version from now on, which holds the first chunks."""
        chunks = self._chunks[:flushed]
        with self.guard:
            self._view, self._epoch = self.table.view, len(self.table.restores)
            del self._chunks[:flushed]
            self._buffered_rows -= sum(chunk.count for chunk in chunks)
            self._buffered_bytes -= sum(chunk.nbytes for chunk in chunks)
        self.metrics.table_is(len(self._view.sizes), self._view.start)

    @contextmanager
    def exclusive_table(self) -> Iterator[Table]:
        """Hold the table for a change; readers of the bucket see the result on exit."""
        with self.table_turn:
            try:
                yield self.table
            finally:
                self.adopt_table()

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """For a moment everything acknowledged is in the table, and nothing more is accepted."""
        with self.guard:
            self.check_writable()
            if self.frozen:
                raise StorageError(f"{self.options.storage_path} is just being restored")
            self.frozen = True
        try:
            if self.journal is not None:
                self.journal.write_now()
            # Not the shared job: a flush that waits for its turn there may be behind this one.
            with self._flush_turn:
                self._flush_once()
            yield
        finally:
            with self.guard:
                self.frozen = False
            self.waiters.wake()


def _now() -> int:
    return time.time_ns() // 1000
