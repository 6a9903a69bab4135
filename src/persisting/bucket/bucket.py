"""The synchronous core of one bucket: the order of buffer, log, flush and read.

Write: check → (log →) acknowledge → buffer → one table commit with the last log sequence → release
the log. Read: table rows, then buffer. Everything here may be called from any thread. The state is
guarded by a lock that is never held during I/O, calls of Lance or conversions.

Lock order: flush, then table or the log of group commit, then state.
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
from persisting.bucket.group_commit import GroupCommit, PendingPut
from persisting.bucket.maintenance import Maintenance
from persisting.bucket.producer_sequences import WRITERS, ProducerSequence, ProducerSequences
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
from persisting.table.repair import SIGNATURE
from persisting.table.table import Table
from persisting.table.versions import Version
from persisting.table.view import TableView

log = logging.getLogger("persisting")

EVOLVING = Rules(evolving=True)
_RETRY_SECONDS = 1.0
FLUSH_PAUSE = 0.1
"""Minimum seconds between two flushes that the threshold starts."""

READER_REFRESH = 0.05
"""Seconds between two checks for a new version by a reader without the lock."""


class Bucket:
    """The records of one bucket folder, opened for writing or for reading only."""

    def __init__(
        self, options: BucketOptions, rules: Rules, metrics: BucketMetrics = NO_METRICS
    ) -> None:
        self.options, self.rules, self.metrics = options, rules, metrics
        self.fs = filesystem.current()
        self._process = os.getpid()
        self.state_lock = threading.Lock()
        self.group_commit: GroupCommit | None = None
        self.closed = self._released = False
        self.flush_error: str | None = None
        self.flushes = 0
        self.frozen = False
        """Puts wait while the bucket is being restored or files are imported."""
        self._flush_lock = threading.Lock()
        self.table_lock = threading.Lock()
        """Held while the table is changed. Take ``state_lock`` inside it, never around it."""
        self.waiters = Waiters()
        self._chunks: list[Chunk] = []
        self._buffered_rows = 0
        self._buffered_bytes = 0
        self._flushing = CoalescedTask(weak_callback(self, Bucket._flush))
        self._interval_flush_due = False
        self._paused_flush_due = False
        self._flushed_at = 0.0
        self._large_int_fields: set[str] = set()
        self._scanned_fields: set[str] = set()
        self._refreshed_at = 0.0
        self._lock: BucketLock | None = None
        self.maintenance = Maintenance(self)
        self.buffer_view = BufferView()
        self.table = Table(
            options.storage_path, self.fs, compression=options.compression, defaults=rules.defaults
        )
        self._pending_by_producer: dict[ProducerSequence, PendingPut] = {}
        self._shared_schema = (
            SharedSchema(Path(options.schema_path), self.fs) if options.schema_path else None
        )
        try:
            if options.read_only:
                self._open_for_reading()
            else:
                self._open_for_writing()
            self._view, self._epoch = self.table.view, len(self.table.restores)
            self.producers = ProducerSequences(self.table.properties.get(WRITERS))
            # Readers skip this read, so that a damaged table can still be inspected.
            has_last = self._view.rows and not options.read_only
            self._last_arrival = self._view.arrival(self._view.end - 1) if has_last else 0
            self._encoder = self._acknowledged = self.encoder_for(self._view)
            self.check_defaults()
            self.metrics.table_is(len(self._view.sizes), self._view.start)
        except OSError as exc:
            self.abandon()
            raise StorageError(f"cannot open {options.storage_path}: {exc}") from exc
        except BaseException:
            self.abandon()
            raise

    # Opening and closing

    def encoder_for(self, view: TableView) -> RecordEncoder:
        """Return the encoder that checks records against a table and the schema of its topic."""
        schema, defined = view.schema, view.dataset is not None
        shared = self._shared_schema.read() if self._shared_schema is not None else None
        if shared is not None:
            schema, defined = merge(shared, schema, EVOLVING), True
        return RecordEncoder(schema, self.rules, defined=defined)

    def check_defaults(self) -> None:
        """Raise if a default does not have the type of its field."""
        try:
            check_defaults(self._acknowledged.schema, self.rules)
        except SchemaError as exc:
            raise InvalidArgument(f"schema_defaults: {exc}; give one of the field's type") from exc

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
                f"storage_path {folder} cannot be created: {exc.strerror}; check its permissions"
            ) from exc
        try:
            timer.start_timer()
        except RuntimeError as exc:
            raise StorageError(f"cannot open {folder}: no thread for the timer ({exc})") from exc
        self._lock = BucketLock(folder, bucket=self.options.bucket_id)
        self._unlock = weakref.finalize(self, self._lock.release, clean=False)
        exit_flush.register(self)
        if self._lock.left_clean:
            self.table.check_signature(self._lock.note)
        self.table.open(left_clean=self._lock.left_clean)
        self.table.set_compression()
        self.maintenance.start()

    def abandon(self) -> None:
        """Release the lock after a failed opening, still marked clean if nothing was written."""
        self.closed = self._released = True  # recovered records stay in the log
        if self._lock is not None and self._unlock.detach() is not None:
            untouched = self._lock.left_clean and not self.table.touched
            signature = {k: v for k, v in self._lock.note.items() if k in SIGNATURE}
            self._lock.release(clean=untouched, **signature)

    def attach(self, group_commit: GroupCommit) -> None:
        """Log every record from now on; a dropped bucket closes the log's files."""
        self.group_commit = group_commit
        weakref.finalize(self, group_commit.close_files)
        group_commit.report()
        self._after_accepting(0)

    def begin_close(self) -> None:
        """Refuse further puts; :meth:`finish_close` or :meth:`cancel_close` follows."""
        self._check_process()
        with self.state_lock:
            self.closed = True

    def cancel_close(self) -> None:
        """Stay open because the last flush failed; the close can be retried."""
        with self.state_lock:
            self.closed = False

    def finish_close(self) -> None:
        """Release the files and the lock; everything is flushed."""
        self.waiters.wake()
        self.maintenance.stop()
        self._released = True
        with self.table_lock:
            pass  # wait for a running change of the table
        try:
            if self.group_commit is not None:
                self.group_commit.close()
        finally:
            self.metrics.remove()
            if self._lock is not None and self._unlock.detach() is not None:
                self._release_lock(self._lock)

    def _release_lock(self, lock: BucketLock) -> None:
        """Release the lock of a flushed bucket.

        Everything is durable: a failure here only makes the next owner check the bucket.
        """
        if not self.table.committer.checksums_recorded:
            # The next owner drops the indexes whose checksums are not recorded.
            lock.release(clean=False)
            return
        try:
            signature = self.table.signature()
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
            lock.release(clean=True, **signature)
        except StorageError as exc:
            log.warning("%s", exc)

    def __del__(self) -> None:
        """Warn if acknowledged records without a log are lost with this object."""
        rows = getattr(self, "_buffered_rows", 0)
        if rows and self.group_commit is None and not self.closed and os.getpid() == self._process:
            log.warning(
                "%s was dropped without close(): %d unflushed records are lost",
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
        """Raise in a fork: two processes that append to one log would destroy each other's records.

        Checked before taking any lock: a lock that was held at the fork is never released here.
        """
        if os.getpid() != self._process:
            raise StorageError(
                f"the backend of {self.options.storage_path} was opened by process "
                f"{self._process}, and this process is a fork of it; open a backend in the process "
                "that uses it"
            )

    def check_writable(self) -> None:
        self.check_open()
        if self.options.read_only:
            raise StorageError(
                f"{self.options.storage_path} is open with read_only=True and cannot be changed"
            )

    # Putting

    @property
    def encoder(self) -> RecordEncoder:
        """The encoder that checks the next records."""
        return self._encoder

    @property
    def is_full(self) -> bool:
        """Whether a put must wait: for a flush, a retry of a failed one, or a restore."""
        self._check_process()
        if self.flush_error is not None or self._buffered_bytes > self.options.max_buffer_bytes:
            return True
        if self.frozen:
            return True
        return self.group_commit is not None and self.group_commit.is_full

    def add_row(self, record: Any) -> bool:
        """Accept a plain record; False if it needs :func:`prepare` and :meth:`add_prepared`."""
        encoder = self._encoder
        copied = copy_row(encoder, record)
        if copied is None:
            return False
        with self.state_lock:
            self.check_writable()
            if self._encoder is not encoder or self.frozen:
                return False
            tail = self._chunks[-1] if self._chunks else None
            if tail is None or not tail.can_take(encoder):
                tail = Chunk(encoder, rows=[])
                self._chunks.append(tail)
                self._acknowledged = encoder
            self._last_arrival = max(self._last_arrival, _now())
            tail.add(*copied, self._last_arrival)
            self._buffered_rows += 1
            self._buffered_bytes += copied[1]
        self._after_accepting(1)
        return True

    def add_prepared(self, prepared: Prepared, producer: ProducerSequence | None = None) -> bool:
        """Accept all prepared records; False if the schema has changed since they were prepared.

        Records whose producer sequence is stored already are not stored again.
        """
        with self.state_lock:
            self.check_writable()
            if producer is not None and self.producers.has(producer):
                return True
            if self._encoder is not prepared.base or self.frozen:
                return False
            self._check_widening(prepared)
            self._encoder = prepared.encoder
            self._accept(prepared.chunks, _now())
            self.producers.remember([producer] if producer is not None else [])
        self._after_accepting(prepared.rows)
        return True

    def enqueue_row(self, record: Any) -> PendingPut | None:
        """Queue a plain record for the log.

        None if it needs :func:`prepare` and :meth:`enqueue_prepared`.
        """
        assert self.group_commit is not None
        encoder = self._encoder
        copied = copy_row(encoder, record)
        if copied is None:
            return None
        pending = PendingPut([Chunk(encoder, rows=[copied[0]], nbytes=copied[1])])
        with self.state_lock:
            self.check_writable()
            if self._encoder is not encoder or self.frozen:
                return None
            self.group_commit.enqueue(pending)
        self.group_commit.start()
        return pending

    def enqueue_prepared(
        self, prepared: Prepared, producer: ProducerSequence | None = None
    ) -> PendingPut | None:
        """Queue prepared records for the log; None if the schema has changed since.

        Later records are checked against their schema at once. They are counted and can be read
        when the log has acknowledged them. A producer sequence that is queued already returns the
        put that waits.
        """
        assert self.group_commit is not None
        with self.state_lock:
            self.check_writable()
            if producer is not None:
                queued = self._pending_by_producer.get(producer)
                if queued is not None:
                    return queued
                if self.producers.has(producer):
                    return PendingPut.already_stored()
            if self._encoder is not prepared.base or self.frozen:
                return None
            pending = PendingPut(prepared.chunks, producer)
            self._check_widening(prepared)
            self._encoder = prepared.encoder
            if producer is not None:
                self._pending_by_producer[producer] = pending
            self.group_commit.enqueue(pending)
        self.group_commit.start()
        return pending

    def acknowledge(
        self, chunks: list[Chunk], arrival: int, producers: list[ProducerSequence]
    ) -> None:
        """Accept records that the log holds, in this order."""
        with self.state_lock:
            before = self._acknowledged
            self._accept(chunks, arrival)
            if self._encoder is before:
                # Later puts failed and rolled the schema back while these were written.
                self._encoder = self._acknowledged
            self.producers.remember(producers)
            for producer in producers:
                self._pending_by_producer.pop(producer, None)
        self._after_accepting(sum(chunk.count for chunk in chunks))

    def acknowledge_recovered(self, chunk: Chunk) -> None:
        """Accept records of a left-over log, and flush when the buffer is full.

        The table may have a later schema than the records: a flush may have died after it had
        changed the schema and before it had added the rows.
        """
        if chunk.encoder is not self._acknowledged:
            schema = merge(self._acknowledged.schema, chunk.schema, EVOLVING)
            if not schema.equals(chunk.schema):
                chunk.encoder = RecordEncoder(schema, self.rules)
        self._encoder = chunk.encoder
        self._accept([chunk], chunk.arrival)
        if self._buffered_bytes > self.options.max_buffer_bytes:
            self._flush_once()

    def flush_recovered(self) -> None:
        """Flush the records of a left-over log to the table while opening."""
        self._flush_once()

    def roll_back_pending(self, producers: list[ProducerSequence]) -> None:
        """Roll back puts that were queued and not acknowledged. Call with ``state_lock`` held."""
        self._encoder = self._acknowledged
        for producer in producers:
            self._pending_by_producer.pop(producer, None)

    def _accept(self, chunks: list[Chunk], arrival: int) -> None:
        before, self._last_arrival = self._last_arrival, max(self._last_arrival, arrival)
        for chunk in chunks:
            chunk.arrival = self._last_arrival
            if chunk.times is not None:  # recovered: the clock may have gone back since
                chunk.times = np.maximum(chunk.times, before)
            chunk.seal()
            self._buffered_rows += chunk.count
            self._buffered_bytes += chunk.nbytes
        if chunks:
            self._chunks += chunks
            self._acknowledged = chunks[-1].encoder

    def _after_accepting(self, rows: int) -> None:
        self.metrics.accepted(rows, self._buffered_rows)
        self.waiters.wake()
        if self._buffered_rows >= self.options.flush_threshold or (
            self.group_commit is not None and self.group_commit.wants_flush
        ):
            self._flush_soon()
        elif not self._interval_flush_due and self.options.flush_interval is not None:
            self._interval_flush_due = True
            timer.after(
                self.options.flush_interval, weak_callback(self, Bucket._flush_after_interval)
            )

    def _flush_soon(self) -> None:
        """Flush at the threshold, but not right after the last flush.

        Many small commits cost more than one, and the records that wait are no less safe.
        """
        if self._flushing.pending:
            return
        pause = self._flushed_at + FLUSH_PAUSE - time.monotonic()
        if self._flushing.active:
            pause = FLUSH_PAUSE  # a flush is running: the pause begins with its end
        if pause <= 0 or self._buffered_bytes > self.options.max_buffer_bytes // 4:
            self.request_flush()
        elif not self._paused_flush_due:
            self._paused_flush_due = True
            timer.after(pause, weak_callback(self, Bucket._flush_after_pause))

    def _flush_after_pause(self) -> None:
        self._paused_flush_due = False
        if self._buffered_rows and not self.closed:
            self._flush_soon()

    def _flush_after_interval(self) -> None:
        self._interval_flush_due = False
        if self._buffered_rows and not self.closed:
            self.request_flush()

    # Changing the schema

    def propose_schema(self, prepared: Prepared) -> bool:
        """Propose a changed schema to the topic; False if the topic's schema has more by now."""
        if self._shared_schema is None:
            return True
        schema = self._shared_schema.propose(prepared.encoder.schema, prepared.large, self.rules)
        if schema.equals(prepared.encoder.schema):
            return True
        self._adopt_topic_schema(schema)
        return False

    def _adopt_topic_schema(self, schema: pa.Schema) -> None:
        """Check later records against the topic's schema."""
        with self.state_lock:
            merged = merge(self._encoder.schema, schema, EVOLVING)
            self._encoder = RecordEncoder(merged, self.rules)

    def merge_table_schema(self, schema: pa.Schema) -> None:
        """Merge the schema of records that were written to the table past the buffer."""
        with self.state_lock:
            merged = merge(self._acknowledged.schema, schema, EVOLVING)
            self._acknowledged = RecordEncoder(merged, self.rules)
            self._encoder = RecordEncoder(merge(self._encoder.schema, merged, EVOLVING), self.rules)

    def restored(self, encoder: RecordEncoder) -> None:
        """Take over the schema and the producer sequences of the restored table."""
        with self.state_lock:
            self._view, self._epoch = self.table.view, len(self.table.restores)
            self._encoder = self._acknowledged = encoder
            self._large_int_fields, self._scanned_fields = set(), set()
            self.producers = ProducerSequences(self.table.properties.get(WRITERS))

    def must_propose_schema(self, prepared: Prepared) -> bool:
        """Whether the topic must agree before these records are accepted."""
        if self._shared_schema is None:
            return False
        return prepared.encoder is not prepared.base or not prepared.large <= self._large_int_fields

    def scan_large_ints(self, names: list[str]) -> None:
        """Scan stored records for whole numbers in these fields that a float cannot represent."""
        while unknown := [name for name in names if name not in self._scanned_fields]:
            snapshot, large = self.snapshot(), set()
            # A field whose first record is still queued for the log is not in the snapshot; its
            # values were checked when that put was prepared.
            stored = [name for name in unknown if name in snapshot.schema.names]
            for batch in snapshot.batches(snapshot.start, None, stored) if stored else ():
                large |= {n for n in stored if beyond_float(batch.column(n))}
            with self.state_lock:
                if snapshot.epoch == self._epoch:  # else a restore replaced the records: repeat
                    self._large_int_fields |= large
                    self._scanned_fields.update(unknown)

    def _check_widening(self, prepared: Prepared) -> None:
        """Raise if a field becomes float and holds whole numbers that a float cannot represent."""
        for name in prepared.widened:
            if name in self._large_int_fields:
                raise SchemaError(
                    f"field {name!r} cannot change from int to float: it holds whole numbers "
                    "beyond 2**53, which a float cannot hold; put the floats into another field"
                )
        self._large_int_fields |= prepared.large
        for name in prepared.unsearchable:
            log.warning(
                "field %r of %s held vectors of one length and now takes lists of any length: it "
                "can no longer be searched",
                name,
                self.options.storage_path,
            )

    # Reading

    @property
    def end(self) -> int:
        """The offset after the last acknowledged record."""
        self._check_process()
        with self.state_lock:
            return self._view.end + self._buffered_rows

    @property
    def epoch(self) -> int:
        """How often the bucket was restored to an older version."""
        return self._epoch

    @property
    def counts(self) -> tuple[int, int]:
        """(rows in the table, rows in the buffer) at one point in time."""
        self._check_process()
        with self.state_lock:
            return self._view.rows, self._buffered_rows

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all acknowledged records."""
        self.check_open()
        return self.snapshot_even_if_closed()

    def snapshot_even_if_closed(self) -> Snapshot:
        """As :meth:`snapshot`; of a closed bucket it can be counted, not read."""
        with self.state_lock:
            chunks = [(chunk, chunk.count) for chunk in self._chunks]
            schema = self._acknowledged.schema
            defaults = self.rules.defaults or {}
            return Snapshot(self._view, chunks, schema, defaults, self._epoch)

    def at(self, version: Version) -> Snapshot:
        """Return a snapshot of an older version."""
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
        """Return all fields of the bucket and of its topic."""
        schema = self._acknowledged.schema
        shared = self._shared_schema.read() if self._shared_schema is not None else None
        return schema if shared is None else merge(schema, shared, EVOLVING)

    def expire_view(self) -> None:
        """Make the next :meth:`refresh` check for a new version, however recent the last was."""
        self._refreshed_at = 0.0

    def refresh(self) -> None:
        """Check for a new version if this is a reader without the lock, at most every 50 ms."""
        if self.options.read_only and time.monotonic() - self._refreshed_at > READER_REFRESH:
            with self.table_lock:
                if time.monotonic() - self._refreshed_at <= READER_REFRESH:
                    return  # another thread has just refreshed
                self.table.refresh()
                encoder = self.encoder_for(self.table.view)
                with self.state_lock:
                    self._view, self._epoch = self.table.view, len(self.table.restores)
                    self._encoder = self._acknowledged = encoder
                self._refreshed_at = time.monotonic()

    async def wait_beyond(self, offset: int, epoch: int | None = None) -> None:
        """Return when there may be records beyond ``offset``, the epoch is not ``epoch``, or the
        bucket is closed."""
        if self.options.read_only:
            await asyncio.sleep(READER_REFRESH)
            return
        with self.waiters.waiting() as waiter:
            if self.end <= offset and not self.closed and epoch in (None, self._epoch):
                await waiter

    # Flushing

    def flush_at_exit(self) -> None:
        """Make acknowledged records durable when the process ends without a close."""
        if os.getpid() != self._process or self.closed or not self._unlock.alive:
            return
        if self._lock is None or not self._lock.in_place:
            return
        try:
            if self.group_commit is None or not self.group_commit.sync_at_exit():
                with self._flush_lock:
                    self._flush_once()
        except Exception as exc:
            log.error(
                "%s was not closed, and %d acknowledged records are lost: %s",
                self.options.storage_path,
                self._buffered_rows,
                exc,
            )

    def request_flush(self) -> Future[None]:
        """Return the future of a flush of everything acknowledged before this call."""
        return self._flushing.request()

    def flush_now(self) -> None:
        """Flush in this thread."""
        self._flush()

    def _flush(self) -> None:
        started = time.perf_counter()
        try:
            with self._flush_lock:
                flushed = not self._released and self._flush_once()
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
            self.maintenance.schedule_if_needed()

    def _retry_flush(self) -> None:
        if self.flush_error is not None and not self.closed:
            self.request_flush()

    def _flush_once(self) -> bool:
        """Commit the buffer to the table, then release its part of the log."""
        log_failed = self.group_commit is not None and self.group_commit.failed
        if self.group_commit is not None and log_failed:
            # No append succeeds any more: after the last acknowledgement all is in the buffer.
            self.group_commit.wait_idle()
        with self.state_lock:
            chunks, schema = list(self._chunks), self._acknowledged.schema
            producers = self.producers.encode()
            if chunks:
                chunks[-1].seal()
        if chunks:
            sequence = max(self.table.sequence, chunks[-1].sequence)
            if self.group_commit is not None:
                self.group_commit.seal()
                if log_failed:
                    # Skip the frames that were written and never acknowledged, too.
                    sequence = max(sequence, self.group_commit.last_sequence)
            batches = table_batches(chunks, schema, self.rules)
            properties = {WRITERS: producers} if producers else {}
            with self.table_lock:
                self.table.append(batches, schema, sequence, properties)
                self.publish_table(len(chunks))
        if self.group_commit is not None:
            if log_failed:
                self.group_commit.restart(self.table.sequence)
            else:
                self.group_commit.release(self.table.sequence)
        return bool(chunks)

    def publish_table(self, flushed: int = 0) -> None:
        """Show the table's newest version to readers; drop the ``flushed`` first chunks.

        Call with ``table_lock`` held.
        """
        chunks = self._chunks[:flushed]
        with self.state_lock:
            self._view, self._epoch = self.table.view, len(self.table.restores)
            del self._chunks[:flushed]
            self._buffered_rows -= sum(chunk.count for chunk in chunks)
            self._buffered_bytes -= sum(chunk.nbytes for chunk in chunks)
        self.metrics.table_is(len(self._view.sizes), self._view.start)

    @contextmanager
    def exclusive_table(self) -> Iterator[Table]:
        """Hold the table of the open bucket for a change; readers see the result on exit."""
        with self.table_lock:
            self.check_open()
            try:
                yield self.table
            finally:
                self.publish_table()

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """Flush everything acknowledged, and accept nothing more inside the context."""
        with self.state_lock:
            self.check_writable()
            if self.frozen:
                raise StorageError(
                    f"another call restores {self.options.storage_path} or imports files into it; "
                    "try again"
                )
            self.frozen = True
        try:
            if self.group_commit is not None:
                self.group_commit.write_now()
            # Not the coalesced flush: its next run may have to wait for this one.
            with self._flush_lock:
                self._flush_once()
            yield
        finally:
            with self.state_lock:
                self.frozen = False
            self.waiters.wake()


def _now() -> int:
    return time.time_ns() // 1000
