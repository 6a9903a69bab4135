"""The table of an open bucket, and the lock under which it is changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from persisting.bucket.chunk import Chunk
from persisting.bucket.flush_batches import table_batches
from persisting.records import RecordEncoder, Rules
from persisting.table.table import Table


class TableWriter:
    """Changes the table one call at a time, and publishes the result to readers."""

    def __init__(
        self, table: Table, check_open: Callable[[], None], publish: Callable[[int], None]
    ) -> None:
        """``publish`` shows the table's newest view, which holds as many chunks of the buffer as
        its argument says."""
        self.table, self._check_open, self._publish = table, check_open, publish
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
            self._publish(len(chunks))

    @contextmanager
    def exclusive(self) -> Iterator[Table]:
        """Hold the table of the open bucket for a change; readers see the result on exit.

        If the outcome of an earlier commit is unknown, it is found out first: a change that was
        planned for an older version would move rows.
        """
        with self.lock:
            self._check_open()
            try:
                self.table.committer.complete_undo()
                yield self.table
            finally:
                self._publish(0)

    def wait_idle(self) -> None:
        """Wait until no change is running."""
        with self.lock:
            pass
