"""Search, lookup and filters over a snapshot: the table and the buffer."""

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
from persisting.records.evolution import integers_become_floats, is_vector
from persisting.table import indexes, layout, search, text_query
from persisting.table.search import Hit, SearchRequest, UnknownField
from persisting.table.text_scoring import Statistics
from persisting.table.text_search import TextRequest

if TYPE_CHECKING:
    from persisting.table.indexes import IndexSpec
    from persisting.table.view import TableView

log = logging.getLogger("persisting")

_RANK_FUSION = 60
_CANDIDATES = 4
_MAX_RESULTS = 10_000
_TEXT_SCAN_ROWS = 65536
DISTANCE, SCORE, OFFSET = "_distance", "_score", "_offset"


class BufferView:
    """Caches the buffer in the table's layout for the next search that finds it unchanged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: tuple[Any, TableView] | None = None
        self._warned: set[str] = set()

    def of(self, snapshot: Snapshot) -> TableView:
        """Return the buffered rows of a snapshot as a view."""
        with self._lock:
            if self._cached is None or self._cached[0] != snapshot.buffer_key:
                rows = snapshot.table(snapshot.persisted, None)
                times = pa.array(snapshot.buffered_arrivals())
                view = laid_out(rows, snapshot.schema, snapshot.persisted, times)
                self._cached = snapshot.buffer_key, view
            return self._cached[1]

    def is_first_warning(self, column: str) -> bool:
        """Whether this is the first warning about a field."""
        with self._lock:
            warned = column in self._warned
            self._warned.add(column)
            return not warned


class SnapshotSearch:
    """Finds rows in a snapshot. Blocking; use a thread."""

    def __init__(
        self, snapshot: Snapshot, known: pa.Schema, indexed: list[IndexSpec], buffer: BufferView
    ) -> None:
        """``known`` holds all fields of the topic, ``indexed`` the indexes of the bucket."""
        self._snapshot, self.known, self._indexed = snapshot, known, indexed
        self._buffer = buffer

    # Search

    def requests(
        self,
        *,
        vector: Any,
        text: str | None,
        column: str | Sequence[str] | None,
        k: int,
        where: str | None,
        metric: str | None,
        exact: bool,
        match: str = "any",
        fuzziness: int = 0,
    ) -> list[SearchRequest | TextRequest]:
        """Return one request for the vector and one for the text; raise for invalid arguments."""
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
                    f"the records have a field {own!r}, a name that search results use"
                )
        columns = [column] if isinstance(column, str) else list(column or ())
        for name in columns:
            indexes.field_of(self.known, name)
        both = vector is not None and text is not None
        depth = min(_MAX_RESULTS, max(k * _CANDIDATES, 50)) if both else k
        requests: list[SearchRequest | TextRequest] = []
        if vector is not None:
            name = self._column(columns, "vector", only=not both)
            values = _checked_vector(vector, self.known.field(name))
            own = self._metric(name)
            flat = exact or (metric is not None and metric != own)
            requests.append(SearchRequest(name, values, depth, where, metric or own, flat))
        if text is not None:
            query = text_query.parse(text, match, fuzziness)
            name = self._column(columns, "text", only=not both)
            index = self._index(name, "text")
            requests.append(
                TextRequest(
                    name,
                    query,
                    depth,
                    where,
                    language=None if index is None else index.language,
                    index=None if index is None else index.name,
                )
            )
        elif (match, fuzziness) != ("any", 0):
            raise InvalidArgument("match and fuzziness are for a text search: pass text=… too")
        return requests

    def _column(self, columns: list[str], family: str, *, only: bool) -> str:
        """Return the field to search: the named one, or the only one that qualifies."""
        fits = is_vector if family == "vector" else indexes.is_text
        named = [name for name in columns if fits(self.known.field(name).type)]
        if only and columns and (len(columns) > 1 or not named):
            dtype = self.known.field(columns[0]).type
            raise InvalidArgument(
                f"column={columns!r}: name one {family} field"
                + (f"; {columns[0]!r} is {dtype}" if len(columns) == 1 else "")
            )
        if not named:
            indexed = [
                spec.column
                for spec in self._indexed
                if spec.family == family and spec.column in self.known.names
            ]
            indexed = [name for name in indexed if fits(self.known.field(name).type)]
            named = indexed or [f.name for f in self.known if fits(f.type)]
        if len(named) != 1:
            candidates = ", ".join(map(repr, named)) or "none"
            if not self.known.names:
                raise InvalidArgument("nothing is stored yet: there is no field to search")
            raise InvalidArgument(
                f"name the {family} field to search (column=…); there are: {candidates}"
            )
        return named[0]

    def _metric(self, column: str) -> str:
        index = self._index(column, "vector")
        return "l2" if index is None else index.metric

    def _index(self, column: str, family: str) -> IndexSpec | None:
        """Return the requested index of a field; it may not be built yet."""
        specs = (spec for spec in self._indexed if spec.column == column)
        return next((spec for spec in specs if spec.family == family), None)

    def hits(self, request: SearchRequest | TextRequest) -> list[Hit]:
        """Return the best rows for a request, best first."""
        if isinstance(request, TextRequest):
            hits = self._text_hits(request)
        else:
            hits = self._search_all(lambda view: search.hits(view, request), request.where)
        return sorted(hits)[: request.k]

    def _text_hits(self, request: TextRequest) -> list[Hit]:
        """Return the rows that match, all scored with the word counts of table and buffer."""
        rows = self._snapshot.view.rows
        if request.index is None and rows > _TEXT_SCAN_ROWS:
            if self._buffer.is_first_warning(request.column):
                log.warning(
                    "a text search in field %r reads all %d rows: create_index(%r) makes it fast",
                    request.column,
                    rows,
                    request.column,
                )
        results = self._search_all(lambda view: [search.text_hits(view, request)], request.where)
        hits = [Hit(-score, offset) for found in results for score, offset in found.scored]
        matches = [part for found in results for part in found.matches if len(part.places)]
        if matches:
            words = {name for part in matches for name in part.names}
            statistics = sum((found.statistics(words) for found in results), Statistics())
            for part in matches:
                hits += _best(part.scores(statistics), part.places, request.k)
        return hits

    def _parts(self, names: list[str] | None, schema: pa.Schema) -> Iterator[TableView]:
        """Yield the table's rows as views in memory, some at a time."""
        view = self._snapshot.view
        offset = view.start
        for batch in view.batches(offset, view.rows, names, rows=_TEXT_SCAN_ROWS, arrival=True):
            times = batch.column(layout.ARRIVAL_FIELD.name)
            rows = pa.Table.from_batches([batch.drop_columns([layout.ARRIVAL_FIELD.name])])
            yield laid_out(rows, schema, offset, times, self._snapshot.defaults)
            offset += batch.num_rows

    def records(
        self, hits: Sequence[Hit], by: str, columns: pa.Schema | None
    ) -> list[dict[str, Any]]:
        """Return the records of hits, each with its distance or score and its offset."""
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
        """Return the first records that match a condition, in order."""
        check_window(0, limit)
        records: list[dict[str, Any]] = []
        step = _MAX_RESULTS if limit is None else limit
        offsets = self.matching_offsets(where, limit)
        for start in range(0, len(offsets), max(1, step)):
            records += self._snapshot.take(offsets[start : start + step], columns)
        return records

    def matching_offsets(self, where: str | None, limit: int | None) -> list[int]:
        """Return the offsets of the first records that match a condition, in order."""
        search.check_where(where)
        offsets = self._search_all(lambda view: search.matching(view, where, limit), where)
        return sorted(offsets)[:limit]

    def count(self, where: str | None) -> int:
        """Return the number of records that match a condition."""
        search.check_where(where)
        if where is None:
            return self._snapshot.end - self._snapshot.start
        return sum(self._search_all(lambda view: [search.count_matching(view, where)], where))

    # The views to search

    def _search_all(self, find: Any, where: str | None = None) -> list[Any]:
        """Return what ``find``, with the condition ``where``, finds in the table and the buffer."""
        try:
            if where is None or not self._division_changes(where):
                return [hit for view in self._views() for hit in find(view)]
        except UnknownField as exc:
            if exc.name.split(".")[0] not in self.known.names:
                message = search.unknown_field(exc.where, exc.name, self.known.names)
                raise InvalidArgument(message) from exc
        except InvalidArgument:
            if self._snapshot.view.schema.equals(self.known):
                raise
        # The table lacks a field that the topic now has, or has it with a narrower type.
        return [hit for view in self._filled_views() for hit in find(view)]

    def _division_changes(self, where: str) -> bool:
        """Whether a condition may divide whole numbers that are floats in the topic's schema."""
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
        """Yield all rows as views in memory with all fields of the topic, some at a time."""
        view = self._snapshot.view
        yield from self._parts(None, self.known)
        if self._snapshot.end > view.end:
            rows = self._snapshot.table(view.end, None)
            times = pa.array(self._snapshot.buffered_arrivals())
            yield laid_out(rows, self.known, view.end, times, self._snapshot.defaults)


def _best(scores: Any, offsets: Any, k: int) -> list[Hit]:
    """Return the ``k`` hits with the largest scores."""
    order = np.lexsort((offsets, -scores))[:k]
    pairs = zip(scores[order].tolist(), offsets[order].tolist(), strict=True)
    return [Hit(-score, offset) for score, offset in pairs]


def laid_out(
    rows: pa.Table,
    schema: pa.Schema,
    start: int,
    arrivals: pa.Array | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> TableView:
    """Return records as a view in the table's layout, in memory."""
    fields = typed(schema)
    physical = layout.physical_schema(fields, None)
    arrivals = pa.nulls(rows.num_rows) if arrivals is None else arrivals
    times = arrivals.cast(layout.ARRIVAL_FIELD.type)
    batches = [align(batch, fields, defaults) for batch in rows.combine_chunks().to_batches()]
    stored = [layout.to_physical(batch, times, physical) for batch in batches]
    return search.in_memory(pa.Table.from_batches(stored, schema=physical), fields, start)


def typed(schema: pa.Schema) -> pa.Schema:
    """Return the schema with string as the type of fields that were only ever None."""
    return pa.schema([f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in schema])


def fuse_rankings(rankings: Sequence[Sequence[Any]], key: Any, k: int) -> list[tuple[Any, float]]:
    """Merge rankings: a hit scores the sum of 1 / (60 + its rank) in each ranking that has it."""
    scores: dict[Any, float] = {}
    hits: dict[Any, Any] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, 1):
            scores[key(hit)] = scores.get(key(hit), 0.0) + 1 / (_RANK_FUSION + rank)
            hits.setdefault(key(hit), hit)
    best = sorted(scores, key=lambda place: (-scores[place], place))[:k]
    return [(hits[place], scores[place]) for place in best]


def condition(column: str, value: Any) -> str:
    """Return the SQL condition that a field equals a value."""
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
    """Return the records that really have the value, with the fields ``columns``.

    A condition may match a neighbouring value if the field's type cannot hold the value itself.
    """
    if isinstance(value, np.generic):
        value = value.item()
    is_nan = value != value
    equal = records if is_nan else [record for record in records if record.get(column) == value]
    if columns is None or column in columns:
        return equal
    return [{name: record.get(name) for name in columns} for record in equal]


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
        utc = value if value.tzinfo is None else value.astimezone(dt.timezone.utc)
        return f"timestamp '{utc.replace(tzinfo=None).isoformat(' ')}'"
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
        raise InvalidArgument("vector holds a value that is not finite or exceeds a 32-bit float")
    if len(values) != field.type.list_size:
        raise InvalidArgument(
            f"vector has {len(values)} values, field {field.name!r} has {field.type.list_size}"
        )
    checked: list[float] = values.tolist()
    return checked


def _check_count(k: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= _MAX_RESULTS:
        raise InvalidArgument(f"k must be a whole number from 1 to {_MAX_RESULTS}, got {k!r}")
