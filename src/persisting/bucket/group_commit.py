"""Group commit: the puts of one or more buckets, written to one log and synced together.

Puts queue up. One thread at a time takes all queued puts, appends them as frames in one write,
syncs once if ``wal_sync_interval`` is 0, and acknowledges them together. The callers wait in event
loops or threads; each brings a :class:`Waiter`, so that nothing here depends on an event loop.

In an object store several groups may be under way at the same time
(:mod:`persisting.bucket.lanes`).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import PurePath
from typing import Any, TypeVar

import pyarrow as pa

from persisting import codec
from persisting.bucket.chunk import Chunk, Prepared, copy_row
from persisting.bucket.delays import Delay, is_delay
from persisting.bucket.flusher import FlushTurns
from persisting.bucket.lanes import Grouping, Lane, Lanes
from persisting.bucket.log_frames import FrameEncoder
from persisting.bucket.pending_puts import (
    LogEntry,
    LoggedBucket,
    PendingPut,
    PendingRow,
    Piece,
    QueuedPut,
    Sink,
    Waiter,
    buckets_in,
    log_entries,
    pieces_of,
    resolve,
)
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.bucket.schema_state import SchemaState
from persisting.concurrency import loop_bridge, timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.errors import OwnershipLost, WALError
from persisting.options import PersistingOptions
from persisting.wal import AppendLog, Payload
from persisting.wal.object_log import ObjectLog

log = logging.getLogger("persisting")

_W = TypeVar("_W", bound=Waiter)

_QUICK_SYNC_SECONDS = 0.005
_NOTHING_KEPT = 1 << 63


class GroupCommit:
    """Writes the puts of its buckets to one log."""

    def __init__(
        self,
        log: AppendLog,
        schema: SchemaState,
        options: PersistingOptions,
        publish: Callable[[int, int], None] | None = None,
        group: Grouping | None = None,
    ) -> None:
        """``publish`` tells readers in other processes the acknowledged and the synced
        sequence. ``group`` says when to write, by default immediately; a log with it is slow to
        write."""
        self._log, self._schema_state = log, schema
        self._frames = FrameEncoder(codec.codec_id(options.compression))
        self._interval = options.wal_sync_interval
        self._max_bytes = options.max_wal_size
        self._publish = publish
        self._buckets: dict[int, weakref.ref[LoggedBucket]] = {}
        self._last_of: dict[int, int] = {}
        """By bucket, the last sequence in this log that holds records of it."""
        self._kept_from = _NOTHING_KEPT
        """Nothing from this sequence on is released: a bucket that was closed needs it."""
        self._queue: list[QueuedPut] = []
        self._group = group
        self._writing = CoalescedTask(
            weak_callback(self, GroupCommit._write),
            short=group is None,
            submit=None if group is None else loop_bridge.submit_group,
        )
        self._queued_bytes = 0
        self._queued_at = 0.0
        """When the first put of the queue was seen, in an object store."""
        self._lanes = Lanes()
        self._turn_is_over = weak_callback(self, GroupCommit._end_turn)
        self._syncing = CoalescedTask(weak_callback(self, GroupCommit._sync))
        self._sync_due = False
        self._sync_seconds = 0.0
        """How long the last sync took."""
        self._acknowledged = log.last_sequence
        self._log_lock = threading.Lock()
        self._restarting = threading.Lock()
        self.flush_turns = FlushTurns()

    # Buckets

    def attach(self, bucket: LoggedBucket, table_sequence: int) -> None:
        """Take puts of a bucket, whose table holds everything up to ``table_sequence``."""
        with self._log_lock:
            self._lanes.wait_settled()
            self._log.skip_to(table_sequence + 1)
            with self._schema_state.lock:
                self._buckets[bucket.number] = weakref.ref(bucket)
                self._acknowledged = max(self._acknowledged, self._log.last_sequence)
                # Recovered records are already in this log. Frames without records may follow them
                # and are released: the next segment must not say that records are missing.
                self._last_of[bucket.number] = bucket.buffer.last_sequence or 0

    def detach(self, bucket: LoggedBucket) -> None:
        """Forget a bucket. If its table lacks records, because it was lost in an object store, this
        log keeps them for the next owner."""
        with self._log_lock, self._schema_state.lock:
            if bucket.buffer.first_sequence is not None:
                self._kept_from = min(bucket.buffer.first_sequence, self._kept_from)
            reference = self._buckets.get(bucket.number)
            if reference is not None and reference() in (bucket, None):
                del self._buckets[bucket.number]
                self._last_of.pop(bucket.number, None)

    def _dropped_buckets(self) -> list[int]:
        """Return the buckets that were dropped without a close: this log may hold the only copy of
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
    def syncs_quickly(self) -> bool:
        """Whether an event loop that serves one caller may wait for a sync, by the last one."""
        return self._sync_seconds < _QUICK_SYNC_SECONDS

    @property
    def is_shared(self) -> bool:
        """Whether it is the log of a topic: several buckets may write to it, and readers of other
        processes follow it. A backend that is used alone has a log of its own."""
        return self._publish is not None

    @property
    def folder(self) -> PurePath:
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
            firsts = [(bucket, bucket.buffer.first_sequence) for bucket in self._alive()]
        pinning = [b for b, first in firsts if first is not None and first <= oldest]
        return [bucket.flusher.request() for bucket in pinning or [b for b, _ in firsts][:1]]

    # Queueing

    def enqueue_row(
        self,
        bucket: LoggedBucket,
        record: Any,
        waiter: Callable[[], _W],
        producer: ProducerSequence | None = None,
        *,
        start: bool = True,
    ) -> _W | None:
        """Queue a plain record and return its waiter; with ``start``, have it written.

        None if it needs :func:`prepare` and :meth:`enqueue`, or if the producer's number is already
        queued or stored.
        """
        if producer is not None and is_delay(producer):
            bucket.delays.check_room()
        encoder = self._schema_state.encoder
        copied = copy_row(encoder, record)
        if copied is None:
            return None
        row, nbytes = copied
        caller = waiter()
        if producer is not None:
            chunk = Chunk(encoder, rows=[row], nbytes=nbytes)
            if not self.enqueue_rows([(bucket, chunk)], caller, producer):
                return None
        else:
            put = PendingRow(bucket, encoder, row, nbytes, caller)
            with self._schema_state.lock:
                bucket.lifecycle.check_writable()
                if self._schema_state.encoder is not encoder or bucket.puts.frozen:
                    return None
                self._queue.append(put)
                self._queued_bytes += nbytes
        if start:
            self.start(caller.sink)
        return caller

    def enqueue_rows(
        self,
        sections: Sequence[tuple[LoggedBucket, Chunk]],
        waiter: Waiter,
        producer: ProducerSequence,
    ) -> bool:
        """Queue plain rows for several buckets as one numbered put: all of them or none.

        False if their schema is no longer the current one, or a bucket has already queued or stored
        the number.
        """
        put = PendingPut([Piece(sections[0][1], list(sections))], waiter, producer)
        with self._schema_state.lock:
            for bucket, chunk in sections:
                bucket.lifecycle.check_writable()
                if self._schema_state.encoder is not chunk.encoder or bucket.puts.frozen:
                    return False
                if bucket.puts.find_producer(producer):
                    return False
            for bucket, _ in sections:
                bucket.puts.expect(producer, put)
            self._queue.append(put)
            self._queued_bytes += put.nbytes
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
        Returns the put that waits (if the number is queued, the one that is already waiting), True
        if all buckets have stored the number, and False if the schema has changed since the records
        were prepared, or only some of the buckets have stored the number.
        """
        with self._schema_state.lock:
            for bucket, _ in targets:
                bucket.lifecycle.check_writable()
            if producer is not None:
                found = [bucket.puts.find_producer(producer) for bucket, _ in targets]
                for queued in found:
                    if isinstance(queued, PendingPut):
                        return queued
                if any(found):
                    return all(found)
            if self._schema_state.encoder is not prepared.base:
                return False
            if any(bucket.puts.frozen for bucket, _ in targets):
                return False
            put = PendingPut(pieces_of(prepared.chunks, targets), waiter, producer)
            self._schema_state.change(prepared, self._log.folder.parent)
            if producer is not None:
                for bucket, _ in targets:
                    bucket.puts.expect(producer, put)
            self._queue.append(put)
            self._queued_bytes += put.nbytes
        return put

    def start(self, sink: Sink | None = None) -> None:
        """Start writing the queue in a thread.

        ``sink`` is that of the put that was queued last. A log that is slow to write waits until
        the callers of the same sink that can continue now have put, too: they then share a write.
        """
        if self._group is None or sink is None:
            return self._start_now()
        now, puts = time.monotonic(), len(self._queue)
        if puts <= 1:
            self._queued_at = now
        is_ripe = self._lanes.is_ripe(puts, self._queued_bytes, now - self._queued_at)
        if is_ripe or not sink.after_turn(self._turn_is_over):
            self._start_now()
        return None

    def _end_turn(self) -> None:
        """Start writing what the callers of an event loop have put in one of its turns."""
        self._lanes.turn_is_over()
        if self._queue:
            self._start_now()

    def _start_now(self) -> None:
        self._lanes.queue_has_grown(len(self._queue), self._queued_bytes)
        if not self._writing.pending:
            try:
                self._writing.trigger()
            except loop_bridge.NoThread as exc:
                self._fail([], exc)

    def drain(self) -> Future[None]:
        """Return a future that is done when all puts queued before this call are acknowledged or
        have failed."""
        begun = self._writing.request()
        if self._group is None:
            return begun
        settled: Future[None] = Future()
        begun.add_done_callback(lambda _: self._lanes.follow(settled))
        return settled

    # Writing

    def _write(self) -> None:
        # These references keep the buckets and their locks during the write.
        buckets = self._alive()
        if buckets:
            if self._group is not None:
                self._wait_for_more(self._group)
                self._begin_queued(self._group)
            else:
                self._write_queued()
        del buckets

    def _write_queued(self) -> None:
        """Write all puts that are queued now."""
        with self._log_lock:
            with self._schema_state.lock:
                left = len(self._queue)
            while left > 0 and (written := self._write_queue()):  # the queue may have failed
                left -= written

    def _wait_for_more(self, group: Grouping) -> None:
        """Wait until the group has waited as long as it may, or is large enough."""
        end = time.monotonic() + group.linger
        while (left := end - time.monotonic()) > 0:
            if self._queued_bytes >= group.nbytes:
                return
            time.sleep(min(left, max(0.001, group.linger / 8)))

    def write_now(self) -> None:
        """Write all puts that are queued now, without waiting for more, and return when they are
        acknowledged or have failed."""
        buckets = self._alive()
        if buckets:
            if self._group is not None:
                self._begin_queued(self._group)
                self._lanes.wait_settled()
            else:
                self._write_queued()
        del buckets

    def write_if_idle(self) -> bool:
        """Write all queued puts in this thread, unless another thread is writing."""
        if self._group is not None or not self._log_lock.acquire(blocking=False):
            return False
        try:
            self._write_queue()
        finally:
            self._log_lock.release()
        return True

    def wait_idle(self) -> None:
        """Wait until no put is between its append and its acknowledgement."""
        with self._log_lock:
            self._lanes.wait_settled()

    def _write_queue(self) -> int:
        """Write all puts in the queue; return how many there were."""
        with self._schema_state.lock:
            puts, self._queue, self._queued_bytes = self._queue, [], 0
        if not puts:
            return 0
        arrival = time.time_ns() // 1000
        try:
            entries = self._encode(log_entries(puts))
        except BaseException as exc:
            self._frames.forget_schema()
            self._fail(puts, exc)
            return len(puts)
        try:
            payloads = [entry.payloads for entry in entries]
            lasts = self._log.append(payloads, lambda: self._preamble(entries[0].schema), arrival)
            for entry, last in zip(entries, lasts, strict=True):
                entry.logged(last)
            if self._interval == 0:
                self._sync_now()
        except BaseException as exc:
            self._frames.forget_schema()
            self._log.retract()
            for bucket in buckets_in(puts):
                bucket.metrics.log_failed()
            self._fail(puts, exc)
            return len(puts)
        try:
            self._acknowledge(entries, lasts[-1], arrival)
        except BaseException as exc:  # the puts are stored, but nobody may wait forever
            resolve(puts, exc)
            raise
        resolve(puts, None)
        if self._interval > 0 and not self._sync_due:
            self._sync_due = True
            timer.after(self._interval / 2, weak_callback(self, GroupCommit._request_sync))
        return len(puts)

    # Groups, in an object store

    def _begin_queued(self, group: Grouping) -> None:
        """Begin to store all puts that are queued now, in as many groups as it takes."""
        with self._log_lock:
            with self._schema_state.lock:
                left = len(self._queue)
            while left > 0:
                self._lanes.wait_for_one(lambda: (len(self._queue), self._queued_bytes))
                begun = self._begin_group(group)
                if not begun:
                    return  # a group before these puts has failed, and they failed with it
                left -= begun

    def _begin_group(self, group: Grouping) -> int:
        """Begin to store the next group of puts; return how many there are."""
        assert isinstance(self._log, ObjectLog)
        object_log = self._log
        with self._schema_state.lock:
            puts, rest = self._queue, []
            count = self._lanes.count_of(len(puts))
            if count < len(puts) or self._queued_bytes >= group.nbytes:
                count = group.count_of(puts[:count])
                puts, rest = puts[:count], puts[count:]
            self._queue, self._queued_bytes = rest, sum(put.nbytes for put in rest)
            self._queued_at = time.monotonic()
        if not puts:
            return 0
        arrival = time.time_ns() // 1000
        try:
            lane = Lane(puts, self._encode(log_entries(puts)), arrival)
        except BaseException as exc:
            self._frames.forget_schema()
            self._lanes.wait_settled()  # puts fail in their order
            self._fail(puts, exc)
            return len(puts)
        self._lanes.add(lane, len(self._queue))
        with self._schema_state.lock:
            self._lanes.count_rows(lane)
        try:
            payloads = [entry.payloads for entry in lane.entries]
            lane.begun = object_log.begin(
                payloads, lambda: self._preamble(lane.entries[0].schema), arrival
            )
        except BaseException as exc:
            self._frames.forget_schema()
            lane.failure = exc
            self._lanes.done(lane, self._settle)
            return len(puts)

        def store() -> None:
            self._lanes.store(lane, object_log.store, self._settle)

        try:
            loop_bridge.submit_request(store)
        except BaseException:  # no thread: a slot that is begun must be stored, or fail
            store()
        return len(puts)

    def _settle(self, lane: Lane) -> None:
        """Acknowledge the puts of a group, or fail them."""
        assert isinstance(self._log, ObjectLog)
        if lane.failure is None:
            assert lane.begun is not None
            lasts = lane.begun.lasts
            try:
                self._log.finish(lane.begun)
                for entry, last in zip(lane.entries, lasts, strict=True):
                    entry.logged(last)
                if self._interval == 0:
                    self._sync_now()
                self._acknowledge(lane.entries, lasts[-1], lane.arrival, lane)
            except BaseException as exc:  # the puts are stored, but nobody may wait forever
                resolve(lane.puts, exc)
                raise
            resolve(lane.puts, None)
            return
        if lane.begun is not None:
            self._log.break_off(lane.failure)
        with self._schema_state.lock:
            self._lanes.uncount_rows(lane)
        for bucket in buckets_in(lane.puts):
            bucket.metrics.log_failed()
        self._fail(lane.puts, lane.failure)

    def _acknowledge(
        self, entries: list[LogEntry], last: int, arrival: int, lane: Lane | None = None
    ) -> None:
        chunks: dict[LoggedBucket, list[Chunk]] = {}
        producers: dict[LoggedBucket, list[ProducerSequence]] = {}
        delays: dict[LoggedBucket, list[Delay]] = {}
        for entry in entries:
            for piece in entry.pieces:
                for bucket, chunk in piece.sections:
                    if entry.producer is not None and is_delay(entry.producer):
                        before = sum(earlier.count for earlier in chunks.get(bucket, ()))
                        delay = before, chunk.count, entry.producer[1]
                        delays.setdefault(bucket, []).append(delay)
                    chunks.setdefault(bucket, []).append(chunk)
                    numbers = producers.setdefault(bucket, [])
                    if entry.producer is not None and entry.producer not in numbers:
                        numbers.append(entry.producer)
        counts = {bucket: sum(chunk.count for chunk in part) for bucket, part in chunks.items()}
        with self._schema_state.lock:
            if lane is not None:
                self._lanes.uncount_rows(lane)
            for bucket, part in chunks.items():
                self._last_of[bucket.number] = part[-1].sequence
                bucket.puts.accept_logged(part, arrival, producers[bucket], delays.get(bucket, ()))
            self._schema_state.acknowledge(entries[-1].pieces[-1].whole.encoder)
            self._acknowledged = last
        if self._publish is not None:
            self._publish(last, self._log.synced_sequence)
        unsynced = self._unsynced
        for bucket, count in counts.items():
            bucket.puts.report_log(unsynced)
            bucket.puts.after_accepting(count)
        if self._log.size > self._max_bytes:
            self.make_room()

    def _fail(self, puts: list[QueuedPut], exc: BaseException) -> None:
        """Fail these puts, and all that queued up after them and rely on their schema."""
        with self._schema_state.lock:
            puts, self._queue, self._queued_bytes = puts + self._queue, [], 0
            self._schema_state.roll_back()
            for put in puts:
                if put.producer is not None:
                    for bucket in buckets_in([put]):
                        bucket.puts.expect(put.producer, None)
        if not isinstance(exc, (WALError, OwnershipLost)):
            wrapped = WALError(f"cannot log to {self._log.folder}: {exc}")
            wrapped.__cause__ = exc
            exc = wrapped
        resolve(puts, exc)
        if self.failed:
            for bucket in self._alive()[:1]:
                bucket.flusher.request()

    # Encoding

    def _encode(self, entries: list[LogEntry]) -> list[LogEntry]:
        """Fill in the frames of the entries."""
        next_row: dict[LoggedBucket, tuple[int, int]] = {}
        with self._schema_state.lock:
            for entry in entries:
                for piece in entry.pieces:
                    for bucket, _ in piece.sections:
                        if bucket not in next_row:
                            first = bucket.buffer.end + self._lanes.rows_of(bucket)
                            next_row[bucket] = bucket.buffer.epoch, first
        return self._frames.encode(entries, next_row)

    def _preamble(self, schema: pa.Schema) -> list[Payload]:
        """Return the first frames of a new segment, which make it readable by itself."""
        ahead = self._lanes.last_sequences()
        with self._schema_state.lock:  # after the lanes: what was settled since is in both
            last_of = dict(self._last_of)
        for lasts in ahead:
            for bucket, last in lasts.items():
                last_of[bucket] = max(last, last_of.get(bucket, 0))
        return self._frames.preamble(self._log.last_written, last_of, schema)

    # Syncing

    @property
    def _unsynced(self) -> int:
        return max(0, self._log.last_written - self._log.synced_sequence)

    def _sync_now(self) -> None:
        started = time.perf_counter()
        self._log.sync()
        self._sync_seconds = seconds = time.perf_counter() - started
        unsynced = self._unsynced
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
                    bucket.flusher.request()  # it flushes the others too

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
            firsts = [bucket.buffer.first_sequence for bucket in self._alive()]
            pinned = [first for first in firsts if first is not None]
            released = min(pinned) - 1 if pinned else self._acknowledged
            released = min(released, self._kept_from - 1)
        self._log.release(released)
        unsynced = self._unsynced
        for bucket in self._alive():
            bucket.puts.report_log(unsynced)

    def restart_after_failure(self) -> None:
        """Flush all buckets, then drop the failed log and start over.

        Call without a flush lock: this takes those of all buckets, one after the other.
        """
        with self._restarting:
            if not self.failed:
                return
            # No append can succeed now: after the last acknowledgement all is in the buffers.
            self.wait_idle()
            last = self._log.last_sequence
            buckets = self._alive()
            if gone := self._dropped_buckets():
                raise WALError(
                    f"the log in {self._log.folder} failed ({self._log.failed}) and cannot start "
                    f"over: buckets {gone} were dropped without close(), and it may hold "
                    "the only copy of their last records. Open them again"
                )
            is_over = isinstance(self._log, ObjectLog) and self._log.lost
            if self._kept_from != _NOTHING_KEPT and not is_over:
                raise WALError(
                    f"the log in {self._log.folder} failed ({self._log.failed}) and cannot start "
                    "over: a bucket was closed without a flush, and the log holds the only copy "
                    "of its last records. Open the topic again"
                )
            # The only bucket of a log skips frames that were written and never acknowledged. With
            # several buckets a crash now must find such a put in all of them, or in none. A log
            # that was given up may hold one, which the next owner looks for.
            dropped = last if len(buckets) == 1 and not is_over else 0
            for bucket in buckets:
                bucket.flush_job.commit_buffer(dropped)
            self._log.reset()
            with self._log_lock:
                self._frames.forget_schema()
                # Not the log's last sequence: the next group may already be under way.
                self._acknowledged = max(self._acknowledged, last)
            for bucket in buckets:
                bucket.puts.report_log(0)

    @property
    def close_files(self) -> Callable[[], None]:
        """A callable that closes the log's files and keeps neither this nor a bucket alive."""
        return self._log.close

    def close(self) -> None:
        self._log.close()
