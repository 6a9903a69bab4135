"""Aggregates of the rows that a task reads: Spark combines those of all tasks.

A partial result may stand for any number of rows, even for one. So rows are passed on one by one
where adding them up would not pay, or where a sum could leave the range of its type, which only
Spark knows how to report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

COUNT_ALL: Final = "count_all"
Function: TypeAlias = Literal["count_all", "count", "sum", "min", "max"]

_ROWS_TOGETHER = 1 << 18
_BYTES_TOGETHER = 32 << 20
_LARGEST_SUM = 2**63 - 1


@dataclass(frozen=True)
class PartialAggregates:
    """How to aggregate: the fields of the groups, and the functions with their fields."""

    groups: tuple[str, ...]
    values: tuple[tuple[Function, str], ...]
    """Functions and their fields; :data:`COUNT_ALL` needs none."""
    schema: pa.Schema
    """Of the results: the groups, then the values."""

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Aggregate batches; without groups there is a result even if there are no rows."""
        is_empty, pays = True, True
        for rows in _joined(batches):
            is_empty = False
            if pays and not self._may_overflow(rows):
                results = self._aggregated(rows)
                pays = 2 * results.num_rows <= rows.num_rows or not self.groups
            else:
                results = self._one_by_one(rows)
            yield from results.to_batches()
        if is_empty and not self.groups:
            yield self._of_nothing()

    def _aggregated(self, rows: pa.Table) -> pa.Table:
        if not self.groups:
            return self._totals(rows)
        # By number: names of fields and of Arrow's results could be the same.
        keys = [f"key {number}" for number in range(len(self.groups))]
        columns = {key: rows.column(name) for key, name in zip(keys, self.groups, strict=True)}
        wanted: list[tuple[Any, str]] = []
        results = [*keys]
        for number, (function, name) in enumerate(self.values):
            if function == COUNT_ALL:
                wanted.append(([], function))
                results.append(function)
            else:
                columns[f"value {number}"] = rows.column(name)
                wanted.append((f"value {number}", function))
                results.append(f"value {number}_{function}")
        found = pa.table(columns).group_by(keys, use_threads=False).aggregate(wanted)
        return self._results([found.column(name) for name in results])

    def _totals(self, rows: pa.Table) -> pa.Table:
        columns = []
        for (function, name), field in zip(self.values, self.schema, strict=True):
            total = (
                rows.num_rows
                if function == COUNT_ALL
                else _TOTALS[function](rows.column(name)).as_py()
            )
            columns.append(pa.array([total], field.type))
        return self._results(columns)

    def _one_by_one(self, rows: pa.Table) -> pa.Table:
        """Return each row as the result of a group of its own."""
        columns: list[Any] = [rows.column(name) for name in self.groups]
        for function, name in self.values:
            if function == COUNT_ALL:
                columns.append(pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows))
            elif function == "count":
                columns.append(rows.column(name).is_valid())
            else:
                columns.append(rows.column(name))
        return self._results(columns)

    def _of_nothing(self) -> pa.RecordBatch:
        values = [0 if function in (COUNT_ALL, "count") else None for function, _ in self.values]
        columns = [
            pa.array([value], field.type) for value, field in zip(values, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _results(self, columns: list[Any]) -> pa.Table:
        cast = [column.cast(field.type) for column, field in zip(columns, self.schema, strict=True)]
        return pa.Table.from_arrays(cast, schema=self.schema)

    def _may_overflow(self, rows: pa.Table) -> bool:
        """Whether a sum of whole numbers may leave the range of 64 bits."""
        for function, name in self.values:
            if function == "sum" and rows.column(name).type == pa.int64():
                found = pc.min_max(rows.column(name)).as_py()
                largest = max(abs(found["min"] or 0), abs(found["max"] or 0))
                if largest * rows.num_rows > _LARGEST_SUM:
                    return True
        return False


_TOTALS: dict[str, Callable[[pa.ChunkedArray], pa.Scalar]] = {
    "count": pc.count,
    "sum": pc.sum,
    "min": pc.min,
    "max": pc.max,
}


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield batches together until they are large."""
    waiting: list[pa.RecordBatch] = []
    rows = nbytes = 0
    for batch in batches:
        waiting.append(batch)
        rows, nbytes = rows + batch.num_rows, nbytes + batch.nbytes
        if rows >= _ROWS_TOGETHER or nbytes >= _BYTES_TOGETHER:
            yield pa.Table.from_batches(waiting)
            waiting, rows, nbytes = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)
