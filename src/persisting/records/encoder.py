"""Encodes records as Arrow: a fast path for records of a known shape, a slow path for all others.

A record's *shape* is its field names and the exact Python types of their values. Once the slow path
(:mod:`persisting.records.values`) has accepted a record, its shape is remembered, with the few
checks that its values still need. From then on Arrow's own converter does the work; a record that
it refuses goes back to the slow path, whose error names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from persisting.errors import SchemaError
from persisting.records import type_checks, vectors
from persisting.records.arrow_casts import convert
from persisting.records.evolution import Conflict, has_integers, is_vector, learn, widen
from persisting.records.field_names import check_name
from persisting.records.values import EXACT_IN_FLOAT64, Misfit, Values, type_name

_MAX_SHAPES = 1024
_ROW_BYTES = 64
EMPTY = pa.schema([])
FLOAT64 = pa.float64()


@dataclass(frozen=True)
class Rules:
    """How a schema may change: an evolving schema accepts new fields and wider types."""

    evolving: bool = False
    vector: pa.DataType = FLOAT64
    defaults: Mapping[str, Any] | None = None
    keep_vectors: bool = False
    """Whether a put may be refused that would turn vectors into lists; the bucket decides."""


@dataclass(frozen=True)
class Shape:
    """What must still be checked in each record of a known shape."""

    checks: tuple[tuple[str, Callable[[Any], bool]], ...]
    texts: tuple[str, ...]
    ints: tuple[str, ...]
    blobs: tuple[str, ...]
    plain: bool
    """All fields are in the schema's order and all values immutable: a shallow copy is the row."""


class _Vector:
    """Stands for the type of any vector in the shape of a record."""


class RecordEncoder:
    """Converts records for one schema; a changed schema gets a new encoder.

    Instances are immutable except for remembered shapes and sizes, so threads may share one.
    """

    def __init__(self, schema: pa.Schema, rules: Rules, *, defined: bool = True) -> None:
        """Without ``defined`` there is no schema yet, and the first record defines it."""
        self.schema, self.rules, self.defined = schema, rules, defined
        self._values = Values(evolving=rules.evolving, vector=rules.vector)
        self._shapes: dict[tuple[Any, ...], Shape] = {}
        self._build_type = pa.struct([type_checks.storage_field(f) for f in schema])
        self._extended = self._build_type != pa.struct(list(schema))
        self.slice_rows = 8
        """Rows that convert quickly, estimated from the last ones; see :func:`chunk.prepare`."""
        self._largest = EXACT_IN_FLOAT64 if rules.evolving else type_checks.INT64_MAX
        narrow = rules.vector if rules.vector != FLOAT64 else None
        self._narrow = tuple(
            f.name
            for f in schema
            if pa.types.is_fixed_size_list(f.type) and f.type.value_type == narrow
        )
        self._vectors = frozenset(f.name for f in schema if is_vector(f.type))
        self.integer_columns = tuple(f.name for f in schema if has_integers(f.type))

    def known_row(self, record: Any) -> int | None:
        """Return the rough size of a record that needs no conversion; None: use :meth:`take`."""
        if type(record) is not dict:
            return None
        shape = self._shapes.get((*record, *map(type, record.values())))
        if shape is None or not shape.plain:
            return None
        for name in shape.ints:
            if not -self._largest <= record[name] <= self._largest:
                return None
        size = _ROW_BYTES
        for name in shape.texts:
            text = record[name]
            size += len(text)
            if not text.isascii():
                if not type_checks.is_unicode(text):
                    return None
                size += 2 * len(text)
        for name in shape.blobs:
            size += len(record[name])
        return size

    def batch_of_alike(self, records: Sequence[Any]) -> pa.RecordBatch | None:
        """Convert records of one known shape (values may be None) column by column.

        Returns None if they must be taken one by one. This is the path of bulk puts: Arrow converts
        a column of known type at a fraction of the cost of dicts.
        """
        first = records[0]
        if self._extended or type(first) is not dict or not first:
            return None
        names = tuple(first)
        if not _all_are(dict, records):
            return None
        try:
            columns = {name: list(map(itemgetter(name), records)) for name in names}
        except KeyError:
            return None
        # Every record has all the names; the sum is larger only if some record has more.
        if sum(map(len, records)) != len(names) * len(records):
            return None
        kinds = [
            _Vector if name in self._vectors else _only_type(column)
            for name, column in columns.items()
        ]
        shape = self._shapes.get((*names, *kinds))
        if shape is None:
            return None
        for name, check in shape.checks:
            if not all(value is None or check(value) for value in columns[name]):
                return None
        try:
            arrays = [
                self._array(f, columns[f.name])
                if f.name in columns
                else pa.nulls(len(records), f.type)
                for f in self.schema
            ]
            if any(array is None for array in arrays):
                return None
            batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
            return None if self._may_have_overflowed(batch) else batch
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError):
            return None

    def _array(self, field: pa.Field, values: list[Any]) -> pa.Array | None:
        if field.name not in self._vectors:
            return pa.array(values, field.type)
        rounding = field.type.value_type == self.rules.vector
        return vectors.column(values, field.type, rounding=rounding)

    def take(self, records: Sequence[Any]) -> tuple[list[dict[str, Any]], RecordEncoder]:
        """Return rows for :meth:`to_batch`, and the encoder to call it on.

        That is this encoder, unless a record changed the schema. If this raises, nothing changed.
        """
        encoder, rows, shapes = self, [], self._shapes
        for number, record in enumerate(records):
            if type(record) is dict:
                shape = shapes.get((*record, *map(type, record.values())))
                if shape is not None and (
                    not shape.checks or all(check(record[name]) for name, check in shape.checks)
                ):
                    rows.append(record)
                    continue
            row, schema = encoder._take_slowly(record, number)
            if schema is not encoder.schema or not encoder.defined:
                encoder = RecordEncoder(schema, self.rules)
                shapes = encoder._shapes
            encoder._remember(record)
            rows.append(row)
        return self._with_new_defaults(rows, encoder), encoder

    def _with_new_defaults(
        self, rows: list[dict[str, Any]], after: RecordEncoder
    ) -> list[dict[str, Any]]:
        """Fill fields that first appeared in a later row, if they have a default."""
        defaults = self.rules.defaults or {}
        new = {
            f.name: self._values.fit(defaults[f.name], f.type, f.name)
            for f in (after.schema if after is not self and defaults else ())
            if f.name not in self.schema.names and defaults.get(f.name) is not None
        }
        return [{**new, **row} for row in rows] if new else rows

    def to_batch(self, rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
        """Convert rows that :meth:`take` returned to one batch of this encoder's schema."""
        try:
            batch = self._convert(rows)
            if self._may_have_overflowed(batch):
                raise OverflowError("a vector holds a value beyond the range of its type")
            return batch
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError) as exc:
            rows = [self._take_slowly(row, number)[0] for number, row in enumerate(rows)]
            try:
                return self._convert(rows)
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                raise SchemaError(f"the records cannot be converted: {exc}") from exc

    def _convert(self, rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
        array = pa.array(rows, self._build_type)
        batch = pa.RecordBatch.from_struct_array(array)
        if not self._extended:
            return batch
        columns = [convert(batch.column(f.name), f.type) for f in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _may_have_overflowed(self, batch: pa.RecordBatch) -> bool:
        """Whether vectors of a narrow type hold infinities: Arrow turns large numbers into them."""
        return any(
            np.isinf(batch.column(name).flatten().to_numpy(zero_copy_only=False)).any()
            for name in self._narrow
        )

    def _take_slowly(self, record: Any, number: int) -> tuple[dict[str, Any], pa.Schema]:
        """Return one record in canonical form, and the schema after it."""
        if not isinstance(record, dict):
            raise SchemaError(
                f"record {number} is a {type(record).__name__}; a record is a dict of fields"
            )
        self._check_fields(record)
        row, types = {}, {f.name: f.type for f in self.schema}
        for name, value in record.items():
            row[name], types[name] = self._take_value(name, value, types.get(name))
        defaults = self.rules.defaults or {}
        for name in types:
            if name not in row:
                row[name], types[name] = self._take_value(name, defaults.get(name), types[name])
        schema = self.schema
        if [(f.name, f.type) for f in schema] != list(types.items()):
            schema = pa.schema(list(types.items()))
        return {name: row[name] for name in types}, schema

    def _check_fields(self, record: dict[Any, Any]) -> None:
        known = set(self.schema.names)
        for name in record:
            if name not in known:
                check_name(name)
                if self.defined and not self.rules.evolving:
                    raise SchemaError(
                        f"field {name!r} is not in the schema ({_listed(self.schema.names)}): this "
                        "backend keeps the fields of the first record; PersistingBackend accepts "
                        "new ones"
                    )
        if not self.rules.evolving:
            for field in self.schema:
                if field.name not in record:
                    raise SchemaError(
                        f"field {field.name!r} is missing: expected {type_name(field.type)}; give "
                        "it a value or None"
                    )

    def _take_value(
        self, name: str, value: Any, known: pa.DataType | None
    ) -> tuple[Any, pa.DataType]:
        if known is None or pa.types.is_null(known):
            known = self._default_type(name)
            if known is None:
                return self._values.describe(value, name, top=True)
        try:
            return self._values.fit(value, known, name), known
        except Misfit as misfit:
            _, own = self._values.describe(value, name, top=True)
            try:
                merged = (widen if self.rules.evolving else learn)(known, own, name)
                return self._values.fit(value, merged, name), merged
            except Conflict as exc:
                raise _mismatch(exc.path, exc.old, exc.new) from None
            except Misfit:
                raise _mismatch(misfit.path, misfit.expected, own) from None

    def _default_type(self, name: str) -> pa.DataType | None:
        """The type of a field's default, which is the field's type from the beginning, or None."""
        default = (self.rules.defaults or {}).get(name)
        if default is None:
            return None
        return self._values.describe(default, name, top=True)[1]

    def _remember(self, record: Any) -> None:
        """Use the fast path for this shape from now on, if Arrow converts such records exactly."""
        if type(record) is not dict:
            return
        missing = set(self.schema.names) - record.keys()
        if any((self.rules.defaults or {}).get(name) is not None for name in missing):
            return
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        needed = type_checks.find(record, self.schema, self.rules.vector)
        if needed is not None:
            plain = not needed.checks and tuple(record) == tuple(self.schema.names)
            key = (*record, *map(type, record.values()))
            self._shapes[key] = Shape(*needed, plain)
        if self._vectors:
            self._remember_besides_vectors(record)

    def _remember_besides_vectors(self, record: dict[str, Any]) -> None:
        """Remember the shape of all other fields: vectors of every kind are converted alike."""
        others = {name: v for name, v in record.items() if name not in self._vectors}
        schema = pa.schema([f for f in self.schema if f.name not in self._vectors])
        needed = type_checks.find(others, schema, self.rules.vector)
        if needed is not None:
            kinds = [_Vector if n in self._vectors else type(v) for n, v in record.items()]
            key = (*record, *kinds)
            self._shapes[key] = Shape(*needed, plain=False)


def _only_type(column: Sequence[Any]) -> type | None:
    """The type of all values that are not None; None if there are several types."""
    if _all_are(type(column[0]), column):
        return type(column[0])
    kinds = set(map(type, column))
    if len(kinds) > 1:
        kinds.discard(type(None))
    return kinds.pop() if len(kinds) == 1 else None


def _all_are(kind: type, values: Sequence[Any]) -> bool:
    return list(map(type, values)).count(kind) == len(values)


def _mismatch(path: str, old: pa.DataType, new: pa.DataType) -> SchemaError:
    return SchemaError(f"field {path!r} is {type_name(old)}, got {type_name(new)}")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(repr(n) for n in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
