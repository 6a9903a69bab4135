"""Group commit: how a bucket writes, syncs and recovers its log.

Puts queue up. One task at a time takes all queued puts, appends them as frames in one write, syncs
once if ``wal_sync_interval`` is 0, and acknowledges them together.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from persisting import codec
from persisting.bucket.bucket_part import BucketPart
from persisting.bucket.chunk import ROWS_AT_ONCE, Chunk
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.concurrency import loop_bridge, timer
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.errors import WALError
from persisting.fs import FileSystem
from persisting.options import PersistingOptions
from persisting.records import RecordEncoder
from persisting.wal import FOLDER, Log, Payload, Recovery
from persisting.wal.frame import MARK, ROWS, SCHEMA, Frame

if TYPE_CHECKING:
    from persisting.bucket.bucket import Bucket

log = logging.getLogger("persisting")

_MIN_COMPRESSED_BYTES = 256
_JOINED_BYTES = 16 * 1024 * 1024


class PendingPut:
    """One put in the queue: chunks, producer sequence, and the future to resolve in its loop."""

    __slots__ = ("box", "chunks", "future", "producer")

    def __init__(self, chunks: list[Chunk], producer: ProducerSequence | None = None) -> None:
        self.chunks, self.producer = chunks, producer
        self.box = loop_bridge.mailbox()
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    def already_stored(cls) -> PendingPut:
        """Return an acknowledged put without records, for a retry of a stored one."""
        pending = cls([])
        pending.future.set_result(None)
        return pending


class GroupCommit(BucketPart):
    """Writes the puts of one open bucket to its log."""

    def __init__(self, bucket: Bucket, log: Log, options: PersistingOptions) -> None:
        super().__init__(bucket)
        self._log = log
        self._codec = codec.codec_id(options.compression)
        self._interval = options.wal_sync_interval
        self._max_bytes = options.max_wal_size
        self._queue: list[PendingPut] = []
        self._writing = CoalescedTask(weak_callback(self, GroupCommit._write), short=True)
        self._syncing = CoalescedTask(weak_callback(self, GroupCommit._sync))
        self._sync_due = False
        self._schema: pa.Schema | None = None
        self._preamble: tuple[pa.Schema, Payload] | None = None
        self._log_lock = threading.Lock()

    @property
    def failed(self) -> bool:
        return self._log.failed is not None

    @property
    def size(self) -> int:
        return self._log.size

    @property
    def wants_flush(self) -> bool:
        return self._log.size > self._max_bytes

    @property
    def is_full(self) -> bool:
        """Whether puts must wait: the log has failed, or is twice as large as it should be."""
        return self.failed or self._log.size > 2 * self._max_bytes

    def enqueue(self, put: PendingPut) -> None:
        """Queue a put. Call with the bucket's ``state_lock`` held: puts are logged in the order
        in which they were checked."""
        self._queue.append(put)

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
        bucket = self._bucket_ref()
        if bucket is not None:  # this reference keeps the bucket and its lock during the write
            with self._log_lock:
                self._write_queue()

    def write_now(self) -> None:
        """Write all queued puts in this thread."""
        self._write()

    def wait_idle(self) -> None:
        """Return when no put is between its append and its acknowledgement."""
        with self._log_lock:
            pass

    def _write_queue(self) -> None:
        with self._bucket.state_lock:
            puts, self._queue = self._queue, []
        if not puts:
            return
        arrival = time.time_ns() // 1000
        try:
            groups = _grouped(puts)
            payloads, preamble = self._encode(groups)
        except BaseException as exc:
            self._schema = None
            self._fail(puts, exc)
            return
        try:
            lasts = self._log.append(payloads, preamble, arrival)
            for group, last in zip(groups, lasts, strict=True):
                for chunk in group.chunks:
                    chunk.sequence = last
            if self._interval == 0:
                self._sync_now()
        except BaseException as exc:
            self._schema = None
            self._log.retract()
            self._bucket.metrics.log_failed()
            self._fail(puts, exc)
            return
        producers = [group.producer for group in groups if group.producer is not None]
        chunks = [chunk for group in groups for chunk in group.chunks]
        try:
            self.report()
            self._bucket.acknowledge(chunks, arrival, producers)
        except BaseException as exc:  # the puts are stored, but nobody may wait forever
            _resolve(puts, exc)
            raise
        _resolve(puts, None)
        if self._interval > 0 and not self._sync_due:
            self._sync_due = True
            timer.after(self._interval / 2, weak_callback(self, GroupCommit._request_sync))

    def _fail(self, puts: list[PendingPut], exc: BaseException) -> None:
        """Fail these puts, and all that queued up behind them and rely on their schema."""
        with self._bucket.state_lock:
            puts, self._queue = puts + self._queue, []
            self._bucket.roll_back_pending([p.producer for p in puts if p.producer is not None])
        if not isinstance(exc, WALError):
            wrapped = WALError(f"cannot log to {self._log.folder}: {exc}")
            wrapped.__cause__ = exc
            exc = wrapped
        _resolve(puts, exc)
        if self.failed:
            self._bucket.request_flush()

    def _encode(self, groups: list[PendingPut]) -> tuple[list[list[Payload]], Payload]:
        first = groups[0].chunks[0].schema
        if self._preamble is None or self._preamble[0] is not first:
            self._preamble = first, _schema_payload(first)
        preamble = self._preamble[1]
        schema = self._schema
        payloads = []
        for group in groups:
            frames = [] if group.producer is None else [_producer_payload(group.producer)]
            for chunk in group.chunks:
                if schema is not chunk.schema and schema != chunk.schema:
                    schema = chunk.schema
                    frames.append(_schema_payload(schema))
                frames.append(self._rows_payload(chunk.batch))
            payloads.append(frames)
        self._schema = schema
        return payloads, preamble

    def _rows_payload(self, batch: pa.RecordBatch) -> Payload:
        raw = memoryview(batch.serialize())
        if self._codec != codec.NONE and len(raw) >= _MIN_COMPRESSED_BYTES:
            packed = codec.compress(self._codec, raw)
            if len(packed) < len(raw):
                return Payload(ROWS, self._codec, len(raw), packed)
        return Payload(ROWS, codec.NONE, len(raw), raw)

    # Syncing

    @property
    def _unsynced(self) -> int:
        return self._log.last_sequence - self._log.synced_sequence

    def _sync_now(self) -> None:
        started = time.perf_counter()
        self._log.sync()
        self._bucket.metrics.log_synced(time.perf_counter() - started, self._unsynced)

    def _request_sync(self) -> None:
        self._sync_due = False
        self._syncing.request()

    def _sync(self) -> None:
        """Sync at the interval. If that fails, flush the records to the table instead."""
        try:
            if not self.failed and not self._log.closed:
                self._sync_now()
        except WALError as exc:
            if self._log.closed:  # closed meanwhile: everything is in the table
                return
            log.error("%s; flushing to the table instead", exc)
            self._bucket.metrics.log_failed()
            self._bucket.request_flush()

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

    def release(self, sequence: int) -> None:
        """Delete segments up to ``sequence``, which the table holds."""
        self._log.release(sequence)
        self.report()

    def report(self) -> None:
        """Update the gauges of the log."""
        self._bucket.metrics.log_written(self._log.size, self._unsynced)

    def restart(self, sequence: int) -> None:
        """Start a new log after a failure; the table holds everything that was acknowledged."""
        self._log.reset(sequence)
        self._schema = None
        self._bucket.metrics.log_written(0, 0)

    @property
    def close_files(self) -> Callable[[], None]:
        """A callable that closes the log's files and keeps neither this nor the bucket alive."""
        return self._log.close

    def close(self) -> None:
        self._log.close()


def recover(bucket: Bucket, fs: FileSystem) -> Log:
    """Replay a left-over log into the bucket, each record once; return the log to append to."""
    folder = bucket.options.storage_path / FOLDER
    fs.make_folder(folder)
    fs.sync_folder(folder.parent)
    after = bucket.table.sequence
    recovery = Recovery(folder, fs, after)
    encoder: RecordEncoder | None = None
    records = 0
    chunks = RecoveredChunks(bucket)
    for frame in recovery.frames():
        if frame.kind == SCHEMA:
            chunks.hand_over()
            encoder = RecordEncoder(_read_schema(frame, folder), bucket.rules)
        elif frame.kind == MARK and frame.sequence > after:
            # Remember it before its rows: a flush in the middle of them leaves the rest of the
            # rows in the log.
            chunks.hand_over()
            bucket.producers.remember([_read_producer(frame, folder)])
        elif frame.kind == ROWS and frame.sequence > after:
            chunk = _read_chunk(frame, encoder, folder)
            records += chunk.count
            chunks.add(chunk)
        elif frame.kind not in (SCHEMA, ROWS, MARK):
            raise WALError(
                f"the log in {folder} holds a frame of unknown kind {frame.kind} at sequence "
                f"{frame.sequence}; it was written by a newer version, upgrade persisting"
            )
    chunks.hand_over()
    if records:
        bucket.metrics.recovered(records)
        log.info("recovered %d records from the log in %s", records, folder)
    recovered = recovery.open_log()
    recovered.release(bucket.table.sequence)
    return recovered


class RecoveredChunks:
    """Collects recovered chunks of one schema and hands them to the bucket in larger ones."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._chunks: list[Chunk] = []
        self._rows = self._nbytes = 0

    def add(self, chunk: Chunk) -> None:
        if self._nbytes + chunk.nbytes > _JOINED_BYTES:
            self.hand_over()
        self._chunks.append(chunk)
        self._rows += chunk.count
        self._nbytes += chunk.nbytes
        if self._rows >= ROWS_AT_ONCE:
            self.hand_over()

    def hand_over(self) -> None:
        chunks, self._chunks, self._rows, self._nbytes = self._chunks, [], 0, 0
        if chunks:
            whole = last = chunks[-1]
            if len(chunks) > 1:
                whole = Chunk(last.encoder, batch=pa.concat_batches([c.batch for c in chunks]))
                whole.sequence = last.sequence
                whole.times = np.maximum.accumulate(
                    np.repeat([c.arrival for c in chunks], [c.count for c in chunks])
                )
                whole.arrival = int(whole.times[-1])
            self._bucket.acknowledge_recovered(whole)


def has_log(folder: Any) -> bool:
    """Whether a bucket folder holds log segments."""
    path = folder / FOLDER
    return path.is_dir() and any(name.suffix == ".wal" for name in path.iterdir())


def _read_schema(frame: Frame, folder: Any) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(_decompressed(frame)))
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise WALError(
            f"the schema at sequence {frame.sequence} of the log in {folder} cannot be read: {exc}"
        ) from exc


def _read_producer(frame: Frame, folder: Any) -> ProducerSequence:
    try:
        return msgspec.msgpack.decode(_decompressed(frame), type=ProducerSequence)
    except msgspec.DecodeError as exc:
        raise WALError(
            f"the producer sequence at sequence {frame.sequence} of the log in {folder} cannot be "
            f"read: {exc}"
        ) from exc


def _read_chunk(frame: Frame, encoder: RecordEncoder | None, folder: Any) -> Chunk:
    if encoder is None:
        raise WALError(
            f"the log in {folder} has records at sequence {frame.sequence} without a schema before "
            "them"
        )
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(_decompressed(frame)), encoder.schema)
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise WALError(
            f"the records at sequence {frame.sequence} of the log in {folder} cannot be read: {exc}"
        ) from exc
    chunk = Chunk(encoder, batch=batch, nbytes=frame.raw_length)
    chunk.sequence, chunk.arrival = frame.sequence, frame.arrival
    return chunk


def _decompressed(frame: Frame) -> bytes:
    return bytes(codec.decompress(frame.codec, frame.payload, frame.raw_length))


def _schema_payload(schema: pa.Schema) -> Payload:
    raw = memoryview(schema.serialize())
    return Payload(SCHEMA, codec.NONE, len(raw), raw)


def _producer_payload(producer: ProducerSequence) -> Payload:
    raw = msgspec.msgpack.encode(producer)
    return Payload(MARK, codec.NONE, len(raw), raw)


def _grouped(puts: list[PendingPut]) -> list[PendingPut]:
    """Return the puts to log; adjacent single rows of one schema join the chunk of the first."""
    groups: list[PendingPut] = []
    tail: Chunk | None = None
    for put in puts:
        if put.producer is None and len(put.chunks) == 1 and put.chunks[0].is_open:
            if tail is not None and tail.can_take(put.chunks[0].encoder):
                tail.absorb(put.chunks[0])
                continue
            tail = put.chunks[0]
        else:
            tail = None
        groups.append(put)
    return groups


def _resolve(puts: list[PendingPut], exc: BaseException | None) -> None:
    if len(puts) == 1:
        puts[0].box.post(_resolve_here, [puts[0].future], exc)
        return
    by_box: dict[loop_bridge.LoopMailbox, list[asyncio.Future[None]]] = defaultdict(list)
    for put in puts:
        by_box[put.box].append(put.future)
    for box, futures in by_box.items():
        box.post(_resolve_here, futures, exc)


def _resolve_here(futures: list[asyncio.Future[None]], exc: BaseException | None) -> None:
    for future in futures:
        if future.done():
            continue
        if exc is None:
            future.set_result(None)
        else:
            future.set_exception(exc)
