"""Search, lookup and filters over a snapshot: the table and what is still buffered."""

from __future__ import annotations

import datetime as dt
import decimal
import logging
import math
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from persisting.bucket.snapshot import Snapshot
from persisting.errors import InvalidArgument
from persisting.options import check_window
from persisting.records.arrow import align
from persisting.records.evolution import integers_become_floats
from persisting.table import indexes, layout, search
from persisting.table.lance_errors import own_handle
from persisting.table.search import Hit, SearchRequest, UnknownField

if TYPE_CHECKING:
    from persisting.table.indexes import IndexSpec
    from persisting.table.view import TableView

log = logging.getLogger("persisting")

_FUSION = 60
_CANDIDATES = 4
_MOST = 10_000
_WORDS_ROWS = 65536
DISTANCE, SCORE, OFFSET = "_distance", "_score", "_offset"


class BufferView:
    """The buffer as the last search laid it out, for the next one that finds it unchanged."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._kept: tuple[Any, TableView] | None = None
        self._told: set[str] = set()

    def of(self, snapshot: Snapshot) -> TableView:
        with self._guard:
            if self._kept is None or self._kept[0] != snapshot.buffer_key:
                rows = snapshot.table(snapshot.persisted, None)
                times = pa.array(snapshot.buffered_arrivals())
                view = laid_out(rows, snapshot.schema, snapshot.persisted, times)
                self._kept = snapshot.buffer_key, view
            return self._kept[1]

    def first_time(self, column: str) -> bool:
        """Whether this is the first warning about a field."""
        with self._guard:
            known = column in self._told
            self._told.add(column)
            return not known

    def with_words(self, view: TableView, column: str) -> None:
        """Have an index of the words of a field, made once."""
        with self._guard:
            if not search.has_words(view, column):
                # On a handle of its own: building borrows it, and others search the view's.
                handle = own_handle(view.dataset)
                indexes.build_text(handle, column, f"words_{column}")
                view.dataset = handle


class SnapshotSearch:
    """Looks for rows in a snapshot. Blocking; use a thread."""

    def __init__(
        self, snapshot: Snapshot, known: pa.Schema, wanted: list[IndexSpec], buffer: BufferView
    ) -> None:
        """``known`` are all fields of the topic."""
        self._snapshot, self.known, self._wanted = snapshot, known, wanted
        self._buffer = buffer

    # Search

    def asks(
        self,
        *,
        vector: Any,
        text: str | None,
        column: str | Sequence[str] | None,
        k: int,
        where: str | None,
        metric: str | None,
        exact: bool,
    ) -> list[SearchRequest]:
        """One search for each of the vector and the words, or raise for what cannot be."""
        _check_count(k)
        search.check_where(where)
        if vector is None and text is None:
            raise InvalidArgument("search needs vector=…, text=… or both")
        if metric is not None and metric not in indexes.METRICS:
            raise InvalidArgument(f"metric must be one of {', '.join(indexes.METRICS)}")
        if column is not None and not isinstance(column, (str, list, tuple)):
            raise InvalidArgument(f"column must be a field's name, got {column!r}")
        for own in (DISTANCE, SCORE):
            if own in self.known.names:
                raise InvalidArgument(
                    f"the records have a field {own!r}, a name that a search needs for itself"
                )
        columns = [column] if isinstance(column, str) else list(column or ())
        for name in columns:
            indexes.field_of(self.known, name)
        both = vector is not None and text is not None
        depth = min(_MOST, max(k * _CANDIDATES, 50)) if both else k
        found = []
        if vector is not None:
            name = self._column(columns, "vector", only=not both)
            values = _checked_vector(vector, self.known.field(name))
            own = self._metric(name)
            flat = exact or (metric is not None and metric != own)
            found.append(SearchRequest(name, values, None, depth, where, metric or own, flat))
        if text is not None:
            if not isinstance(text, str) or not text.strip():
                raise InvalidArgument(f"text must be words to look for, got {text!r}")
            name = self._column(columns, "text", only=not both)
            found.append(SearchRequest(name, None, text, depth, where))
        return found

    def _column(self, columns: list[str], family: str, *, only: bool) -> str:
        """The field to search; where none is named, the one that can be meant."""
        fits = indexes.is_vector if family == "vector" else indexes.is_text
        named = [name for name in columns if fits(self.known.field(name).type)]
        if only and columns and (len(columns) > 1 or not named):
            dtype = self.known.field(columns[0]).type
            raise InvalidArgument(
                f"column={columns!r}: name one {family} field"
                + (f"; {columns[0]!r} is {dtype}" if len(columns) == 1 else "")
            )
        if not named:
            indexed = [
                one.column
                for one in self._wanted
                if one.family == family and one.column in self.known.names
            ]
            indexed = [name for name in indexed if fits(self.known.field(name).type)]
            named = indexed or [f.name for f in self.known if fits(f.type)]
        if len(named) != 1:
            there = ", ".join(map(repr, named)) or "none"
            if not self.known.names:
                raise InvalidArgument("nothing is stored yet that could be searched")
            raise InvalidArgument(
                f"say which {family} field to search (column=…); there are: {there}"
            )
        return named[0]

    def _metric(self, column: str) -> str:
        for one in self._wanted:
            if one.column == column and one.family == "vector":
                return one.metric
        return "l2"

    def hits(self, ask: SearchRequest) -> list[Hit]:
        """The best rows for one ask, best first."""
        look = (lambda view: search.hits(view, ask)) if ask.text is None else self._words(ask)
        return sorted(self._in_all(look, ask.where))[: ask.k]

    def _words(self, ask: SearchRequest) -> Any:
        """A look for words: where no index splits the text into words, one is made in memory."""

        def look(view: TableView) -> list[Hit]:
            if view.dataset is None or not view.rows:
                return []
            if ask.column not in view.dataset.schema.names:
                return []
            if search.has_words(view, ask.column):
                return search.hits(view, ask)
            if view is not self._snapshot.view:
                self._buffer.with_words(view, ask.column)
                return search.hits(view, ask)
            if view.rows > _WORDS_ROWS and self._buffer.first_time(ask.column):
                log.warning(
                    "a search for words in field %r reads all %d rows: create_index(%r) makes it "
                    "quick",
                    ask.column,
                    view.rows,
                    ask.column,
                )
            schema, names = self._snapshot.schema, None
            if ask.where is None:
                schema, names = pa.schema([schema.field(ask.column)]), [ask.column]
            return [hit for part in self._parts(names, schema) for hit in look(part)]

        return look

    def _parts(self, names: list[str] | None, schema: pa.Schema) -> Iterator[TableView]:
        """The table's rows as views in memory, some at a time."""
        view = self._snapshot.view
        offset = view.start
        for batch in view.batches(offset, view.rows, names, rows=_WORDS_ROWS, arrival=True):
            times = batch.column(layout.ARRIVAL_FIELD.name)
            rows = pa.Table.from_batches([batch.drop_columns([layout.ARRIVAL_FIELD.name])])
            yield laid_out(rows, schema, offset, times, self._snapshot.defaults)
            offset += batch.num_rows

    def found(
        self, hits: Sequence[Hit], by: str, columns: pa.Schema | None
    ) -> list[dict[str, Any]]:
        """The records of hits, each with what makes it one."""
        records = self._snapshot.take([hit.offset for hit in hits], columns)
        sign = 1 if by == DISTANCE else -1
        return [
            {**record, by: sign * hit.value, OFFSET: hit.offset}
            for record, hit in zip(records, hits, strict=True)
        ]

    # Filters

    def matching(
        self, where: str | None, columns: pa.Schema | None, limit: int | None
    ) -> list[dict[str, Any]]:
        """The first records that a condition keeps, in order."""
        search.check_where(where)
        check_window(0, limit)
        found: list[dict[str, Any]] = []
        step = _MOST if limit is None else limit
        offsets = self._in_all(lambda view: search.matching(view, where, limit), where)
        offsets = sorted(offsets)[:limit]
        for start in range(0, len(offsets), max(1, step)):
            found += self._snapshot.take(offsets[start : start + step], columns)
        return found

    # Where to look

    def _in_all(self, look: Any, where: str | None = None) -> list[Any]:
        """What ``look``, with the condition ``where``, finds in the table and in the buffer."""
        try:
            if where is None or not self._divides_otherwise(where):
                return [one for view in self._views() for one in look(view)]
        except UnknownField as exc:
            if exc.name.split(".")[0] not in self.known.names:
                raise UnknownField(exc.where, exc.name, self.known.names) from exc
        except InvalidArgument:
            if self._snapshot.view.schema.equals(self.known):
                raise
        # The table lacks a field that is known by now, or has it with a narrower type.
        return [one for view in self._filled_views() for one in look(view)]

    def _divides_otherwise(self, where: str) -> bool:
        """Whether a division may be one of whole numbers that are floats by now."""
        view = self._snapshot.view.schema
        return "/" in where and any(
            integers_become_floats(field.type, self.known.field(field.name).type)
            for field in view
            if field.name in self.known.names
        )

    def _views(self) -> Iterator[TableView]:
        yield self._snapshot.view
        if self._snapshot.end > self._snapshot.persisted:
            yield self._buffer.of(self._snapshot)

    def _filled_views(self) -> Iterator[TableView]:
        """All rows as views in memory, with all fields that are known, some at a time."""
        view = self._snapshot.view
        yield from self._parts(None, self.known)
        if self._snapshot.end > view.end:
            rows = self._snapshot.table(view.end, None)
            times = pa.array(self._snapshot.buffered_arrivals())
            yield laid_out(rows, self.known, view.end, times, self._snapshot.defaults)


def laid_out(
    rows: pa.Table,
    schema: pa.Schema,
    start: int,
    arrivals: pa.Array | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> TableView:
    """Records as a view in the table's layout, in memory."""
    fields = typed(schema)
    physical = layout.physical_schema(fields, None)
    arrivals = pa.nulls(rows.num_rows) if arrivals is None else arrivals
    times = arrivals.cast(layout.ARRIVAL_FIELD.type)
    batches = [align(one, fields, defaults) for one in rows.combine_chunks().to_batches()]
    laid = [layout.to_physical(one, times, physical) for one in batches]
    return search.in_memory(pa.Table.from_batches(laid, schema=physical), fields, start)


def typed(schema: pa.Schema) -> pa.Schema:
    """The schema with a type for fields that were only ever None."""
    return pa.schema([f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in schema])


def fused(lists: Sequence[Sequence[Any]], key: Any, k: int) -> list[tuple[Any, float]]:
    """Several rankings as one: a hit scores 1 / (60 + its rank) in each that has it."""
    scores: dict[Any, float] = {}
    kept: dict[Any, Any] = {}
    for ranking in lists:
        for rank, hit in enumerate(ranking, 1):
            scores[key(hit)] = scores.get(key(hit), 0.0) + 1 / (_FUSION + rank)
            kept.setdefault(key(hit), hit)
    best = sorted(scores, key=lambda one: (-scores[one], one))[:k]
    return [(kept[one], scores[one]) for one in best]


def condition(column: str, value: Any) -> str:
    """The SQL condition that a field has a value."""
    if not isinstance(column, str):
        raise InvalidArgument(f"column must be a field's name, got {column!r}")
    name = f"`{column}`"
    if value is None:
        return f"{name} IS NULL"
    if isinstance(value, float) and math.isnan(value):
        return f"isnan({name})"
    return f"{name} = {_literal(column, value)}"


def only_equal(
    records: list[dict[str, Any]], column: str, value: Any, columns: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Those that really have the value: a condition may take a neighbour for it, where the
    field's type cannot hold the value itself. ``columns`` are the fields to leave."""
    if isinstance(value, np.generic):
        value = value.item()
    same = [r for r in records if r.get(column) == value]
    found = records if value != value else same
    if columns is None or column in columns:
        return found
    return [{name: record.get(name) for name in columns} for record in found]


def _literal(column: str, value: Any) -> str:
    if isinstance(value, (np.generic,)):
        value = value.item()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, int):
        return str(value) if value > -(2**63) else f"CAST('{value}' AS BIGINT)"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"CAST('{value}' AS DOUBLE)"
    if isinstance(value, decimal.Decimal) and value.is_finite():
        return f"CAST('{value:f}' AS DECIMAL(38, 18))"
    if isinstance(value, (bytes, bytearray)):
        return f"X'{bytes(value).hex()}'"
    if isinstance(value, uuid.UUID):
        return f"X'{value.hex}'"
    if isinstance(value, dt.time) and value.tzinfo is None:
        return f"arrow_cast('{value.isoformat('microseconds')}', 'Time64(Microsecond)')"
    if isinstance(value, dt.timedelta):
        micros = value // dt.timedelta(microseconds=1)
        return f"arrow_cast({micros}, 'Duration(Microsecond)')"
    if isinstance(value, dt.datetime):
        moment = value if value.tzinfo is None else value.astimezone(dt.timezone.utc)
        return f"timestamp '{moment.replace(tzinfo=None).isoformat(' ')}'"
    if isinstance(value, dt.date):
        return f"date '{value.isoformat()}'"
    raise InvalidArgument(
        f"field {column!r} cannot be looked up by a {type(value).__name__} {value!r}; use query()"
    )


def _checked_vector(vector: Any, field: pa.Field) -> list[float]:
    try:
        values = np.asarray(vector, dtype=np.float64)
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"vector must be a list of floats, got {vector!r:.80}") from exc
    if values.ndim != 1:
        raise InvalidArgument(f"vector must be one list of floats, got {values.ndim} dimensions")
    if not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise InvalidArgument("vector holds a value that is not finite, or beyond a 32-bit float")
    if len(values) != field.type.list_size:
        raise InvalidArgument(
            f"vector has {len(values)} values, field {field.name!r} has {field.type.list_size}"
        )
    found: list[float] = values.tolist()
    return found


def _check_count(k: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= _MOST:
        raise InvalidArgument(f"k must be a whole number from 1 to {_MOST}, got {k!r}")
