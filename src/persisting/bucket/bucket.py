"""One bucket: wires its parts together, from its opening to its end.

Write: check → (log →) acknowledge → buffer → one table commit with the last log sequence → release
the log. Read: table rows, then buffer. Everything here may be called from any thread. The order of
the locks is in the docstring of the package.
"""

from __future__ import annotations

import datetime as dt
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from persisting import fs as filesystem
from persisting.bucket import exit_flush
from persisting.bucket.buffer import Buffer
from persisting.bucket.buffer_bypass import BufferBypass
from persisting.bucket.delays import DELAYS, Delays
from persisting.bucket.flush_job import FlushJob
from persisting.bucket.flusher import Flusher, FlushTurns
from persisting.bucket.folder_notes import FolderNotes
from persisting.bucket.folder_ownership import FolderOwnership
from persisting.bucket.group_commit import GroupCommit
from persisting.bucket.large_ints import LargeInts
from persisting.bucket.lifecycle import Lifecycle
from persisting.bucket.maintenance import Maintenance
from persisting.bucket.pending_delays import PendingDelays
from persisting.bucket.producer_sequences import WRITERS, ProducerSequences
from persisting.bucket.puts import Puts
from persisting.bucket.schema_state import EVOLVING, SchemaState
from persisting.bucket.shared_schema import SharedSchema
from persisting.bucket.snapshot import Snapshot
from persisting.bucket.snapshot_search import BufferView
from persisting.bucket.table_writer import TableWriter
from persisting.bucket.waiters import Waiters
from persisting.concurrency import timer
from persisting.concurrency.coalesced import weak_callback
from persisting.errors import InvalidArgument, SchemaError, StorageError, TableError, WALError
from persisting.metrics import NO_METRICS, BucketMetrics
from persisting.options import BucketOptions
from persisting.records import Rules
from persisting.records.arrow import check_defaults, merge
from persisting.table import versions
from persisting.table.table import Table
from persisting.table.versions import Version

log = logging.getLogger("persisting")


class Bucket:
    """The records of one bucket folder, opened for writing.

    The parts refer to the bucket weakly, if at all: it is freed, and its lock released, as soon as
    it is dropped. So whoever changes the table or writes the log must hold the bucket meanwhile.

    Other kinds of bucket choose other parts: they replace the types of parts below, or override
    methods from :meth:`_new_table` to :meth:`_start`.
    """

    flush_pause = 0.0
    """The least seconds between two flushes that the threshold starts."""
    lifecycle_type: type[Lifecycle] = Lifecycle
    table_writer_type: type[TableWriter] = TableWriter
    flush_job_type: type[FlushJob] = FlushJob
    bypass_type: type[BufferBypass] = BufferBypass

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
        self.lifecycle = self.lifecycle_type(options)
        if schema is None:
            path = options.schema_path
            schema = SchemaState(rules, SharedSchema(path, self.fs) if path else None)
        self.schema_state = schema
        self.waiters = Waiters()
        self.buffer_view = BufferView()
        self._ownership: FolderOwnership | None = None
        self._on_close: Callable[[], None] | None = None
        self._is_wired = False
        self.table = self._new_table()
        try:
            self._open_table()
            self.buffer = self._new_buffer()
            schema.include(self.buffer.encoder)
            self.check_defaults()
            self._wire()
            self._start()
            self.table_writer.report()
        except OSError as exc:
            self.abandon()
            raise StorageError(f"cannot open {options.storage_path}: {exc}") from exc
        except BaseException:
            self.abandon()
            raise

    def _wire(self) -> None:
        """Create the parts around the table and the buffer."""
        options, lifecycle, metrics = self.options, self.lifecycle, self.metrics
        buffer, schema = self.buffer, self.schema_state
        writer = self.table_writer_type(self.table, lifecycle, buffer, schema, metrics)
        self.table_writer = writer
        self.flusher = Flusher(
            options.storage_path,
            metrics,
            options.flush_interval,
            commit=weak_callback(self, lambda bucket: bucket.flush_job.run()),
            buffered=weak_callback(self, lambda bucket: bucket.counts[1]),
            after_flush=weak_callback(self, lambda bucket: bucket.maintenance.schedule_if_needed()),
            turns=weak_callback(self, Bucket._flush_turns),
            least_pause=self.flush_pause,
        )
        self.puts = Puts(
            options,
            lifecycle,
            buffer,
            schema,
            self.flusher,
            self.waiters,
            metrics,
            self._ownership,
        )
        self.delays = PendingDelays(options.storage_path, buffer, schema)
        self.large_ints = LargeInts(buffer, schema)
        self.flush_job = self.flush_job_type(
            options.storage_path,
            self.rules,
            lifecycle,
            buffer,
            schema,
            self.puts,
            writer,
            self.flusher,
        )
        self.bypass = self.bypass_type(
            options.storage_path,
            self.rules,
            lifecycle,
            buffer,
            schema,
            self.puts,
            self.large_ints,
            writer,
            self.flush_job,
            self.waiters,
        )
        self.maintenance = self._new_maintenance()
        self._is_wired = True

    def _flush_turns(self) -> FlushTurns | None:
        return None if self.group_commit is None else self.group_commit.flush_turns

    # What other kinds of bucket do differently

    def _new_table(self) -> Table:
        return Table(
            self.options.storage_path,
            self.fs,
            compression=self.options.compression,
            defaults=self.rules.defaults,
        )

    def _open_table(self) -> None:
        """Own the bucket, and open its table. Blocking."""
        folder = self.options.storage_path
        try:
            self.fs.make_folder(folder)
        except OSError as exc:
            raise InvalidArgument(
                f"storage_path {folder} cannot be created: {exc.strerror}; check its permissions"
            ) from exc
        self._start_timer()
        self._ownership = FolderOwnership(self.options, self.fs, self)
        self._ownership.open_table(self.table)

    def _start_timer(self) -> None:
        try:
            timer.start_timer()
        except RuntimeError as exc:
            raise StorageError(
                f"cannot open {self.options.storage_path}: no thread for the timer ({exc})"
            ) from exc

    def _topic_schema(self) -> pa.Schema | None:
        """Return the schema of the topic for the opening of this bucket. Blocking."""
        return self.schema_state.topic_schema()

    def _stored_producers(self) -> ProducerSequences:
        """Return the producer sequences of the table.

        Those of files that were handed over are kept until their notes are answered: a note may
        have been adopted by an owner that died before it answered.
        """
        producers = ProducerSequences(self.table.properties.get(WRITERS))
        producers.keep(self._writers_of_notes())
        return producers

    def _writers_of_notes(self) -> Iterable[str]:
        """Return the writers of files that are handed over to this bucket and not stored yet."""
        return self.new_notes().writers()

    @property
    def takes_notes(self) -> bool:
        """Whether other processes may hand files over to this bucket."""
        return self.options.schema_path is not None  # it is one of a topic

    def new_notes(self) -> Any:
        """Return the notes that are handed over to this bucket, for its inbox."""
        return FolderNotes(self.options.storage_path, self.fs)

    def _last_arrival(self) -> int:
        """Return when the last record of the table arrived, 0 without any."""
        view = self.table.view
        return view.arrival(view.end - 1) if view.rows else 0

    def _new_maintenance(self) -> Maintenance:
        return Maintenance(
            self, self.table_writer, self.schema_state, self.options, self.metrics, self.fs
        )

    def _start(self) -> None:
        """Begin what runs in the background; all parts are there."""
        exit_flush.register(self)
        self.maintenance.start()

    # Opening and closing

    def _new_buffer(self) -> Buffer:
        """Return an empty buffer behind what the table holds."""
        encoder = self.schema_state.encoder_for(self.table.view, self._topic_schema)
        return Buffer(
            self.table.view,
            len(self.table.restores),
            encoder,
            self._stored_producers(),
            Delays(self.table.properties.get(DELAYS)),
            last_arrival=self._last_arrival(),
        )

    def check_defaults(self) -> None:
        """Raise if a default does not have the type of its field."""
        try:
            check_defaults(self.buffer.encoder.schema, self.rules)
        except SchemaError as exc:
            raise InvalidArgument(f"schema_defaults: {exc}; give one of the field's type") from exc

    def abandon(self) -> None:
        """Release the lock after a failed opening, still marked clean if nothing was written."""
        # Recovered records stay in the log.
        self.lifecycle.closed = self.lifecycle.released = True
        if self._is_wired:
            self.flusher.stop()
            self.maintenance.stop()
            with self.flusher.lock:  # a flush in the background must not go on without the lock
                self.table_writer.wait_idle()
            if self.group_commit is not None:
                self.group_commit.detach(self)
        if self._ownership is not None:
            self._ownership.abandon(self.table)

    @property
    def group_commit(self) -> GroupCommit | None:
        """The log of this bucket, None if its records are not logged."""
        return self.puts.group_commit

    def attach(self, group_commit: GroupCommit, on_close: Callable[[], None] | None = None) -> None:
        """Log every record from now on.

        The log is this bucket's own, and closed with it, unless ``on_close`` is given, which is
        called when the bucket is flushed and before its lock is released.
        """
        group_commit.attach(self, self.table.sequence)
        self.puts.group_commit = group_commit
        if on_close is None:
            weakref.finalize(self, group_commit.close_files)
        self._on_close = on_close or group_commit.close
        self.puts.report_log(0)
        self.puts.after_accepting(0)

    def begin_close(self) -> None:
        """Refuse further puts; :meth:`finish_close` or :meth:`cancel_close` follows."""
        self.lifecycle.check_process()
        with self.schema_state.lock:
            self.lifecycle.closed = True
        self.flusher.stop()

    def cancel_close(self) -> None:
        """Stay open because the last flush failed; the close can be retried."""
        with self.schema_state.lock:
            self.lifecycle.closed = False
        self.flusher.resume()

    def finish_close(self) -> None:
        """Release the files and the lock; everything is flushed."""
        self.waiters.wake()
        self.maintenance.stop()
        self.lifecycle.released = True
        self.table_writer.wait_idle()
        try:
            # Once: after this the bucket may have another owner.
            on_close, self._on_close = self._on_close, None
            if self.group_commit is not None and on_close is not None:
                self.group_commit.detach(self)
                on_close()
        finally:
            self.metrics.remove()
            if self._ownership is not None:
                self._ownership.release(self.table)

    def flush_at_exit(self) -> None:
        """Make acknowledged records durable when the process ends without a close."""
        if not self.lifecycle.is_here or self.lifecycle.closed:
            return
        if self._ownership is None or not self._ownership.is_held:
            return
        try:
            if self.group_commit is None or not self.group_commit.sync_at_exit():
                self.flush_job.commit_buffer()
                with self.schema_state.lock:
                    if not self.buffer.rows:
                        self._ownership.note_nothing_lost()
        except Exception as exc:
            log.error(
                "%s was not closed, and %d acknowledged records are lost: %s",
                self.options.storage_path,
                self.buffer.rows,
                exc,
            )

    def __del__(self) -> None:
        """Warn if acknowledged records without a log are lost with this object."""
        if not getattr(self, "_is_wired", False) or not self.buffer.rows:
            return
        rows, owned = self.buffer.rows, not self.options.read_only and self.lifecycle.is_here
        if self.group_commit is None and not self.lifecycle.closed and owned:
            log.warning(
                "%s was dropped without close(): %d unflushed records are lost",
                self.options.storage_path,
                rows,
            )

    # Reading

    @property
    def end(self) -> int:
        """The offset after the last acknowledged record."""
        self.lifecycle.check_process()
        with self.schema_state.lock:
            return self.buffer.end

    def ends_before(self, offset: int) -> bool:
        """Whether there is no record at ``offset`` or later; 0 means the earliest one left."""
        self.lifecycle.check_process()
        with self.schema_state.lock:
            return self.buffer.end <= (offset or self.buffer.view.start)

    @property
    def epoch(self) -> int:
        """How many times the bucket was restored, or an owner without a log was killed."""
        return self.buffer.epoch

    @property
    def counts(self) -> tuple[int, int]:
        """(rows in the table, rows in the buffer) at one point in time."""
        self.lifecycle.check_process()
        with self.schema_state.lock:
            return self.buffer.view.rows, self.buffer.rows

    @property
    def log_bytes(self) -> int:
        """Bytes that the log holds for buffered records."""
        return self.buffer.log_bytes if self.group_commit is not None else 0

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all acknowledged records."""
        self.lifecycle.check_open()
        return self.snapshot_even_if_closed()

    def snapshot_even_if_closed(self) -> Snapshot:
        """Like :meth:`snapshot`, but a snapshot of a closed bucket can be counted, not read."""
        with self.schema_state.lock:
            return self.buffer.snapshot(self.rules.defaults or {})

    def at(self, version: Version) -> Snapshot:
        """Return a snapshot of an older version."""
        self.lifecycle.check_open()
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
        return Snapshot(view, [], view.schema, self.rules.defaults or {}, self.buffer.epoch)

    def known_schema(self) -> pa.Schema:
        """Return all fields of the bucket and of its topic."""
        schema = self.buffer.encoder.schema
        shared = self.schema_state.topic_schema()
        return schema if shared is None else merge(schema, shared, EVOLVING)

    # Following another owner: see ReadonlyBucket

    def expire_view(self) -> None:
        """Make the next :meth:`refresh` check for a new version, however recent the last was."""

    def refresh(self, *, watch: bool = False) -> None:
        """Show what the bucket's owner has stored, if that is another process; with ``watch``,
        later changes wake those who are already waiting."""

    @property
    def wait_seconds(self) -> float | None:
        """How long to wait to be woken before polling again, None for as long as it takes."""
        return None

    def sync_through(self, offset: int) -> int:
        """Make the acknowledged records before ``offset`` durable; return up to which offset they
        are. Without a log only a flush makes records durable: nothing is done then. Blocking."""
        self.lifecycle.check_open()
        with self.schema_state.lock:
            persisted, end = self.buffer.view.end, self.buffer.end
            chunks = self.buffer.chunks
            sequence = chunks[-1].sequence if chunks else 0
        if offset <= persisted or self.group_commit is None:
            return end if self.group_commit is None else persisted
        try:
            self.group_commit.sync_through(sequence)
        except WALError as exc:
            log.error("%s; flushing to the table instead", exc)
            self.flusher.flush()
        return end
