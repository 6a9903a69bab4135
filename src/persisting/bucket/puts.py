"""Accepts the puts of one bucket: whether there is room, and what becomes of the records.

Without a log, records go to the buffer here. With one, they are queued for it
(:mod:`~persisting.bucket.group_commit`), which brings them here once they are logged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from persisting.bucket.buffer import Buffer
from persisting.bucket.chunk import Chunk, Prepared, copy_row
from persisting.bucket.delays import Delay, refuse_without_log
from persisting.bucket.flusher import Flusher
from persisting.bucket.folder_ownership import FolderOwnership
from persisting.bucket.group_commit import GroupCommit
from persisting.bucket.lifecycle import Lifecycle
from persisting.bucket.pending_puts import PendingPut
from persisting.bucket.producer_sequences import ProducerSequence, ProducerSequences
from persisting.bucket.schema_state import SchemaState
from persisting.bucket.waiters import Waiters
from persisting.metrics import BucketMetrics
from persisting.options import BucketOptions


class Puts:
    """Brings records into the buffer of one bucket, and knows which numbered puts are queued."""

    def __init__(
        self,
        options: BucketOptions,
        lifecycle: Lifecycle,
        buffer: Buffer,
        schema: SchemaState,
        flusher: Flusher,
        waiters: Waiters,
        metrics: BucketMetrics,
        ownership: FolderOwnership | None,
    ) -> None:
        """``ownership`` is needed for puts without a log."""
        self.group_commit: GroupCommit | None = None
        """The log that puts are queued for, once the bucket is attached to it."""
        self.frozen = False
        """Puts wait while the bucket is being restored or files are imported."""
        self._options, self._lifecycle, self._metrics = options, lifecycle, metrics
        self._buffer, self._schema = buffer, schema
        self._flusher, self._waiters, self._ownership = flusher, waiters, ownership
        self._queued: dict[ProducerSequence, PendingPut] = {}

    # Room

    @property
    def is_full(self) -> bool:
        """Whether a put must wait: for a flush, a retry of a failed one, or a restore."""
        self._lifecycle.check_process()
        if self._flusher.error is not None or self._buffer.nbytes > self._options.max_buffer_bytes:
            return True
        if self.frozen:
            return True
        return self.group_commit is not None and self.group_commit.is_full

    def make_room(self) -> list[Future[None]]:
        """Start the flushes that a put must wait for, and return their futures."""
        if self.group_commit is not None and self.group_commit.is_full:
            return [self._flusher.request(), *self.group_commit.make_room()]
        return [self._flusher.request()]

    # Without a log

    def add_row(self, record: Any) -> bool:
        """Accept a plain record; False if it needs :func:`prepare` and :meth:`add_prepared`."""
        schema = self._schema
        encoder = schema.encoder
        copied = copy_row(encoder, record)
        if copied is None:
            return False
        with schema.lock:
            self._lifecycle.check_writable()
            if schema.encoder is not encoder or self.frozen:
                return False
            assert self._ownership is not None
            self._ownership.before_unlogged_rows()
            self._buffer.add_row(encoder, *copied, time.time_ns() // 1000)
            schema.acknowledge(encoder)
        self.after_accepting(1)
        return True

    def add_prepared(self, prepared: Prepared, producer: ProducerSequence | None = None) -> bool:
        """Accept all prepared records; False if the schema has changed since they were prepared.

        Records whose producer sequence is already stored are not stored again.
        """
        refuse_without_log(producer)
        schema = self._schema
        with schema.lock:
            self._lifecycle.check_writable()
            if producer is not None and self.producers.has(producer):
                return True
            if schema.encoder is not prepared.base or self.frozen:
                return False
            assert self._ownership is not None
            self._ownership.before_unlogged_rows()
            schema.change(prepared, self._options.storage_path)
            for chunk in prepared.chunks:
                chunk.seal()
            self._buffer.accept(prepared.chunks, time.time_ns() // 1000)
            schema.acknowledge(prepared.encoder)
            self._buffer.remember([producer] if producer is not None else [])
        self.after_accepting(prepared.rows)
        return True

    # With a log; see LoggedPuts

    @property
    def producers(self) -> ProducerSequences:
        """The last stored number of each producer."""
        return self._buffer.producers

    def find_producer(self, producer: ProducerSequence) -> PendingPut | bool:
        return self._queued.get(producer) or self.producers.has(producer)

    def is_queued(self, producer: ProducerSequence) -> bool:
        """Whether the put of this number waits for the log."""
        with self._schema.lock:
            return producer in self._queued

    def expect(self, producer: ProducerSequence, put: PendingPut | None) -> None:
        if put is None:
            self._queued.pop(producer, None)
        else:
            self._queued[producer] = put

    def accept_logged(
        self,
        chunks: list[Chunk],
        arrival: int,
        producers: list[ProducerSequence],
        delays: Sequence[Delay] = (),
    ) -> None:
        buffer = self._buffer
        for first, rows, due in delays:
            buffer.delays.add(buffer.end + first, rows, due)
        buffer.accept(chunks, arrival)
        buffer.remember(producers)
        for producer in producers:
            self._queued.pop(producer, None)

    def report_log(self, unsynced: int) -> None:
        self._metrics.log_written(self._buffer.log_bytes, unsynced)

    def after_accepting(self, rows: int) -> None:
        """Wake readers, and flush if it is time."""
        buffer = self._buffer
        self._metrics.accepted(rows, buffer.rows)
        self._waiters.wake()
        if buffer.rows >= self._options.flush_threshold:
            self._flusher.soon(urgent=buffer.nbytes > self._options.max_buffer_bytes // 4)
        else:
            self._flusher.at_interval()
