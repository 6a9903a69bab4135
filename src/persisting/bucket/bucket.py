"""One bucket: wires buffer, schema, log, table and flushes together.

Write: check → (log →) acknowledge → buffer → one table commit with the last log sequence → release
the log. Read: table rows, then buffer. Everything here may be called from any thread. The order of
the locks is in the docstring of the package.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import pyarrow as pa

from persisting import fs as filesystem
from persisting.bucket import exit_flush
from persisting.bucket.buffer import Buffer
from persisting.bucket.chunk import Chunk, Prepared, copy_row
from persisting.bucket.delays import (
    DELAYS,
    MOST_DELAYS,
    Delay,
    Delays,
    is_delay,
    refuse_without_log,
)
from persisting.bucket.flusher import Flusher, FlushTurns
from persisting.bucket.folder_notes import FolderNotes
from persisting.bucket.group_commit import GroupCommit
from persisting.bucket.log_note import is_logged
from persisting.bucket.log_view import LogView
from persisting.bucket.maintenance import Maintenance
from persisting.bucket.pending_puts import PendingPut, Waiter
from persisting.bucket.producer_sequences import WRITERS, ProducerSequence, ProducerSequences
from persisting.bucket.schema_state import EVOLVING, SchemaState
from persisting.bucket.shared_schema import SharedSchema
from persisting.bucket.snapshot import Snapshot
from persisting.bucket.snapshot_search import BufferView
from persisting.bucket.table_writer import TableWriter
from persisting.bucket.waiters import Waiters
from persisting.concurrency import timer
from persisting.concurrency.coalesced import weak_callback
from persisting.errors import (
    BucketClosed,
    InvalidArgument,
    SchemaError,
    StorageError,
    TableError,
    WALError,
)
from persisting.lock import BucketLock
from persisting.metrics import NO_METRICS, BucketMetrics
from persisting.options import BucketOptions
from persisting.records import RecordEncoder, Rules
from persisting.records.arrow import beyond_float, check_defaults, merge
from persisting.table import leftovers, operations, versions
from persisting.table.repair import SIGNATURE
from persisting.table.table import Table
from persisting.table.versions import Version

log = logging.getLogger("persisting")

_W = TypeVar("_W", bound=Waiter)

_QUIESCE_SECONDS = 30.0
"""How long a restore or an import waits for another one."""


class Bucket:
    """The records of one bucket folder, opened for writing or for reading only."""

    flush_pause = 0.0
    """The least seconds between two flushes that the threshold starts."""

    def __init__(
        self,
        options: BucketOptions,
        rules: Rules,
        metrics: BucketMetrics = NO_METRICS,
        schema: SchemaState | None = None,
    ) -> None:
        """``schema`` is shared by the buckets of a log; without it the bucket has its own."""
        self.options, self.rules, self.metrics = options, rules, metrics
        self.number = options.bucket_id
        self.fs = filesystem.current()
        self._process = os.getpid()
        if schema is None:
            path = options.schema_path
            schema = SchemaState(rules, SharedSchema(path, self.fs) if path else None)
        self.schema_state = schema
        self.state_lock = schema.lock
        self.group_commit: GroupCommit | None = None
        self.closed = self._released = False
        self.frozen = False
        """Puts wait while the bucket is being restored or files are imported."""
        self._quiescing = threading.Lock()
        self.waiters = Waiters()
        self._may_lose_records = False
        """Whether the lock's note says that acknowledged records may be stored nowhere."""
        self._scanned_fields: set[str] = set()
        self._log_view: LogView | None = None
        self._lock: BucketLock | None = None
        self._on_close: Callable[[], None] | None = None
        self.buffer_view = BufferView()
        self.table = self._new_table()
        self.table_writer = TableWriter(
            self.table,
            weak_callback(self, Bucket.check_open),
            _weak_publish(self),
        )
        self.maintenance = self._new_maintenance()
        self.flusher = Flusher(
            options.storage_path,
            metrics,
            options.flush_interval,
            commit=weak_callback(self, lambda bucket: bucket._flush()),
            buffered=weak_callback(self, lambda bucket: bucket.counts[1]),
            after_flush=weak_callback(self, lambda bucket: bucket.maintenance.schedule_if_needed()),
            turns=weak_callback(self, Bucket._flush_turns),
            least_pause=self.flush_pause,
        )
        self._pending_by_producer: dict[ProducerSequence, PendingPut] = {}
        try:
            if options.read_only:
                self._open_for_reading()
            else:
                self._open_for_writing()
            view = self.table.view
            # Readers skip this read, so that a damaged table can still be inspected.
            has_last = view.rows and not options.read_only
            encoder = schema.encoder_for(view, self._topic_schema)
            self._buffer = Buffer(
                view,
                len(self.table.restores),
                encoder,
                self._stored_producers(),
                Delays(self.table.properties.get(DELAYS)),
                last_arrival=view.arrival(view.end - 1) if has_last else 0,
            )
            schema.include(encoder)
            self.check_defaults()
            if options.read_only:
                self._follow_log()
            self.metrics.table_is(len(view.sizes), view.start)
        except OSError as exc:
            self.abandon()
            raise StorageError(f"cannot open {options.storage_path}: {exc}") from exc
        except BaseException:
            self.abandon()
            raise

    # Opening and closing

    def _new_table(self) -> Table:
        return Table(
            self.options.storage_path,
            self.fs,
            compression=self.options.compression,
            defaults=self.rules.defaults,
        )

    def _writers_of_notes(self) -> Iterable[str]:
        """Return the writers of files that are handed over to this bucket and not stored yet."""
        return self.new_notes().writers()

    @property
    def takes_notes(self) -> bool:
        """Whether other processes may hand files over to this bucket."""
        is_of_a_topic = self.options.schema_path is not None
        return is_of_a_topic and not self.options.read_only

    def new_notes(self) -> Any:
        """Return the notes that are handed over to this bucket, for its inbox."""
        return FolderNotes(self.options.storage_path, self.fs)

    def _new_maintenance(self) -> Maintenance:
        return Maintenance(
            self, self.table_writer, self.schema_state, self.options, self.metrics, self.fs
        )

    def _topic_schema(self) -> pa.Schema | None:
        """Return the schema of the topic for the opening of this bucket. Blocking."""
        return self.schema_state.topic_schema()

    def check_defaults(self) -> None:
        """Raise if a default does not have the type of its field."""
        try:
            check_defaults(self._buffer.encoder.schema, self.rules)
        except SchemaError as exc:
            raise InvalidArgument(f"schema_defaults: {exc}; give one of the field's type") from exc

    def _stored_producers(self) -> ProducerSequences:
        """Return the producer sequences of the table.

        Those of files that were handed over are kept until their notes are answered: a note may
        have been adopted by an owner that died before it answered.
        """
        producers = ProducerSequences(self.table.properties.get(WRITERS))
        if not self.options.read_only:
            producers.keep(self._writers_of_notes())
        return producers

    def _open_for_reading(self) -> None:
        folder = self.options.storage_path
        if not folder.is_dir():
            raise InvalidArgument(f"storage_path {folder} does not exist; there is nothing to read")
        self.table.refresh()

    def _follow_log(self) -> None:
        self._log_view = LogView(
            self.options.storage_path,
            self.table,
            self._buffer,
            self.schema_state,
            self.fs,
            self.waiters,
            self.table_writer.lock,
        )
        self._log_view.refresh()

    def _open_for_writing(self) -> None:
        folder = self.options.storage_path
        try:
            self.fs.make_folder(folder)
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
        self.fs.sync_chain(folder)  # with the lock file, whose note must survive power loss, too
        if self._lock.left_clean:
            self.table.check_signature(self._lock.note)
        self.table.open(left_clean=self._lock.left_clean)
        self.table.set_compression()
        if self._lock.may_lack_records and not is_logged(folder):
            operations.begin_epoch_after_loss(self.table)
        # Only now: until the epoch is durable, the next owner must begin one.
        self._mark_unlogged(not self.options.is_logged and not self._lock.is_brief)
        self.maintenance.start()

    def _mark_unlogged(self, unlogged: bool) -> None:
        """Note durably whether the records that are acknowledged next may be lost with this
        process; it takes a sync if that changes."""
        assert self._lock is not None
        self._lock.mark_unlogged(unlogged)
        self._may_lose_records = unlogged

    def _note_nothing_lost(self) -> None:
        """Note that everything acknowledged is stored."""
        if not self._may_lose_records or os.getpid() != self._process:
            return
        try:
            self._mark_unlogged(False)
        except StorageError as exc:
            log.warning("%s. Nothing is lost, but the next owner begins a new epoch", exc)

    def abandon(self) -> None:
        """Release the lock after a failed opening, still marked clean if nothing was written."""
        self.closed = self._released = True  # recovered records stay in the log
        self.flusher.stop()
        self.maintenance.stop()
        with self.flusher.lock:  # a flush in the background must not continue without the lock
            self.table_writer.wait_idle()
        if self.group_commit is not None:
            self.group_commit.detach(self)
        if self._lock is not None and self._unlock.detach() is not None:
            self._note_nothing_lost()
            untouched = self._lock.left_clean and not self.table.touched
            signature = {k: v for k, v in self._lock.note.items() if k in SIGNATURE}
            self._lock.release(clean=untouched, **signature)

    def attach(self, group_commit: GroupCommit, on_close: Callable[[], None] | None = None) -> None:
        """Log every record from now on.

        The log is this bucket's own, and closed with it, unless ``on_close`` is given, which is
        called when the bucket is flushed and before its lock is released.
        """
        group_commit.attach(self, self.table.sequence)
        self.group_commit = group_commit
        if on_close is None:
            weakref.finalize(self, group_commit.close_files)
        self._on_close = on_close or group_commit.close
        self.report_log(0)
        self.after_accepting(0)

    def begin_close(self) -> None:
        """Refuse further puts; :meth:`finish_close` or :meth:`cancel_close` follows."""
        self._check_process()
        with self.state_lock:
            self.closed = True
        self.flusher.stop()

    def cancel_close(self) -> None:
        """Stay open because the last flush failed; the close can be retried."""
        with self.state_lock:
            self.closed = False
        self.flusher.resume()

    def finish_close(self) -> None:
        """Release the files and the lock; everything is flushed."""
        self.waiters.wake()
        self.maintenance.stop()
        self._released = True
        self.table_writer.wait_idle()
        try:
            # Once: after this the bucket may have another owner.
            on_close, self._on_close = self._on_close, None
            if self.group_commit is not None and on_close is not None:
                self.group_commit.detach(self)
                on_close()
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
            self._note_nothing_lost()
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
            self._note_nothing_lost()
            lock.release(clean=False)
            return
        try:
            lock.release(clean=True, **signature)
        except StorageError as exc:
            log.warning("%s", exc)

    def __del__(self) -> None:
        """Warn if acknowledged records without a log are lost with this object."""
        buffer = getattr(self, "_buffer", None)
        if buffer is None or not buffer.rows:  # perhaps it was never opened
            return
        rows, owned = buffer.rows, not self.options.read_only and os.getpid() == self._process
        if self.group_commit is None and not self.closed and owned:
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
        return self.schema_state.encoder

    @property
    def is_full(self) -> bool:
        """Whether a put must wait: for a flush, a retry of a failed one, or a restore."""
        self._check_process()
        if self.flusher.error is not None or self._buffer.nbytes > self.options.max_buffer_bytes:
            return True
        if self.frozen:
            return True
        return self.group_commit is not None and self.group_commit.is_full

    def make_room(self) -> list[Future[None]]:
        """Start the flushes that a put must wait for, and return their futures."""
        if self.group_commit is not None and self.group_commit.is_full:
            return [self.request_flush(), *self.group_commit.make_room()]
        return [self.request_flush()]

    def add_row(self, record: Any) -> bool:
        """Accept a plain record; False if it needs :func:`prepare` and :meth:`add_prepared`."""
        encoder = self.encoder
        copied = copy_row(encoder, record)
        if copied is None:
            return False
        with self.state_lock:
            self.check_writable()
            if self.encoder is not encoder or self.frozen:
                return False
            self._before_unlogged_rows()
            self._buffer.add_row(encoder, *copied, _now())
            self.schema_state.acknowledge(encoder)
        self.after_accepting(1)
        return True

    def add_prepared(self, prepared: Prepared, producer: ProducerSequence | None = None) -> bool:
        """Accept all prepared records; False if the schema has changed since they were prepared.

        Records whose producer sequence is already stored are not stored again.
        """
        refuse_without_log(producer)
        with self.state_lock:
            self.check_writable()
            if producer is not None and self.producers.has(producer):
                return True
            if self.encoder is not prepared.base or self.frozen:
                return False
            self._before_unlogged_rows()
            self.schema_state.change(prepared, self.options.storage_path)
            for chunk in prepared.chunks:
                chunk.seal()
            self._buffer.accept(prepared.chunks, _now())
            self.schema_state.acknowledge(prepared.encoder)
            self._buffer.remember([producer] if producer is not None else [])
        self.after_accepting(prepared.rows)
        return True

    def _before_unlogged_rows(self) -> None:
        """Note that this process may lose records, unless that is noted. Call with the state's lock
        held: so it is never taken back between this and the acceptance of the rows."""
        if not self._may_lose_records:  # a brief owner, or one whose process is exiting
            self._mark_unlogged(True)

    def enqueue_row(
        self,
        record: Any,
        waiter: Callable[[], _W],
        producer: ProducerSequence | None = None,
        *,
        start: bool = True,
    ) -> _W | None:
        """Queue a plain record for the log and return its waiter; with ``start``, have it written.

        None if it needs :func:`prepare` and :meth:`GroupCommit.enqueue`, or if the producer's
        number is already queued or stored.
        """
        assert self.group_commit is not None
        if producer is not None and is_delay(producer):
            self.check_delays()
        encoder = self.encoder
        copied = copy_row(encoder, record)
        if copied is None:
            return None
        caller = waiter()
        if not self.group_commit.enqueue_row(self, encoder, *copied, caller, producer):
            return None
        if start:
            self.group_commit.start(caller.sink)
        return caller

    # What group commit asks of a bucket; see LoggedBucket

    @property
    def next_row(self) -> tuple[int, int]:
        return self._buffer.epoch, self._buffer.end

    @property
    def first_sequence(self) -> int | None:
        return self._buffer.first_sequence

    @property
    def last_sequence(self) -> int | None:
        return self._buffer.last_sequence

    def find_producer(self, producer: ProducerSequence) -> PendingPut | bool:
        return self._pending_by_producer.get(producer) or self.producers.has(producer)

    def is_queued(self, producer: ProducerSequence) -> bool:
        """Whether the put of this number waits for the log."""
        with self.schema_state.lock:
            return producer in self._pending_by_producer

    def expect(self, producer: ProducerSequence, put: PendingPut | None) -> None:
        if put is None:
            self._pending_by_producer.pop(producer, None)
        else:
            self._pending_by_producer[producer] = put

    def accept_logged(
        self,
        chunks: list[Chunk],
        arrival: int,
        producers: list[ProducerSequence],
        delays: Sequence[Delay] = (),
    ) -> None:
        for first, rows, due in delays:
            self._buffer.delays.add(self._buffer.end + first, rows, due)
        self._buffer.accept(chunks, arrival)
        self._buffer.remember(producers)
        for producer in producers:
            self._pending_by_producer.pop(producer, None)

    def report_log(self, unsynced: int) -> None:
        self.metrics.log_written(self._buffer.log_bytes, unsynced)

    def after_accepting(self, rows: int) -> None:
        buffer = self._buffer
        self.metrics.accepted(rows, buffer.rows)
        self.waiters.wake()
        if buffer.rows >= self.options.flush_threshold:
            self.flusher.soon(urgent=buffer.nbytes > self.options.max_buffer_bytes // 4)
        else:
            self.flusher.at_interval()

    # Recovering

    def accept_recovered(
        self, chunk: Chunk, producers: list[ProducerSequence], place: tuple[int, int] | None
    ) -> None:
        """Accept records of a left-over log, and flush when the buffer is full.

        ``place`` is the epoch and the offset that the log has for them. The table may have a later
        schema than the records: a flush may have died after it had changed the schema and before
        it had added the rows.
        """
        buffer = self._buffer
        if place is not None and place != (buffer.epoch, buffer.end):
            raise WALError(
                f"the log has records for offset {place[1]} (epoch {place[0]}) of "
                f"{self.options.storage_path}, which ends at offset {buffer.end} (epoch "
                f"{buffer.epoch}): a part of the log or of the table is missing. Restore the "
                "missing files from a copy"
            )
        if chunk.encoder is not buffer.encoder:
            schema = merge(buffer.encoder.schema, chunk.schema, EVOLVING)
            if not schema.equals(chunk.schema):
                chunk.encoder = RecordEncoder(schema, self.rules)
        chunk.seal()
        buffer.remember(producers)
        buffer.accept([chunk], chunk.arrival)
        if buffer.nbytes > self.options.max_buffer_bytes:
            self._commit_buffer()

    def finish_recovery(self) -> None:
        """Check later records against the schema of the recovered ones, too."""
        self.schema_state.include(self._buffer.encoder)

    def flush_recovered(self) -> None:
        """Flush the records of a left-over log to the table while opening."""
        self._commit_buffer()

    # Delays

    def check_delays(self) -> None:
        """Raise if the bucket cannot take another delayed put."""
        with self.state_lock:
            if len(self._buffer.delays) < MOST_DELAYS:
                return
            count = len(self._buffer.delays.pending(_now()))
        if count >= MOST_DELAYS:
            raise InvalidArgument(
                f"{self.options.storage_path} has {count} delayed puts whose time has not come, "
                "and takes no more. Put several records at once, or put the time into a field and "
                "read with visible_at='field'"
            )

    def recovered_delay(self, first: int, rows: int, due: int) -> None:
        """Take over a delay from a left-over log."""
        self._buffer.delays.add(first, rows, due)

    def delays(self) -> list[Delay]:
        """Return the delays that have not passed."""
        with self.state_lock:
            return self._buffer.delays.pending(_now())

    def delays_property(self) -> dict[str, str]:
        """Return the property of a table commit for the delays before the table's end."""
        with self.state_lock:
            encoded = self._buffer.delays.encode(self._buffer.view.end, _now())
        return {DELAYS: encoded} if encoded else {}

    # Changing the schema

    @property
    def producers(self) -> ProducerSequences:
        """The last number of each producer."""
        return self._buffer.producers

    def merge_table_schema(self, schema: pa.Schema) -> None:
        """Merge the schema of records that were written to the table past the buffer."""
        with self.state_lock:
            self.schema_state.merge_table_schema(schema)
            merged = merge(self._buffer.encoder.schema, schema, EVOLVING)
            self._buffer.encoder = RecordEncoder(merged, self.rules)

    def restored(self, encoder: RecordEncoder) -> None:
        """Take over the schema and the producer sequences of the restored table."""
        with self.state_lock:
            self._buffer.publish(self.table.view, len(self.table.restores), 0)
            self._buffer.encoder = encoder
            kept = self._buffer.producers.kept
            self._buffer.producers = ProducerSequences(self.table.properties.get(WRITERS))
            self._buffer.producers.keep(kept)
            self._buffer.delays = Delays(self.table.properties.get(DELAYS))
            self.schema_state.restored(encoder)
            self._scanned_fields = set()

    def imported(self, arrival: int, producer: ProducerSequence, *, replaced: bool) -> None:
        """Note rows that were committed past the buffer: when they arrived, whose they are, and
        whether they have replaced all others."""
        with self.state_lock:
            if replaced:  # their offsets begin at 0 again: the delays were those of other rows
                self._buffer.publish(self.table.view, len(self.table.restores), 0)
                self._buffer.delays = Delays()
            self._buffer.producers.remember([producer])
            self._buffer.not_before(arrival)
            self._scanned_fields = set()

    def keep_producer(self, producer: str) -> None:
        """Never forget the sequence of a producer, until :meth:`release_producer`."""
        with self.state_lock:
            self._buffer.producers.keep([producer])

    def release_producer(self, producer: str) -> None:
        """Let the sequence of a producer be forgotten."""
        with self.state_lock:
            self._buffer.producers.release(producer)

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
                if snapshot.epoch == self._buffer.epoch:
                    # Otherwise a restore replaced the records: scan again.
                    self.schema_state.add_large_int_fields(large)
                    self._scanned_fields.update(unknown)

    # Reading

    @property
    def end(self) -> int:
        """The offset after the last acknowledged record."""
        self._check_process()
        with self.state_lock:
            return self._buffer.end

    def ends_before(self, offset: int) -> bool:
        """Whether there is no record at ``offset`` or later; 0 means the earliest one left."""
        self._check_process()
        with self.state_lock:
            return self._buffer.end <= (offset or self._buffer.view.start)

    @property
    def epoch(self) -> int:
        """How many times the bucket was restored, or an owner without a log was killed."""
        return self._buffer.epoch

    @property
    def counts(self) -> tuple[int, int]:
        """(rows in the table, rows in the buffer) at one point in time."""
        self._check_process()
        with self.state_lock:
            return self._buffer.view.rows, self._buffer.rows

    @property
    def log_bytes(self) -> int:
        """Bytes that the log holds for buffered records."""
        return self._buffer.log_bytes if self.group_commit is not None else 0

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all acknowledged records."""
        self.check_open()
        return self.snapshot_even_if_closed()

    def snapshot_even_if_closed(self) -> Snapshot:
        """Like :meth:`snapshot`, but a snapshot of a closed bucket can be counted, not read."""
        with self.state_lock:
            return self._buffer.snapshot(self.rules.defaults or {})

    def at(self, version: Version) -> Snapshot:
        """Return a snapshot of an older version."""
        self.check_open()
        dataset = self.table.view.dataset
        if dataset is not None:
            number = versions.resolve(dataset, version)
            try:
                view = self.table.at(number)
            except TableError:
                versions.resolve(dataset, version)  # raises if it was removed meanwhile
                raise
        elif version == versions.NOTHING or isinstance(version, dt.datetime):
            view = self.table.at(versions.NOTHING)
        else:
            raise InvalidArgument(f"{self.options.storage_path} has no version {version!r} yet")
        return Snapshot(view, [], view.schema, self.rules.defaults or {}, self._buffer.epoch)

    def known_schema(self) -> pa.Schema:
        """Return all fields of the bucket and of its topic."""
        schema = self._buffer.encoder.schema
        shared = self.schema_state.topic_schema()
        return schema if shared is None else merge(schema, shared, EVOLVING)

    def expire_view(self) -> None:
        """Make the next :meth:`refresh` check for a new version, however recent the last was."""
        if self._log_view is not None:
            self._log_view.expire()

    def refresh(self, *, watch: bool = False) -> None:
        """Show new records of the log and a new version of the table, if this is a reader without
        the lock; with ``watch``, later changes wake those who are already waiting."""
        if self._log_view is not None:
            with self.table_writer.lock:
                if watch:
                    self._log_view.watch()
                self._log_view.refresh()
                if watch:
                    self._log_view.watch()  # the log, or the table, may be a new one

    @property
    def wait_seconds(self) -> float | None:
        """How long to wait to be woken before polling again, None for as long as it takes."""
        return None if self._log_view is None else self._log_view.wait_seconds

    def sync_through(self, offset: int) -> int:
        """Make the acknowledged records before ``offset`` durable; return up to which offset they
        are. Without a log only a flush makes records durable: nothing is done then. Blocking."""
        self.check_open()
        if self._log_view is not None:
            with self.table_writer.lock:
                return self._log_view.sync_through(offset)
        with self.state_lock:
            persisted, end = self._buffer.view.end, self._buffer.end
            chunks = self._buffer.chunks
            sequence = chunks[-1].sequence if chunks else 0
        if offset <= persisted or self.group_commit is None:
            return end if self.group_commit is None else persisted
        try:
            self.group_commit.sync_through(sequence)
        except WALError as exc:
            log.error("%s; flushing to the table instead", exc)
            self.flush_now()
        return end

    # Flushing

    def flush_at_exit(self) -> None:
        """Make acknowledged records durable when the process ends without a close."""
        if os.getpid() != self._process or self.closed or not self._unlock.alive:
            return
        if self._lock is None or not self._lock.in_place:
            return
        try:
            if self.group_commit is None or not self.group_commit.sync_at_exit():
                with self.flusher.lock:
                    self._commit_buffer()
                with self.state_lock:
                    if not self._buffer.rows:
                        self._note_nothing_lost()
        except Exception as exc:
            log.error(
                "%s was not closed, and %d acknowledged records are lost: %s",
                self.options.storage_path,
                self._buffer.rows,
                exc,
            )

    def request_flush(self) -> Future[None]:
        """Return the future of a flush of everything acknowledged before this call."""
        return self.flusher.request()

    def flush_now(self) -> None:
        """Flush in this thread."""
        self.flusher.flush()

    def _flush(self) -> bool:
        """Commit the buffer to the table, then release the log, or restart it if it has failed."""
        if self._released:
            return False
        with self.flusher.lock:
            flushed = not self._released and self._commit_buffer()
        if self.group_commit is not None and not self._released:
            if self.group_commit.failed:
                self.group_commit.restart_after_failure()
            else:
                self.group_commit.release()
        return flushed

    def flush_from_failed_log(self, sequence: int) -> None:
        with self.flusher.lock:
            self._commit_buffer(sequence)

    def _commit_buffer(self, at_least: int = 0) -> bool:
        """Commit the buffer with its log sequence; return whether there was anything.

        The log of a topic is first synced up to there: a put to several buckets must not be in one
        bucket's table while power loss can still take its part in another. And a reader that sees
        the new version before it is durable may rely on its records.
        """
        with self.state_lock:
            chunks, encoder = self._buffer.take_for_flush(), self._buffer.encoder
            properties = {
                WRITERS: self.producers.encode(),
                DELAYS: self._buffer.delays.encode(self._buffer.end, _now()),
            }
        if not chunks:
            return False
        if self.group_commit is not None and self.group_commit.is_shared:
            try:
                self.group_commit.sync_through(chunks[-1].sequence)
            except WALError as exc:
                # The records go to the table instead; the log is restarted after that.
                log.error("%s; flushing to the table instead", exc)
        sequence = max(self.table.sequence, chunks[-1].sequence, at_least)
        self.table_writer.append(chunks, encoder, self.rules, sequence, properties)
        return True

    def _flush_turns(self) -> FlushTurns | None:
        return None if self.group_commit is None else self.group_commit.flush_turns

    def publish_table(self, flushed: int = 0) -> None:
        """Show the table's newest version to readers; drop the ``flushed`` first chunks.

        Call with the table's lock held.
        """
        with self.state_lock:
            self._buffer.publish(self.table.view, len(self.table.restores), flushed)
        view = self._buffer.view
        self.metrics.table_is(len(view.sizes), view.start)

    def remove_files(self, names: Collection[str], *, never_named: bool = False) -> None:
        """Remove those of the data files that no version of the table names.

        ``never_named``: the caller knows that no commit, not even an attempted one, has named them.
        """
        if names:
            with self.exclusive_table() as table:
                leftovers.remove_unused(table, names)

    def exclusive_table(self) -> AbstractContextManager[Table]:
        """Hold the table of the open bucket for a change; readers see the result on exit."""
        return self.table_writer.exclusive()

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """Flush everything acknowledged, and accept nothing more inside the context."""
        self._check_process()
        if not self._quiescing.acquire(timeout=_QUIESCE_SECONDS):
            raise StorageError(
                f"another call restores {self.options.storage_path} or imports files into it; "
                "try again"
            )
        try:
            with self._quiesced():
                yield
        finally:
            self._quiescing.release()

    @contextmanager
    def _quiesced(self) -> Iterator[None]:
        self.table_writer.wait_idle()  # so that puts do not wait for a compaction that runs
        with self.state_lock:
            self.check_writable()
            self.frozen = True
        try:
            if self.group_commit is not None:
                self.group_commit.write_now()
            # Not the coalesced flush: its next run may have to wait for this one.
            self._flush()
            yield
        finally:
            with self.state_lock:
                self.frozen = False
            self.waiters.wake()


def _weak_publish(bucket: Bucket) -> Callable[[int], None]:
    """Return a callable that publishes the table without keeping the bucket alive."""
    reference = weakref.ref(bucket)

    def publish(flushed: int) -> None:
        alive = reference()
        if alive is not None:
            alive.publish_table(flushed)

    return publish


def _now() -> int:
    return time.time_ns() // 1000
