"""How the table of a bucket in an object store is changed: flushes, restores and imports.

The outcome of a commit may be unknown, and another process may have taken the bucket over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from persisting.bucket.buffer_bypass import BufferBypass
from persisting.bucket.flush_job import FlushJob
from persisting.bucket.store_lifecycle import StoreLifecycle
from persisting.bucket.table_writer import TableWriter
from persisting.errors import OwnershipLost, StorageError
from persisting.table.store_table import StoreTable

log = logging.getLogger("persisting")


class StoreTableWriter(TableWriter):
    """Changes the table under the owner's fence."""

    table: StoreTable

    def publish(self, flushed: int = 0) -> None:
        """As in a folder, but the table decides which chunks it holds: a new version may also show
        that an earlier flush, whose outcome was unknown, has landed."""
        super().publish(max(flushed, self._count_landed()))

    def _count_landed(self) -> int:
        """Return how many of the first chunks of the buffer the table holds."""
        with self._state_lock:
            sequences = [chunk.sequence for chunk in self._buffer.chunks]
        return sum(sequence <= self.table.sequence for sequence in sequences)

    def drop_landed(self) -> bool:
        """Drop from the buffer what the table already holds; return whether there was anything.

        The flush that wrote it failed: its outcome was unknown, so it could not drop the records
        itself.
        """
        with self.lock:
            self.table.committer.complete_undo()
            landed = self._count_landed()
            if landed:
                self.publish()
            return landed > 0


class StoreFlushJob(FlushJob):
    """Flushes while this process owns the bucket. Its records are durable in the log anyway."""

    _lifecycle: StoreLifecycle
    _writer: StoreTableWriter

    def run(self) -> bool:
        lifecycle = self._lifecycle
        try:
            lifecycle.check_not_lost()
            return super().run()
        except OwnershipLost as exc:
            lifecycle.loss = exc
            self._flusher.stop()
            if not lifecycle.closed:
                raise
            log.warning(
                "closing %s without a flush: %s. Its acknowledged records are in the log, which "
                "the new owner reads",
                self._place,
                exc.summary,
            )
            return False
        except StorageError as exc:
            if not lifecycle.closed or not lifecycle.lost:
                raise
            log.warning(
                "closing %s without a flush: %s. Its acknowledged records are in the log, which "
                "the next owner reads",
                self._place,
                exc,
            )
            return False

    def _commit(self, at_least: int = 0) -> bool:
        landed = self._writer.drop_landed()
        return super()._commit(at_least) or landed


class StoreBufferBypass(BufferBypass):
    """Restores and imports while this process owns the bucket."""

    _lifecycle: StoreLifecycle
    _table: StoreTable

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        with super().quiesced():
            try:
                yield
            except BaseException as exc:
                if self._table.committer.is_uncertain:
                    # Puts that continue would get offsets of a version that may be outdated.
                    self._lifecycle.loss = OwnershipLost(
                        f"it is unknown whether a change of {self._place} was stored ({exc})",
                        hint="open the topic again",
                    )
                raise
