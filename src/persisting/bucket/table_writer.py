"""The table of an open bucket, and the lock under which it is changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from persisting.bucket.buffer import Buffer
from persisting.bucket.chunk import Chunk
from persisting.bucket.flush_batches import table_batches
from persisting.bucket.lifecycle import Lifecycle
from persisting.bucket.schema_state import SchemaState
from persisting.metrics import BucketMetrics
from persisting.records import RecordEncoder, Rules
from persisting.table.table import Table


class TableWriter:
    """Changes the table one call at a time, and publishes the result to readers."""

    def __init__(
        self,
        table: Table,
        lifecycle: Lifecycle,
        buffer: Buffer,
        schema: SchemaState,
        metrics: BucketMetrics,
    ) -> None:
        """``schema`` has the lock that guards the buffer."""
        self.table, self._lifecycle = table, lifecycle
        self._buffer, self._state_lock, self._metrics = buffer, schema.lock, metrics
        self.lock = threading.Lock()
        """Held while the table is changed. Take the state lock inside it, never around it."""

    def append(
        self,
        chunks: Sequence[Chunk],
        encoder: RecordEncoder,
        rules: Rules,
        sequence: int,
        properties: Mapping[str, str],
    ) -> None:
        """Commit the first chunks of the buffer with the log sequence that they reach.

        Of the ``properties`` beside them, empty ones are left out.
        """
        batches = table_batches(chunks, encoder.schema, rules)
        beside = {name: value for name, value in properties.items() if value}
        with self.lock:
            self.table.append(batches, encoder.schema, sequence, beside)
            self.publish(len(chunks))

    @contextmanager
    def exclusive(self) -> Iterator[Table]:
        """Hold the table of the open bucket for a change; readers see the result on exit.

        If the outcome of an earlier commit is unknown, it is found out first: a change that was
        planned for an older version would move rows.
        """
        with self.lock:
            self._lifecycle.check_open()
            try:
                self.table.committer.complete_undo()
                yield self.table
            finally:
                self.publish()

    def publish(self, flushed: int = 0) -> None:
        """Show the table's newest version to readers; drop the ``flushed`` first chunks.

        Call with ``lock`` held.
        """
        with self._state_lock:
            self._buffer.publish(self.table.view, len(self.table.restores), flushed)
        self.report()

    def report(self) -> None:
        """Update the gauges of the table."""
        view = self._buffer.view
        self._metrics.table_is(len(view.sizes), view.start)

    def wait_idle(self) -> None:
        """Wait until no change is running."""
        with self.lock:
            pass
