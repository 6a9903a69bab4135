"""Records with the same fields as Arrow columns: how large lists travel between processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import pyarrow as pa

from persisting.errors import StorageError

_TYPES = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}
"""Types whose values are the same after a journey through Arrow."""


class RecordColumns:
    """Records whose values come back from Arrow as they were."""

    __slots__ = ("batch",)

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @property
    def nbytes(self) -> int:
        return int(self.batch.nbytes)

    def to_records(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = self.batch.to_pylist()
        return records

    def slice(self, start: int, count: int) -> RecordColumns:
        return RecordColumns(self.batch.slice(start, count))

    def divided(self, counts: Sequence[Any]) -> list[RecordColumns]:
        """Return the first records, the next ones and so on; raise if these are not all."""
        check_counts(counts, len(self))
        starts = accumulate(counts, initial=0)
        return [self.slice(start, count) for start, count in zip(starts, counts, strict=False)]

    @staticmethod
    def joined(parts: Sequence[RecordColumns]) -> RecordColumns:
        """Return parts of one schema as one."""
        return RecordColumns(pa.concat_batches([part.batch for part in parts]))


def check_counts(counts: Sequence[Any], rows: int) -> None:
    """Raise unless the counts add up to ``rows``; another process may have sent them."""
    if any(type(count) is not int or count < 0 for count in counts) or sum(counts) != rows:
        raise StorageError(f"{rows} records from another process are counted as {counts}")


def columns_of(parts: Sequence[list[Any]]) -> RecordColumns | None:
    """Return lists of records, one after the other, as columns.

    None if the records do not all have the same fields, or a field has values of several types or
    of a type that Arrow does not return as it was.
    """
    records = parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))
    if not records or set(map(type, records)) != {dict}:
        return None
    names = list(records[0])
    # Every record has all the names; the sum is larger only if some record has more.
    if not names or sum(map(len, records)) != len(names) * len(records):
        return None
    try:
        arrays = [_array(list(map(itemgetter(name), records))) for name in names]
        return RecordColumns(pa.RecordBatch.from_arrays(arrays, names))
    except (KeyError, TypeError, ValueError, OverflowError, pa.ArrowException):
        return None


def _array(values: list[Any]) -> pa.Array:
    kinds = set(map(type, values))
    kinds.discard(type(None))
    (kind,) = kinds
    return pa.array(values, _TYPES[kind])
