"""Group commit: the puts of one or more buckets, written to one log and synced together.

Puts queue up. One task at a time takes all queued puts, appends them as frames in one write, syncs
once if ``wal_sync_interval`` is 0, and acknowledges them together. The callers wait in event loops
or threads; each brings a :class:`Waiter`, so that nothing here depends on an event loop.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from persisting import codec
from persisting.bucket.chunk import MAX_BATCH_BYTES, Chunk, Prepared
from persisting.bucket.flusher import FlushTurns
from persisting.bucket.log_records import Section, batch_payload, rows_payload, schema_payload
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.bucket.schema_state import SchemaState
from persisting.concurrency import loop_bridge, timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.errors import WALError
from persisting.metrics import BucketMetrics
from persisting.options import PersistingOptions
from persisting.wal import Log, Payload
from persisting.wal.frame import FRAME_HEADER_SIZE, START, SegmentStart, encode_start

log = logging.getLogger("persisting")


class Sink(Protocol):
    """Where the results of puts are delivered: an event loop, or waiting threads."""

    def deliver(self, waiters: Sequence[Any], exc: BaseException | None) -> None:
        """Resolve waiters of this sink; called from any thread, must not block."""


class Waiter(Protocol):
    """The caller of a put."""

    @property
    def sink(self) -> Sink: ...


class LoggedBucket(Protocol):
    """What the log needs of a bucket. The comments say which lock the caller holds."""

    metrics: BucketMetrics

    @property
    def number(self) -> int: ...

    @property
    def next_row(self) -> tuple[int, int]:
        """Epoch and offset of the next acknowledged record."""  # state

    @property
    def first_sequence(self) -> int | None:
        """The log sequence of the oldest record that the table lacks."""  # state

    def check_writable(self) -> None: ...

    @property
    def frozen(self) -> bool: ...

    def find_producer(self, producer: ProducerSequence) -> PendingPut | bool:
        """Return the queued put of this number, or whether it is stored."""  # state

    def accept_logged(
        self, chunks: list[Chunk], arrival: int, producers: list[ProducerSequence]
    ) -> None:
        """Accept records that the log holds."""  # state

    def expect(self, producer: ProducerSequence, put: PendingPut | None) -> None:
        """Note that the put of this number is queued, or no longer is."""  # state

    def after_accepting(self, rows: int) -> None:
        """Wake readers, and flush if it is time."""

    def report_log(self, unsynced: int) -> None:
        """Update the gauges of the log; ``unsynced`` frames could be lost with the power."""

    def flush_from_failed_log(self, sequence: int) -> None:
        """Flush everything acknowledged; ``sequence`` is reached by frames that are dropped."""

    def request_flush(self) -> Future[None]: ...


class Piece(NamedTuple):
    """Records of one schema in one frame: a chunk, and which of its rows belong to which bucket."""

    whole: Chunk
    sections: list[tuple[LoggedBucket, Chunk]]


class PendingPut:
    """One put in the queue: its pieces, its number, and who waits for it."""

    __slots__ = ("pieces", "producer", "waiter")

    def __init__(
        self, pieces: list[Piece], waiter: Waiter, producer: ProducerSequence | None = None
    ) -> None:
        self.pieces, self.waiter, self.producer = pieces, waiter, producer

    @property
    def is_row(self) -> bool:
        """Whether it is a plain row, which may share a frame with others."""
        return self.producer is None and len(self.pieces) == 1 and self.pieces[0].whole.is_open


class _Entry:
    """Puts that are logged together, as one or more frames."""

    def __init__(self, pieces: list[Piece], producer: ProducerSequence | None) -> None:
        self.pieces, self.producer = pieces, producer
        self.payloads: list[Payload] = []

    @property
    def schema(self) -> pa.Schema:
        return self.pieces[0].whole.schema

    def logged(self, sequence: int) -> None:
        """Tell all chunks the sequence of the entry and their share of its bytes."""
        frames = self.payloads[-len(self.pieces) :]
        for piece, payload in zip(self.pieces, frames, strict=True):
            size = FRAME_HEADER_SIZE + len(payload.head) + len(payload.data)
            rows = sum(chunk.count for _, chunk in piece.sections)
            for _, chunk in piece.sections:
                chunk.logged(sequence, max(1, size * chunk.count // rows))


def pieces_of(chunks: Sequence[Chunk], targets: Sequence[tuple[LoggedBucket, int]]) -> list[Piece]:
    """Divide chunks among buckets: the first rows belong to the first bucket, and so on."""
    if len(targets) == 1:
        return [Piece(chunk, [(targets[0][0], chunk)]) for chunk in chunks]
    pieces = []
    left = iter(targets)
    bucket, rows = next(left)
    for chunk in chunks:
        sections, start = [], 0
        while start < chunk.count:
            while not rows:
                bucket, rows = next(left)
            count = min(rows, chunk.count - start)
            sections.append((bucket, chunk.slice(start, count)))
            start, rows = start + count, rows - count
        pieces.append(Piece(chunk, sections))
    return pieces


class GroupCommit:
    """Writes the puts of its buckets to one log."""

    def __init__(
        self,
        log: Log,
        schema: SchemaState,
        options: PersistingOptions,
        publish: Callable[[int, int], None] | None = None,
    ) -> None:
        """``publish`` tells readers in other processes the acknowledged and the synced
        sequence."""
        self._log, self._schema_state = log, schema
        self._codec = codec.codec_id(options.compression)
        self._interval = options.wal_sync_interval
        self._max_bytes = options.max_wal_size
        self._publish = publish
        self._buckets: dict[int, weakref.ref[LoggedBucket]] = {}
        self._last_of: dict[int, int] = {}
        """By bucket, the last sequence in this log that holds records of it."""
        self._queue: list[PendingPut] = []
        self._writing = CoalescedTask(weak_callback(self, GroupCommit._write), short=True)
        self._syncing = CoalescedTask(weak_callback(self, GroupCommit._sync))
        self._sync_due = False
        self._schema: pa.Schema | None = None
        self._schema_payload: tuple[pa.Schema, Payload] | None = None
        self._acknowledged = log.last_sequence
        self._log_lock = threading.Lock()
        self._restarting = threading.Lock()
        self.flush_turns = FlushTurns()

    # Buckets

    def attach(self, bucket: LoggedBucket, table_sequence: int) -> None:
        """Take puts of a bucket, whose table holds everything up to ``table_sequence``."""
        with self._log_lock:
            self._log.skip_to(table_sequence + 1)
            with self._schema_state.lock:
                self._buckets[bucket.number] = weakref.ref(bucket)
                self._acknowledged = max(self._acknowledged, self._log.last_sequence)
                first = bucket.first_sequence
            # Recovered records are in this log already.
            self._last_of[bucket.number] = 0 if first is None else self._log.last_sequence

    def detach(self, bucket: LoggedBucket) -> None:
        """Forget a bucket: everything that it acknowledged is in its table."""
        with self._log_lock, self._schema_state.lock:
            reference = self._buckets.get(bucket.number)
            if reference is not None and reference() in (bucket, None):
                del self._buckets[bucket.number]
                self._last_of.pop(bucket.number, None)

    def _dropped_buckets(self) -> list[int]:
        """Return the buckets that were dropped without a close: this log may be the only place of
        their last records until they are opened again."""
        return [number for number, bucket in list(self._buckets.items()) if bucket() is None]

    def _alive(self) -> list[LoggedBucket]:
        found = [reference() for reference in list(self._buckets.values())]
        return [bucket for bucket in found if bucket is not None]

    # State

    @property
    def failed(self) -> bool:
        return self._log.failed is not None

    @property
    def is_shared(self) -> bool:
        """Whether it is the log of a topic: several buckets may write to it, and readers of other
        processes follow it. A backend that is used alone has a log of its own."""
        return self._publish is not None

    @property
    def folder(self) -> Path:
        return self._log.folder

    @property
    def size(self) -> int:
        """Bytes of the log on disk."""
        return self._log.size

    @property
    def is_full(self) -> bool:
        """Whether puts must wait: the log has failed, or is twice as large as it should be."""
        return self.failed or self._log.size > 2 * self._max_bytes

    def make_room(self) -> list[Future[None]]:
        """Flush the buckets without which the oldest segment could be removed."""
        oldest = self._log.oldest_end
        with self._schema_state.lock:
            firsts = [(bucket, bucket.first_sequence) for bucket in self._alive()]
        pinning = [b for b, first in firsts if first is not None and first <= oldest]
        return [bucket.request_flush() for bucket in pinning or [b for b, _ in firsts][:1]]

    # Queueing

    def enqueue_row(
        self,
        bucket: LoggedBucket,
        chunk: Chunk,
        waiter: Waiter,
        producer: ProducerSequence | None = None,
    ) -> bool:
        """Queue a plain row; False if its schema is no longer the current one, or the producer's
        number is queued or stored already."""
        put = PendingPut([Piece(chunk, [(bucket, chunk)])], waiter, producer)
        with self._schema_state.lock:
            bucket.check_writable()
            if self._schema_state.encoder is not chunk.encoder or bucket.frozen:
                return False
            if producer is not None:
                if bucket.find_producer(producer):
                    return False
                bucket.expect(producer, put)
            self._queue.append(put)
        return True

    def enqueue_rows(
        self,
        sections: Sequence[tuple[LoggedBucket, Chunk]],
        waiter: Waiter,
        producer: ProducerSequence,
    ) -> bool:
        """Queue plain rows for several buckets as one numbered put: all of them or none.

        False if their schema is no longer the current one, or a bucket has the number queued or
        stored already.
        """
        put = PendingPut([Piece(sections[0][1], list(sections))], waiter, producer)
        with self._schema_state.lock:
            for bucket, chunk in sections:
                bucket.check_writable()
                if self._schema_state.encoder is not chunk.encoder or bucket.frozen:
                    return False
                if bucket.find_producer(producer):
                    return False
            for bucket, _ in sections:
                bucket.expect(producer, put)
            self._queue.append(put)
        return True

    def enqueue(
        self,
        prepared: Prepared,
        targets: Sequence[tuple[LoggedBucket, int]],
        waiter: Waiter,
        producer: ProducerSequence | None = None,
    ) -> PendingPut | bool:
        """Queue prepared records for their buckets: all of them or none.

        ``targets`` says how many of the rows, which are sorted by bucket, belong to each bucket.
        Returns the put that waits (of a queued number, the one that waits already), True if all
        buckets have stored the number, and False if the schema has changed since the records were
        prepared, or only some of the buckets have stored the number.
        """
        with self._schema_state.lock:
            for bucket, _ in targets:
                bucket.check_writable()
            if producer is not None:
                found = [bucket.find_producer(producer) for bucket, _ in targets]
                for queued in found:
                    if isinstance(queued, PendingPut):
                        return queued
                if any(found):
                    return all(found)
            if self._schema_state.encoder is not prepared.base:
                return False
            if any(bucket.frozen for bucket, _ in targets):
                return False
            put = PendingPut(pieces_of(prepared.chunks, targets), waiter, producer)
            self._schema_state.change(prepared, self._log.folder.parent)
            if producer is not None:
                for bucket, _ in targets:
                    bucket.expect(producer, put)
            self._queue.append(put)
        return put

    def start(self) -> None:
        """Start writing the queue in a thread."""
        if not self._writing.pending:
            try:
                self._writing.trigger()
            except loop_bridge.NoThread as exc:
                self._fail([], exc)

    def drain(self) -> Future[None]:
        """Return a future that is done when all puts queued before this call are acknowledged or
        have failed."""
        return self._writing.request()

    # Writing

    def _write(self) -> None:
        # These references keep the buckets and their locks during the write.
        buckets = self._alive()
        if buckets:
            with self._log_lock:
                self._write_queue()
        del buckets

    def write_now(self) -> None:
        """Write all queued puts in this thread."""
        self._write()

    def write_if_idle(self) -> bool:
        """Write all queued puts in this thread, unless another thread is writing."""
        if not self._log_lock.acquire(blocking=False):
            return False
        try:
            self._write_queue()
        finally:
            self._log_lock.release()
        return True

    def wait_idle(self) -> None:
        """Return when no put is between its append and its acknowledgement."""
        with self._log_lock:
            pass

    def _write_queue(self) -> None:
        with self._schema_state.lock:
            puts, self._queue = self._queue, []
        if not puts:
            return
        arrival = time.time_ns() // 1000
        try:
            entries = self._encode(_entries(puts))
        except BaseException as exc:
            self._schema = None
            self._fail(puts, exc)
            return
        try:
            payloads = [entry.payloads for entry in entries]
            lasts = self._log.append(payloads, lambda: self._preamble(entries[0].schema), arrival)
            for entry, last in zip(entries, lasts, strict=True):
                entry.logged(last)
            if self._interval == 0:
                self._sync_now()
        except BaseException as exc:
            self._schema = None
            self._log.retract()
            for bucket in _buckets_in(puts):
                bucket.metrics.log_failed()
            self._fail(puts, exc)
            return
        try:
            self._acknowledge(entries, lasts[-1], arrival)
        except BaseException as exc:  # the puts are stored, but nobody may wait forever
            _resolve(puts, exc)
            raise
        _resolve(puts, None)
        if self._interval > 0 and not self._sync_due:
            self._sync_due = True
            timer.after(self._interval / 2, weak_callback(self, GroupCommit._request_sync))

    def _acknowledge(self, entries: list[_Entry], last: int, arrival: int) -> None:
        chunks: dict[LoggedBucket, list[Chunk]] = {}
        producers: dict[LoggedBucket, list[ProducerSequence]] = {}
        for entry in entries:
            for piece in entry.pieces:
                for bucket, chunk in piece.sections:
                    chunks.setdefault(bucket, []).append(chunk)
                    numbers = producers.setdefault(bucket, [])
                    if entry.producer is not None and entry.producer not in numbers:
                        numbers.append(entry.producer)
        counts = {bucket: sum(chunk.count for chunk in part) for bucket, part in chunks.items()}
        for bucket, part in chunks.items():
            self._last_of[bucket.number] = part[-1].sequence
        with self._schema_state.lock:
            for bucket, part in chunks.items():
                bucket.accept_logged(part, arrival, producers[bucket])
            self._schema_state.acknowledge(entries[-1].pieces[-1].whole.encoder)
            self._acknowledged = last
        if self._publish is not None:
            self._publish(last, self._log.synced_sequence)
        unsynced = self._unsynced
        for bucket, count in counts.items():
            bucket.report_log(unsynced)
            bucket.after_accepting(count)
        if self._log.size > self._max_bytes:
            self.make_room()

    def _fail(self, puts: list[PendingPut], exc: BaseException) -> None:
        """Fail these puts, and all that queued up behind them and rely on their schema."""
        with self._schema_state.lock:
            puts, self._queue = puts + self._queue, []
            self._schema_state.roll_back()
            for put in puts:
                if put.producer is not None:
                    for bucket in _buckets_in([put]):
                        bucket.expect(put.producer, None)
        if not isinstance(exc, WALError):
            wrapped = WALError(f"cannot log to {self._log.folder}: {exc}")
            wrapped.__cause__ = exc
            exc = wrapped
        _resolve(puts, exc)
        if self.failed:
            for bucket in self._alive()[:1]:
                bucket.request_flush()

    # Encoding

    def _encode(self, entries: list[_Entry]) -> list[_Entry]:
        """Fill in the frames of the entries."""
        next_row: dict[LoggedBucket, tuple[int, int]] = {}
        with self._schema_state.lock:
            for entry in entries:
                for piece in entry.pieces:
                    for bucket, _ in piece.sections:
                        if bucket not in next_row:
                            next_row[bucket] = bucket.next_row
        for entry in entries:
            producers = [] if entry.producer is None else [entry.producer]
            for piece in entry.pieces:
                schema = piece.whole.schema
                if self._schema is not schema and self._schema != schema:
                    self._schema = schema
                    entry.payloads.append(self._schema_frame(schema))
                sections = []
                for bucket, chunk in piece.sections:
                    epoch, offset = next_row[bucket]
                    next_row[bucket] = epoch, offset + chunk.count
                    sections.append(Section(bucket.number, epoch, offset, chunk.count, producers))
                entry.payloads.append(self._frame(piece, sections))
        return entries

    def _frame(self, piece: Piece, sections: list[Section]) -> Payload:
        if piece.whole.is_open:
            rows = [row for _, chunk in piece.sections for row in chunk.rows or ()]
            return rows_payload(rows, sections, self._codec)
        return batch_payload(piece.whole.batch, sections, self._codec)

    def _schema_frame(self, schema: pa.Schema) -> Payload:
        if self._schema_payload is None or self._schema_payload[0] is not schema:
            self._schema_payload = schema, schema_payload(schema)
        return self._schema_payload[1]

    def _preamble(self, schema: pa.Schema) -> list[Payload]:
        """Return the first frames of a new segment, which make it readable by itself."""
        start = encode_start(SegmentStart(self._log.last_written, dict(self._last_of)))
        return [Payload(START, codec.NONE, len(start), start), self._schema_frame(schema)]

    # Syncing

    @property
    def _unsynced(self) -> int:
        return max(0, self._log.last_written - self._log.synced_sequence)

    def _sync_now(self) -> None:
        started = time.perf_counter()
        self._log.sync()
        seconds, unsynced = time.perf_counter() - started, self._unsynced
        for bucket in self._alive():
            bucket.metrics.log_synced(seconds, unsynced)

    def _request_sync(self) -> None:
        self._sync_due = False
        self._syncing.request()

    def _sync(self) -> None:
        """Sync at the interval. If that fails, flush the records to the tables instead."""
        try:
            if not self.failed and not self._log.closed:
                self._sync_now()
                if self._publish is not None:
                    self._publish(self._acknowledged, self._log.synced_sequence)
        except WALError as exc:
            if self._log.closed:  # closed meanwhile: everything is in the tables
                return
            log.error("%s; flushing to the table instead", exc)
            for number, bucket in enumerate(self._alive()):
                bucket.metrics.log_failed()
                if not number:
                    bucket.request_flush()  # it flushes the others too

    def sync_through(self, sequence: int) -> None:
        """Sync the log up to ``sequence``, unless that is done."""
        if self._log.synced_sequence < sequence and not self.failed:
            self._sync_now()
            if self._publish is not None:
                self._publish(self._acknowledged, self._log.synced_sequence)

    def sync_at_exit(self) -> bool:
        """Sync the frames that the interval has not synced yet; False if the log has failed."""
        try:
            if self._unsynced and not self.failed and not self._log.closed:
                self._sync_now()
        except WALError as exc:
            log.error("%s; flushing to the table instead", exc)
        return not self.failed

    # Around a flush

    def seal(self) -> None:
        """Write later frames to a new segment."""
        self._log.seal()

    @property
    def last_sequence(self) -> int:
        return self._log.last_sequence

    def release(self) -> None:
        """Remove the segments whose records are all in the tables."""
        with self._schema_state.lock:
            if self._dropped_buckets():
                return
            firsts = [bucket.first_sequence for bucket in self._alive()]
            pinned = [first for first in firsts if first is not None]
            released = min(pinned) - 1 if pinned else self._acknowledged
        self._log.release(released)
        unsynced = self._unsynced
        for bucket in self._alive():
            bucket.report_log(unsynced)

    def restart_after_failure(self) -> None:
        """Flush all buckets, then drop the failed log and start over.

        Call without a flush lock: this takes those of all buckets, one after the other.
        """
        with self._restarting:
            if not self.failed:
                return
            # No append succeeds any more: after the last acknowledgement all is in the buffers.
            self.wait_idle()
            buckets = self._alive()
            if gone := self._dropped_buckets():
                raise WALError(
                    f"the log in {self._log.folder} failed ({self._log.failed}) and cannot start "
                    f"over: buckets {gone} were dropped without close(), and it may be "
                    "the only place of their last records. Open them again"
                )
            # The only bucket of a log skips frames that were written and never acknowledged. With
            # several buckets a crash now must find such a put in all of them, or in none.
            dropped = self._log.last_sequence if len(buckets) == 1 else 0
            for bucket in buckets:
                bucket.flush_from_failed_log(dropped)
            self._log.reset()
            with self._log_lock:
                self._schema = None
                self._acknowledged = self._log.last_sequence
            for bucket in buckets:
                bucket.report_log(0)

    @property
    def close_files(self) -> Callable[[], None]:
        """A callable that closes the log's files and keeps neither this nor a bucket alive."""
        return self._log.close

    def close(self) -> None:
        self._log.close()


def _entries(puts: list[PendingPut]) -> list[_Entry]:
    """Return the entries to log; adjacent plain rows of one schema share an entry."""
    entries: list[_Entry] = []
    rows: dict[LoggedBucket, Chunk] = {}
    nbytes = 0
    for put in puts:
        if not put.is_row:
            rows = {}
            entries.append(_Entry(put.pieces, put.producer))
            continue
        ((bucket, chunk),) = put.pieces[0].sections
        tail = rows.get(bucket)
        first = next(iter(rows.values()), chunk)
        nbytes += chunk.nbytes
        fits = nbytes < MAX_BATCH_BYTES and first.encoder is chunk.encoder
        if tail is not None and fits and tail.can_take(chunk.encoder, chunk.count, chunk.nbytes):
            tail.join(chunk)
        elif tail is None and rows and fits:
            rows[bucket] = chunk
            entries[-1].pieces[0].sections.append((bucket, chunk))
        else:
            rows, nbytes = {bucket: chunk}, chunk.nbytes
            entries.append(_Entry([Piece(chunk, [(bucket, chunk)])], None))
    return entries


def _buckets_in(puts: list[PendingPut]) -> set[LoggedBucket]:
    return {b for put in puts for piece in put.pieces for b, _ in piece.sections}


def _resolve(puts: list[PendingPut], exc: BaseException | None) -> None:
    if len(puts) == 1:
        waiter = puts[0].waiter
        waiter.sink.deliver([waiter], exc)
        return
    by_sink: dict[Sink, list[Waiter]] = {}
    for put in puts:
        by_sink.setdefault(put.waiter.sink, []).append(put.waiter)
    for sink, waiters in by_sink.items():
        sink.deliver(waiters, exc)
