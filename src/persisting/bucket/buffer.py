"""The records of a bucket that its table does not hold yet, and the table's newest view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from persisting.bucket.chunk import Chunk
from persisting.bucket.delays import Delays
from persisting.bucket.producer_sequences import ProducerSequence, ProducerSequences
from persisting.bucket.snapshot import Snapshot
from persisting.records import RecordEncoder
from persisting.table.view import TableView


class Buffer:
    """Acknowledged chunks in order. Guarded by the lock of the bucket's :class:`SchemaState`."""

    def __init__(
        self,
        view: TableView,
        epoch: int,
        encoder: RecordEncoder,
        producers: ProducerSequences,
        delays: Delays,
        last_arrival: int,
    ) -> None:
        self.view, self.epoch, self.encoder = view, epoch, encoder
        self.producers, self.delays = producers, delays
        self.chunks: list[Chunk] = []
        self.rows = self.nbytes = self.log_bytes = 0
        self._last_arrival = last_arrival

    @property
    def end(self) -> int:
        """The offset after the last acknowledged record."""
        return self.view.end + self.rows

    @property
    def first_sequence(self) -> int | None:
        """The log sequence of the oldest buffered records, None without any."""
        return self.chunks[0].first_sequence if self.chunks else None

    @property
    def last_sequence(self) -> int | None:
        """The log sequence of the newest buffered records, None without any."""
        return self.chunks[-1].sequence if self.chunks else None

    def add_row(
        self, encoder: RecordEncoder, row: dict[str, Any], nbytes: int, arrival: int
    ) -> None:
        """Accept a plain row."""
        self._last_arrival = max(self._last_arrival, arrival)
        self._open_tail(encoder, 1, nbytes).add(row, nbytes, self._last_arrival)
        self.rows += 1
        self.nbytes += nbytes

    def accept(self, chunks: Sequence[Chunk], arrival: int) -> None:
        """Accept chunks in this order. Plain rows join the last chunk while it is small."""
        before, self._last_arrival = self._last_arrival, max(self._last_arrival, arrival)
        for chunk in chunks:
            self.rows += chunk.count
            self.nbytes += chunk.nbytes
            self.log_bytes += chunk.log_bytes
            if chunk.is_open:
                tail = self._open_tail(chunk.encoder, chunk.count, chunk.nbytes)
                tail.absorb(chunk, self._last_arrival)
                continue
            chunk.arrival = self._last_arrival
            if chunk.times is not None:  # recovered: the clock may have been set back since
                chunk.times = np.maximum(chunk.times, before)
            self._seal_tail()
            self.chunks.append(chunk)
            self.encoder = chunk.encoder

    def _open_tail(self, encoder: RecordEncoder, count: int, nbytes: int) -> Chunk:
        """Return a chunk at the end that takes ``count`` plain rows."""
        tail = self.chunks[-1] if self.chunks else None
        if tail is None or not tail.can_take(encoder, count, nbytes):
            self._seal_tail()
            tail = Chunk(encoder, rows=[])
            self.chunks.append(tail)
            self.encoder = encoder
        return tail

    def _seal_tail(self) -> None:
        if self.chunks:
            self.chunks[-1].seal()

    def remember(self, producers: list[ProducerSequence]) -> None:
        """Note numbered puts as stored."""
        self.producers.remember(producers)

    def not_before(self, arrival: int) -> None:
        """Let no later record arrive before ``arrival``."""
        self._last_arrival = max(self._last_arrival, arrival)

    def take_for_flush(self) -> list[Chunk]:
        """Return all chunks, to which nothing is added from now on."""
        self._seal_tail()
        return list(self.chunks)

    def publish(self, view: TableView, epoch: int, flushed: int) -> None:
        """Show a new view of the table, which holds the ``flushed`` first chunks."""
        done = self.chunks[:flushed]
        self.view, self.epoch = view, epoch
        del self.chunks[:flushed]
        self.rows -= sum(chunk.count for chunk in done)
        self.nbytes -= sum(chunk.nbytes for chunk in done)
        self.log_bytes -= sum(chunk.log_bytes for chunk in done)

    def show(self, view: TableView, epoch: int) -> None:
        """Show a new view of the table, which may hold the first buffered rows."""
        left = view.end - self.view.end
        flushed = 0
        for chunk in self.chunks:
            if chunk.count > left:
                break
            left -= chunk.count
            flushed += 1
        rest = self.chunks[flushed].without(left) if left and flushed < len(self.chunks) else None
        if rest is not None:
            self.rows -= left
            self.nbytes -= self.chunks[flushed].nbytes - rest.nbytes
            self.log_bytes -= self.chunks[flushed].log_bytes - rest.log_bytes
            self.chunks[flushed] = rest
        self.publish(view, epoch, flushed)

    def replace(self, view: TableView, epoch: int) -> None:
        """Show another view of the table, and drop all buffered rows."""
        self.publish(view, epoch, len(self.chunks))

    def snapshot(self, defaults: Mapping[str, Any]) -> Snapshot:
        """Return the records at this point in time."""
        chunks = [(chunk, chunk.count) for chunk in self.chunks]
        return Snapshot(self.view, chunks, self.encoder.schema, defaults, self.epoch)
