"""Prepare chunks for the table: align them with one schema and merge small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from persisting.bucket.chunk import Chunk
from persisting.records import Rules
from persisting.records.arrow import align
from persisting.table.layout import ARRIVAL_FIELD

_MERGED_ROWS = 8192
_MERGED_BYTES = 16 * 1024 * 1024


def table_batches(
    chunks: Sequence[Chunk], schema: pa.Schema, rules: Rules
) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
    """Yield batches of ``schema`` in order, each with the arrival times of its rows."""
    for group in _groups(chunks):
        batches = [align(chunk.batch, schema, rules.defaults) for chunk in group]
        whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        yield whole, _arrivals(group)


def _groups(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    group: list[Chunk] = []
    rows = nbytes = 0
    for chunk in chunks:
        if group and (rows + chunk.count > _MERGED_ROWS or nbytes + chunk.nbytes > _MERGED_BYTES):
            yield group
            group, rows, nbytes = [], 0, 0
        group.append(chunk)
        rows += chunk.count
        nbytes += chunk.nbytes
    if group:
        yield group


def _arrivals(chunks: Sequence[Chunk]) -> pa.Array:
    times = np.concatenate([chunk.arrivals(chunk.count) for chunk in chunks])
    return pa.array(times, pa.int64()).cast(ARRIVAL_FIELD.type)
