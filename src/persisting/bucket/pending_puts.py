"""Puts that wait for the log: what they bring, who waits for them, and how they are logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from persisting.bucket.buffer import Buffer
from persisting.bucket.chunk import MAX_BATCH_BYTES, Chunk
from persisting.bucket.delays import Delay
from persisting.bucket.flusher import Flusher
from persisting.bucket.lifecycle import Lifecycle
from persisting.bucket.pending_delays import PendingDelays
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.metrics import BucketMetrics
from persisting.records import RecordEncoder
from persisting.wal import Payload
from persisting.wal.frame import FRAME_HEADER_SIZE


class Sink(Protocol):
    """Where the results of puts are delivered: an event loop, or waiting threads."""

    is_here: bool
    """Whether the callers are threads of this process, which compete with the one that delivers."""

    def deliver(self, waiters: Sequence[Any], exc: BaseException | None) -> None:
        """Resolve waiters of this sink; called from any thread, must not block."""

    def after_turn(self, call: Callable[[], Any]) -> bool:
        """Call once when all callers of this sink that can continue now have done so, from the
        thread of such a caller; False, without a call, if the sink does not know them."""


class Waiter(Protocol):
    """The caller of a put."""

    @property
    def sink(self) -> Sink: ...


class LoggedPuts(Protocol):
    """What the log needs of the puts of a bucket. The comments say which lock the caller holds."""

    frozen: bool
    """Whether puts must wait."""  # state

    def find_producer(self, producer: ProducerSequence) -> PendingPut | bool:
        """Return the queued put of this number, or whether it is stored."""  # state

    def expect(self, producer: ProducerSequence, put: PendingPut | None) -> None:
        """Note that the put of this number is queued, or no longer is."""  # state

    def accept_logged(
        self,
        chunks: list[Chunk],
        arrival: int,
        producers: list[ProducerSequence],
        delays: Sequence[Delay] = (),
    ) -> None:
        """Accept records that the log holds; the delays count from the first of them."""  # state

    def after_accepting(self, rows: int) -> None:
        """Wake readers, and flush if it is time."""

    def report_log(self, unsynced: int) -> None:
        """Update the gauges of the log; ``unsynced`` frames could be lost with the power."""


class LoggedFlush(Protocol):
    """What the log needs of the flushes of a bucket."""

    def commit_buffer(self, at_least: int = 0) -> None:
        """Flush everything acknowledged; ``at_least`` is reached by frames that are dropped."""


class LoggedBucket(Protocol):
    """What the log needs of a bucket. A reference to it keeps the bucket's lock."""

    metrics: BucketMetrics
    lifecycle: Lifecycle
    buffer: Buffer
    """Guarded by the state lock."""
    delays: PendingDelays
    flusher: Flusher

    @property
    def number(self) -> int: ...

    @property
    def puts(self) -> LoggedPuts: ...

    @property
    def flush_job(self) -> LoggedFlush: ...


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
    def nbytes(self) -> int:
        return sum(piece.whole.nbytes for piece in self.pieces)

    @property
    def is_row(self) -> bool:
        """Whether it is a plain row, which may share a frame with others."""
        return self.producer is None and len(self.pieces) == 1 and self.pieces[0].whole.is_open


class PendingRow:
    """One plain row in the queue, and who waits for it: what most puts are, so it is kept small."""

    __slots__ = ("bucket", "encoder", "nbytes", "row", "waiter")
    producer = None
    is_row = True

    def __init__(
        self,
        bucket: LoggedBucket,
        encoder: RecordEncoder,
        row: dict[str, Any],
        nbytes: int,
        waiter: Waiter,
    ) -> None:
        self.bucket, self.encoder, self.waiter = bucket, encoder, waiter
        self.row, self.nbytes = row, nbytes

    @property
    def pieces(self) -> list[Piece]:
        chunk = Chunk(self.encoder, rows=[self.row], nbytes=self.nbytes)
        return [Piece(chunk, [(self.bucket, chunk)])]


QueuedPut: TypeAlias = PendingPut | PendingRow


class LogEntry:
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


def log_entries(puts: Sequence[QueuedPut]) -> list[LogEntry]:
    """Return the entries to log; adjacent plain rows of one schema share an entry."""
    entries: list[LogEntry] = []
    rows: dict[LoggedBucket, Chunk] = {}
    encoder: RecordEncoder | None = None
    nbytes = 0
    for put in puts:
        if type(put) is PendingRow:
            nbytes += put.nbytes
            tail = rows.get(put.bucket)
            if (
                tail is not None
                and encoder is put.encoder
                and nbytes < MAX_BATCH_BYTES
                and tail.can_take(encoder, 1, put.nbytes)
            ):
                tail.append(put.row, put.nbytes)
                continue
        elif not put.is_row:
            rows = {}
            entries.append(LogEntry(put.pieces, put.producer))
            continue
        else:
            nbytes += put.nbytes
        ((bucket, chunk),) = put.pieces[0].sections
        tail = rows.get(bucket)
        fits = nbytes < MAX_BATCH_BYTES and (not rows or encoder is chunk.encoder)
        if tail is not None and fits and tail.can_take(chunk.encoder, chunk.count, chunk.nbytes):
            tail.join(chunk)
        elif tail is None and rows and fits:
            rows[bucket] = chunk
            entries[-1].pieces[0].sections.append((bucket, chunk))
        else:
            rows, nbytes, encoder = {bucket: chunk}, chunk.nbytes, chunk.encoder
            entries.append(LogEntry([Piece(chunk, [(bucket, chunk)])], None))
    return entries


def buckets_in(puts: Iterable[QueuedPut]) -> set[LoggedBucket]:
    return {b for put in puts for piece in put.pieces for b, _ in piece.sections}


def resolve(puts: Sequence[QueuedPut], exc: BaseException | None) -> None:
    if len(puts) == 1:
        waiter = puts[0].waiter
        waiter.sink.deliver([waiter], exc)
        return
    by_sink: dict[Sink, list[Waiter]] = {}
    for put in puts:
        by_sink.setdefault(put.waiter.sink, []).append(put.waiter)
    # Other processes first: a thread of this one that continues takes the interpreter.
    for sink in sorted(by_sink, key=lambda sink: sink.is_here):
        sink.deliver(by_sink[sink], exc)
