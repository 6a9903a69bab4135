"""One version of the table, to read from.

A view never changes: a reader that holds one sees the same rows while flushes go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from persisting.schema.names import ARRIVAL
from persisting.table import layout
from persisting.table.guard import translated

SCAN_ROWS = 4096
"""Rows per batch of a scan; bounds what a reader holds at once."""


class TableView:
    """The rows of one version; an empty view stands for a table that does not exist yet."""

    def __init__(self, dataset: Any | None, schema: pa.Schema, rows: int) -> None:
        self.dataset, self.schema, self.rows = dataset, schema, rows

    @property
    def version(self) -> int:
        return self.dataset.version if self.dataset is not None else 0

    def arrival(self, offset: int) -> int:
        """When the row at ``offset`` was accepted, in µs of Unix time."""
        assert self.dataset is not None
        with translated("read", self.dataset.uri):
            found = self.dataset.scanner(columns=[ARRIVAL], offset=offset, limit=1).to_table()
            return int(found.column(0).cast("int64")[0].as_py())

    def batches(
        self, offset: int, limit: int, names: list[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows ``offset`` to ``offset + limit`` in order, with the fields ``names`` (None: all)."""
        limit = min(limit, self.rows - offset)
        if limit <= 0 or self.dataset is None:
            return
        wanted = [f for f in self.schema if names is None or f.name in names]
        present = set(self.dataset.schema.names)
        columns = [f.name for f in wanted if f.name in present] or [ARRIVAL]
        with translated("read", self.dataset.uri):
            scanner = self.dataset.scanner(
                columns=columns,
                offset=offset,
                limit=limit,
                batch_size=min(limit, SCAN_ROWS),
                scan_in_order=True,
            )
            found = 0
            for batch in scanner.to_batches():
                found += batch.num_rows
                yield layout.to_logical(batch, pa.schema(wanted))
            if found != limit:
                raise OSError(f"found {found} of {limit} rows from offset {offset}")
