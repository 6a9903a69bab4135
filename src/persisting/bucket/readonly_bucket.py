"""A bucket that is read without owning it: its table, and what its owner's log holds beyond it."""

from __future__ import annotations

from persisting.bucket.bucket import Bucket
from persisting.bucket.log_view import LogView
from persisting.bucket.producer_sequences import WRITERS, ProducerSequences
from persisting.errors import InvalidArgument


class ReadonlyBucket(Bucket):
    """The records of one bucket folder, opened for reading only. Every change is refused."""

    _log_view: LogView

    def _open_table(self) -> None:
        folder = self.options.storage_path
        if not folder.is_dir():
            raise InvalidArgument(f"storage_path {folder} does not exist; there is nothing to read")
        self.table.refresh()

    def _stored_producers(self) -> ProducerSequences:
        return ProducerSequences(self.table.properties.get(WRITERS))

    @property
    def takes_notes(self) -> bool:
        return False

    def _last_arrival(self) -> int:
        """Skip this read, so that a damaged table can still be inspected."""
        return 0

    def _start(self) -> None:
        self._log_view = self._new_log_view()
        self._log_view.refresh()

    def _new_log_view(self) -> LogView:
        return LogView(
            self.options.storage_path,
            self.table,
            self.buffer,
            self.schema_state,
            self.fs,
            self.waiters,
            self.table_writer.lock,
        )

    # Following the owner

    def expire_view(self) -> None:
        self._log_view.expire()

    def refresh(self, *, watch: bool = False) -> None:
        with self.table_writer.lock:
            if watch:
                self._log_view.watch()
            self._log_view.refresh()
            if watch:
                self._log_view.watch()  # the log, or the table, may be a new one

    @property
    def wait_seconds(self) -> float | None:
        return self._log_view.wait_seconds

    def sync_through(self, offset: int) -> int:
        self.lifecycle.check_open()
        with self.table_writer.lock:
            return self._log_view.sync_through(offset)
