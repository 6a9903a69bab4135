"""Finds fields whose whole numbers a float cannot represent: they must not change to float."""

from __future__ import annotations

from collections.abc import Callable

from persisting.bucket.buffer import Buffer
from persisting.bucket.schema_state import SchemaState
from persisting.bucket.snapshot import Snapshot
from persisting.records.arrow import beyond_float


class LargeInts:
    """Scans the stored records of one bucket for such numbers, and notes what it has scanned."""

    def __init__(self, buffer: Buffer, schema: SchemaState) -> None:
        self._buffer, self._schema = buffer, schema
        self._scanned: set[str] = set()

    def scan(self, names: list[str], snapshot: Callable[[], Snapshot]) -> None:
        """Scan these fields in what ``snapshot`` returns, unless that was done. Blocking."""
        while unknown := [name for name in names if name not in self._scanned]:
            records, large = snapshot(), set()
            # A field whose first record is still queued for the log is not in the snapshot; its
            # values were checked when that put was prepared.
            stored = [name for name in unknown if name in records.schema.names]
            for batch in records.batches(records.start, None, stored) if stored else ():
                large |= {n for n in stored if beyond_float(batch.column(n))}
            with self._schema.lock:
                if records.epoch == self._buffer.epoch:
                    # Otherwise a restore replaced the records: scan again.
                    self._schema.add_large_int_fields(large)
                    self._scanned.update(unknown)

    def forget(self) -> None:
        """Scan all fields again: the records are others. Call with the state lock held."""
        self._scanned = set()
