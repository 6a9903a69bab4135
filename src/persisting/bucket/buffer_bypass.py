"""Changes of the table past the buffer: restores, and imports of files.

Puts wait during such a change: the rows that are buffered are flushed first, and the next put is
checked against the changed table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from persisting.bucket.buffer import Buffer
from persisting.bucket.delays import DELAYS, Delays
from persisting.bucket.flush_job import FlushJob
from persisting.bucket.large_ints import LargeInts
from persisting.bucket.lifecycle import Lifecycle
from persisting.bucket.producer_sequences import WRITERS, ProducerSequence, ProducerSequences
from persisting.bucket.puts import Puts
from persisting.bucket.schema_state import EVOLVING, SchemaState
from persisting.bucket.table_writer import TableWriter
from persisting.bucket.waiters import Waiters
from persisting.errors import StorageError
from persisting.records import RecordEncoder, Rules
from persisting.records.arrow import merge

_QUIESCE_SECONDS = 30.0
"""How long a restore or an import waits for another one."""


class BufferBypass:
    """Holds puts back while the table of a bucket is changed, and takes the change over."""

    def __init__(
        self,
        place: object,
        rules: Rules,
        lifecycle: Lifecycle,
        buffer: Buffer,
        schema: SchemaState,
        puts: Puts,
        large_ints: LargeInts,
        writer: TableWriter,
        flush_job: FlushJob,
        waiters: Waiters,
    ) -> None:
        self._place, self._rules, self._lifecycle = place, rules, lifecycle
        self._buffer, self._schema = buffer, schema
        self._puts, self._large_ints = puts, large_ints
        self._writer, self._table = writer, writer.table
        self._flush_job, self._waiters = flush_job, waiters
        self._quiescing = threading.Lock()

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """Flush everything acknowledged, and accept nothing more inside the context."""
        self._lifecycle.check_process()
        if not self._quiescing.acquire(timeout=_QUIESCE_SECONDS):
            raise StorageError(
                f"another call restores {self._place} or imports files into it; try again"
            )
        try:
            self._writer.wait_idle()  # so that puts do not wait for a compaction that runs
            with self._schema.lock:
                self._lifecycle.check_writable()
                self._puts.frozen = True
            try:
                if self._puts.group_commit is not None:
                    self._puts.group_commit.write_now()
                # Not the coalesced flush: its next run may have to wait for this one.
                self._flush_job.run()
                yield
            finally:
                with self._schema.lock:
                    self._puts.frozen = False
                self._waiters.wake()
        finally:
            self._quiescing.release()

    # Taking a change over

    def merge_table_schema(self, schema: pa.Schema) -> None:
        """Merge the schema of records that were written to the table."""
        with self._schema.lock:
            self._schema.merge_table_schema(schema)
            merged = merge(self._buffer.encoder.schema, schema, EVOLVING)
            self._buffer.encoder = RecordEncoder(merged, self._rules)

    def restored(self, encoder: RecordEncoder) -> None:
        """Take over the schema and the producer sequences of the restored table."""
        with self._schema.lock:
            self._buffer.publish(self._table.view, len(self._table.restores), 0)
            self._buffer.encoder = encoder
            kept = self._buffer.producers.kept
            self._buffer.producers = ProducerSequences(self._table.properties.get(WRITERS))
            self._buffer.producers.keep(kept)
            self._buffer.delays = Delays(self._table.properties.get(DELAYS))
            self._schema.restored(encoder)
            self._large_ints.forget()

    def imported(self, arrival: int, producer: ProducerSequence, *, replaced: bool) -> None:
        """Note rows that were committed: when they arrived, whose they are, and whether they have
        replaced all others."""
        with self._schema.lock:
            if replaced:  # their offsets begin at 0 again: the delays were those of other rows
                self._buffer.publish(self._table.view, len(self._table.restores), 0)
                self._buffer.delays = Delays()
            self._buffer.producers.remember([producer])
            self._buffer.not_before(arrival)
            self._large_ints.forget()

    def keep_producer(self, producer: str) -> None:
        """Never forget the sequence of a producer, until :meth:`release_producer`."""
        with self._schema.lock:
            self._buffer.producers.keep([producer])

    def release_producer(self, producer: str) -> None:
        """Let the sequence of a producer be forgotten."""
        with self._schema.lock:
            self._buffer.producers.release(producer)
