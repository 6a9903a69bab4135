"""The buffer of a reader follows the table, whose commits end anywhere in its chunks."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from persisting.bucket.buffer import Buffer
from persisting.bucket.chunk import Chunk
from persisting.bucket.delays import Delays
from persisting.bucket.producer_sequences import ProducerSequences
from persisting.records import RecordEncoder, Rules
from persisting.table.view import FragmentSize, TableView

ENCODER = RecordEncoder(pa.schema([("id", pa.int64())]), Rules(evolving=True))


def view(rows: int) -> TableView:
    """Return a view that has this many rows, without a table behind it."""
    return TableView(None, ENCODER.schema, (FragmentSize(rows, rows),) if rows else ())


def chunk(first: int, count: int, *, as_rows: bool) -> Chunk:
    records: list[dict[str, Any]] = [{"id": n} for n in range(first, first + count)]
    if as_rows:
        return Chunk(ENCODER, rows=records, nbytes=8 * count)
    return Chunk(ENCODER, batch=ENCODER.to_batch(records))


def left_in(buffer: Buffer) -> list[int]:
    snapshot = buffer.snapshot({})
    return [record["id"] for record in snapshot.records(snapshot.persisted, None)]


@pytest.mark.parametrize("as_rows", [True, False], ids=["rows", "Arrow"])
@pytest.mark.parametrize("flushed", range(13))
def test_flushed_rows_leave_the_buffer_wherever_the_commit_ends(
    as_rows: bool, flushed: int
) -> None:
    buffer = Buffer(view(0), 0, ENCODER, ProducerSequences(), Delays(), last_arrival=0)
    for start in range(0, 12, 4):
        buffer.accept([chunk(start, 4, as_rows=as_rows)], arrival=start + 1)
    buffer.show(view(flushed), 0)
    assert left_in(buffer) == list(range(flushed, 12))
    assert (buffer.rows, buffer.end) == (12 - flushed, 12)
    assert buffer.nbytes >= 0
    arrivals = buffer.snapshot({}).buffered_arrivals().tolist()
    assert arrivals == [n // 4 * 4 + 1 for n in range(flushed, 12)]
    buffer.accept([chunk(12, 2, as_rows=as_rows)], arrival=20)
    assert left_in(buffer) == list(range(flushed, 14))
    buffer.show(view(14), 0)
    assert (left_in(buffer), buffer.rows, buffer.nbytes, buffer.log_bytes) == ([], 0, 0, 0)


def test_restored_table_empties_the_buffer() -> None:
    buffer = Buffer(view(0), 0, ENCODER, ProducerSequences(), Delays(), last_arrival=0)
    buffer.accept([chunk(0, 5, as_rows=True)], arrival=1)
    buffer.replace(view(2), 1)
    assert (buffer.rows, buffer.end, buffer.epoch) == (0, 2, 1)
