"""How a bucket uses its log: what is put into frames, when they are synced, who is told.

Puts queue up; one job at a time takes all that wait, writes them as frames in one go, syncs once
if the setting demands it, and acknowledges them together: that is the group commit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from persisting import codec
from persisting.bucket.chunk import ROWS_AT_ONCE, Chunk
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

_WORTH_COMPRESSING = 256
_JOINED_BYTES = 16 * 1024 * 1024


ProducerSequence = tuple[str, int]
"""A writer and its number of a put: the same mark is stored once."""


class PendingPut:
    """One put in the queue: its chunks, its mark, and the future to resolve in its loop."""

    __slots__ = ("box", "chunks", "future", "mark")

    def __init__(self, chunks: list[Chunk], mark: ProducerSequence | None = None) -> None:
        self.chunks, self.mark = chunks, mark
        self.box = loop_bridge.mailbox()
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    def settled(cls) -> PendingPut:
        """An entry that asks for nothing: its records are stored already."""
        entry = cls([])
        entry.future.set_result(None)
        return entry


class GroupCommit:
    """The log of one open bucket."""

    def __init__(self, bucket: Bucket, log: Log, options: PersistingOptions) -> None:
        self._bucket_ref = weakref.ref(bucket)
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
        self._turn = threading.Lock()

    @property
    def _bucket(self) -> Bucket:
        bucket = self._bucket_ref()
        if bucket is None:
            raise ReferenceError("the bucket was dropped")
        return bucket

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
        """Whether puts wait: the log failed, or is twice as long as it should be."""
        return self.failed or self._log.size > 2 * self._max_bytes

    def enqueue(self, entry: PendingPut) -> None:
        """Called under the bucket's guard, so that the queue has the order of the checks."""
        self._queue.append(entry)

    def start(self) -> None:
        """Have the queue written."""
        if not self._writing.pending:
            try:
                self._writing.want()
            except loop_bridge.NoThread as exc:
                self._fail([], exc)

    def drain(self) -> Future[None]:
        """A future of when everything queued before this call is acknowledged or failed."""
        return self._writing.request()

    # Writing

    def _write(self) -> None:
        bucket = self._bucket_ref()
        if bucket is not None:  # held, with its lock, until the write is done
            with self._turn:
                self._write_queue()

    def write_now(self) -> None:
        """Write what is queued, in this thread."""
        self._write()

    def wait_idle(self) -> None:
        """Return when no write is between the log and its acknowledgement."""
        with self._turn:
            pass

    def _write_queue(self) -> None:
        with self._bucket.guard:
            entries, self._queue = self._queue, []
        if not entries:
            return
        arrival = time.time_ns() // 1000
        try:
            groups = _grouped(entries)
            payloads, preamble = self._encode(groups)
        except BaseException as exc:
            self._schema = None
            self._fail(entries, exc)
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
            self._fail(entries, exc)
            return
        marks = [group.mark for group in groups if group.mark is not None]
        try:
            self.report()
            self._bucket.acknowledge([c for group in groups for c in group.chunks], arrival, marks)
        except BaseException as exc:  # stored, but whoever put it must not wait for ever
            _resolve(entries, exc)
            raise
        _resolve(entries, None)
        if self._interval > 0 and not self._sync_due:
            self._sync_due = True
            timer.after(self._interval / 2, weak_callback(self, GroupCommit._sync_later))

    def _fail(self, entries: list[PendingPut], exc: BaseException) -> None:
        """None of these was stored, nor what queued up behind them and relied on their schema."""
        with self._bucket.guard:
            entries, self._queue = entries + self._queue, []
            self._bucket.reject([entry.mark for entry in entries if entry.mark is not None])
        if not isinstance(exc, WALError):
            wrapped = WALError(f"cannot log to {self._log.folder}: {exc}")
            wrapped.__cause__ = exc
            exc = wrapped
        _resolve(entries, exc)
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
            frames = [] if group.mark is None else [_mark_payload(group.mark)]
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
        if self._codec != codec.NONE and len(raw) >= _WORTH_COMPRESSING:
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

    def _sync_later(self) -> None:
        self._sync_due = False
        self._syncing.request()

    def _sync(self) -> None:
        """The interval's sync. If it fails, a flush brings the records to the table instead."""
        try:
            if not self.failed and not self._log.closed:
                self._sync_now()
        except WALError as exc:
            if self._log.closed:  # in this moment: all of it is in the table
                return
            log.error("%s; flushing to the table instead", exc)
            self._bucket.metrics.log_failed()
            self._bucket.request_flush()

    def settle(self) -> bool:
        """Sync what the interval has not yet, since the program ends; False if that fails."""
        try:
            if self._unsynced and not self.failed and not self._log.closed:
                self._sync_now()
        except WALError as exc:
            log.error("%s; flushing to the table instead", exc)
        return not self.failed

    # Around a flush

    def seal(self) -> None:
        """Let the records logged from now on begin a new segment."""
        self._log.seal()

    @property
    def last_sequence(self) -> int:
        return self._log.last_sequence

    def release(self, sequence: int) -> None:
        """The table holds everything up to ``sequence``."""
        self._log.release(sequence)
        self.report()

    def report(self) -> None:
        """Bring the gauges up to date."""
        self._bucket.metrics.log_written(self._log.size, self._unsynced)

    def restart(self, sequence: int) -> None:
        """Begin anew after a failure; the table holds everything that was acknowledged."""
        self._log.reset(sequence)
        self._schema = None
        self._bucket.metrics.log_written(0, 0)

    @property
    def close_files(self) -> Callable[[], None]:
        """Closes the log's files; keeps neither the journal nor the bucket alive."""
        return self._log.close

    def close(self) -> None:
        self._log.close()


def recover(bucket: Bucket, fs: FileSystem) -> Log:
    """Take the records of a left-over log into the bucket, once each; the log to go on with."""
    folder = bucket.options.storage_path / FOLDER
    fs.make_folder(folder)
    fs.sync_folder(folder.parent)
    after = bucket.table.sequence
    recovery = Recovery(folder, fs, after)
    shaper: RecordEncoder | None = None
    records = 0
    waiting = RecoveredChunks(bucket)
    for frame in recovery.frames():
        if frame.kind == SCHEMA:
            waiting.hand_over()
            shaper = RecordEncoder(_read_schema(frame, folder), bucket.rules)
        elif frame.kind == MARK and frame.sequence > after:
            # Before its rows: a flush in the middle of them leaves the rest to the log.
            waiting.hand_over()
            bucket.writers.remember([_read_mark(frame, folder)])
        elif frame.kind == ROWS and frame.sequence > after:
            chunk = _read_chunk(frame, shaper, folder)
            records += chunk.count
            waiting.add(chunk)
        elif frame.kind not in (SCHEMA, ROWS, MARK):
            raise WALError(
                f"the log in {folder} holds a frame of unknown kind {frame.kind} at sequence "
                f"{frame.sequence}; it was written by a newer version, upgrade persisting"
            )
    waiting.hand_over()
    if records:
        bucket.metrics.recovered(records)
        log.info("recovered %d records from the log in %s", records, folder)
    found = recovery.open_log()
    found.release(bucket.table.sequence)
    return found


class RecoveredChunks:
    """Recovered chunks of one schema on their way into the bucket; small ones go together."""

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
            last = chunks[-1]
            whole = last
            if len(chunks) > 1:
                whole = Chunk(last.shaper, batch=pa.concat_batches([c.batch for c in chunks]))
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
        return pa.ipc.read_schema(pa.py_buffer(_unpacked(frame)))
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise WALError(
            f"the schema at sequence {frame.sequence} of the log in {folder} cannot be read: {exc}"
        ) from exc


def _read_mark(frame: Frame, folder: Any) -> ProducerSequence:
    try:
        return msgspec.msgpack.decode(_unpacked(frame), type=ProducerSequence)
    except msgspec.DecodeError as exc:
        raise WALError(
            f"the writer's mark at sequence {frame.sequence} of the log in {folder} cannot be "
            f"read: {exc}"
        ) from exc


def _read_chunk(frame: Frame, shaper: RecordEncoder | None, folder: Any) -> Chunk:
    if shaper is None:
        raise WALError(
            f"the log in {folder} has records at sequence {frame.sequence} and no schema before"
        )
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(_unpacked(frame)), shaper.schema)
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise WALError(
            f"the records at sequence {frame.sequence} of the log in {folder} cannot be read: {exc}"
        ) from exc
    chunk = Chunk(shaper, batch=batch, nbytes=frame.raw_length)
    chunk.sequence, chunk.arrival = frame.sequence, frame.arrival
    return chunk


def _unpacked(frame: Frame) -> bytes:
    return bytes(codec.decompress(frame.codec, frame.payload, frame.raw_length))


def _schema_payload(schema: pa.Schema) -> Payload:
    raw = memoryview(schema.serialize())
    return Payload(SCHEMA, codec.NONE, len(raw), raw)


def _mark_payload(mark: ProducerSequence) -> Payload:
    raw = msgspec.msgpack.encode(mark)
    return Payload(MARK, codec.NONE, len(raw), raw)


def _grouped(entries: list[PendingPut]) -> list[PendingPut]:
    """The entries to log; single rows of one schema that wait together share the first's chunk."""
    groups: list[PendingPut] = []
    tail: Chunk | None = None
    for entry in entries:
        if entry.mark is None and len(entry.chunks) == 1 and entry.chunks[0].is_row:
            if tail is not None and tail.can_take(entry.chunks[0].shaper):
                tail.absorb(entry.chunks[0])
                continue
            tail = entry.chunks[0]
        else:
            tail = None
        groups.append(entry)
    return groups


def _resolve(entries: list[PendingPut], exc: BaseException | None) -> None:
    if len(entries) == 1:
        entries[0].box.post(_resolve_here, [entries[0].future], exc)
        return
    by_box: dict[loop_bridge.LoopMailbox, list[asyncio.Future[None]]] = defaultdict(list)
    for entry in entries:
        by_box[entry.box].append(entry.future)
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
