"""Finds rows in a Lance dataset: nearest vectors, best text matches, rows that match a condition.

Works on any dataset in the table's layout: the table itself, or one in memory that holds unflushed
rows. So one engine, with one definition of distance, score and condition, searches both.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from persisting.errors import InvalidArgument, StorageError, TableError
from persisting.records.field_names import ARRIVAL
from persisting.suggestions import field_hint, quotes_hint
from persisting.table import text_search
from persisting.table.lance_errors import is_panic, lance_errors_as, reason
from persisting.table.text_search import TextHits, TextRequest
from persisting.table.view import TableView, sizes_of

_ADDRESS, _DISTANCE = "_rowaddr", "_distance"
_PROBED = 1024
_TEXT = re.compile(r"'(?:[^']|'')*'|`[^`]*`")
_REFUSED = re.compile(r"\?|\$\w*|(?<!:):\w+|\b_row(?:id|addr)\b")
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|`[^`]*`""")
_REASON = re.compile(r"\((sql parser error: .*)\)$", re.DOTALL)
_DAMAGE = re.compile(
    r"os error|Not found:|not appear to be a Lance file|LanceError\(IO\)|Invalid range|"
    r"range was invalid"
)
_MISSING = re.compile(r"No field named \"?([^\s\"]+?)\"?[.,]? ")


class UnknownField(InvalidArgument):
    """The condition ``where`` uses a field ``name`` that the view lacks; the topic may have it."""

    def __init__(self, message: str, where: str = "", name: str = "") -> None:
        super().__init__(message)
        self.where, self.name = where, name


def unknown_field(where: str, name: str, fields: Iterable[str]) -> str:
    """Return the message for a condition with a field that is not among ``fields``."""
    return f"where={where!r} names {name!r}; {field_hint(where, name, fields)}"


class SearchRequest(NamedTuple):
    """One search by a vector, in one field."""

    column: str
    vector: Any
    k: int = 10
    where: str | None = None
    metric: str = "l2"
    exact: bool = False


class RowHit(NamedTuple):
    """A row that was found. A smaller value is better, so scores are negated."""

    value: float
    offset: int


def in_memory(table: pa.Table, schema: pa.Schema, start: int) -> TableView:
    """A view of an in-memory dataset of rows in the table's layout; the first is at ``start``."""
    import lance

    dataset = lance.write_dataset(table, f"memory://{uuid.uuid4().hex}")
    sizes = sizes_of(fragment.metadata for fragment in dataset.get_fragments())
    return TableView(dataset, schema, sizes, start)


def hits(view: TableView, ask: SearchRequest) -> list[RowHit]:
    """The best ``k`` rows of a view, best first."""
    if view.dataset is None or not view.rows or ask.column not in view.dataset.schema.names:
        return []
    scan: dict[str, Any] = {
        "columns": [_DISTANCE],
        "with_row_address": True,
        "nearest": {
            "column": ask.column,
            "q": np.asarray(ask.vector, dtype=np.float64),
            "k": min(ask.k, view.rows),
            "metric": ask.metric,
            "nprobes": max(_PROBED, view.rows // _PROBED // 4),
            "use_index": not ask.exact,
        },
    }
    if ask.where is not None:
        scan |= {"filter": enclosed(ask.where), "prefilter": True}
    rows = _run(view, scan, ask.where)
    offsets = view.offsets_of(rows.column(_ADDRESS))
    values = rows.column(_DISTANCE).to_pylist()
    # A vector with an infinite or undefined value has no distance; an index leaves it out as well.
    return sorted(
        RowHit(value, offset)
        for value, offset in zip(values, offsets, strict=True)
        if value is not None and math.isfinite(value)
    )


def text_hits(view: TableView, request: TextRequest) -> TextHits:
    """The rows of a view that match a text query."""

    def scan(view: TableView, options: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        assert view.dataset is not None
        with lance_errors_as(lambda exc: _search_error(exc, view, request.where)):
            yield from view.dataset.scanner(**options).to_batches()

    return text_search.find(view, request, scan)


def check_condition(schema: pa.Schema, where: str) -> None:
    """Raise unless the condition can be used on a table of ``schema``, in the table's layout."""
    view = _empty(schema.serialize().to_pybytes())
    _run(view, {"columns": [], "with_row_address": True, "filter": enclosed(where)}, where)


@lru_cache(maxsize=8)
def _empty(schema: bytes) -> TableView:
    """A view of a table without rows; schemas are compared with their metadata."""
    fields = pa.ipc.read_schema(pa.py_buffer(schema))
    return in_memory(pa.Table.from_batches([], schema=fields), fields, 0)


def count_matching(view: TableView, where: str) -> int:
    """Return the number of rows that match a condition."""
    if view.dataset is None or not view.rows:
        return 0
    with lance_errors_as(lambda exc: _search_error(exc, view, where)):
        scanner = view.dataset.scanner(columns=[], with_row_address=True, filter=enclosed(where))
        return int(scanner.count_rows())


def matching(view: TableView, where: str | None, limit: int | None) -> list[int]:
    """The offsets of the first ``limit`` rows that match a condition, in order."""
    if view.dataset is None or not view.rows or limit == 0:
        return []
    scan: dict[str, Any] = {"columns": [], "with_row_address": True, "scan_in_order": True}
    if where is not None:
        scan["filter"] = enclosed(where)
    if limit is not None:
        scan["limit"] = limit
    return sorted(view.offsets_of(_run(view, scan, where).column(_ADDRESS)))


def _run(view: TableView, scan: dict[str, Any], where: str | None) -> pa.Table:
    assert view.dataset is not None
    with lance_errors_as(lambda exc: _search_error(exc, view, where)):
        return view.dataset.scanner(**scan).to_table()


def _search_error(exc: BaseException, view: TableView, where: str | None) -> StorageError:
    """Decide whether a failed search means damage, a wrong condition or something else."""
    assert view.dataset is not None
    failed = TableError(f"cannot search the table {view.dataset.uri}: {reason(exc)}")
    if not isinstance(exc, ValueError):
        if where is not None and ("aborted" in str(exc) or is_panic(exc)):
            return InvalidArgument(f"where={where!r} cannot be used: Lance cannot evaluate it")
        return failed
    if _DAMAGE.search(str(exc)):
        return failed
    text = str(exc).replace("Invalid user input: ", "").split(", /home/runner")[0]
    if where is None:
        return StorageError(f"the search failed: {text}")
    missing = _MISSING.search(text)
    if missing is not None:
        fields = [name for name in view.schema.names if name != ARRIVAL]
        return UnknownField(unknown_field(where, missing[1], fields), where, missing[1])
    problem, hint = _parser_error(text, where), quotes_hint(where)
    return InvalidArgument(
        f"where={where!r} cannot be used: {problem}{f'; {hint}' if hint else ''}"
    )


def _parser_error(text: str, where: str) -> str:
    """The error of Lance's parser, in terms of the user's condition without our brackets."""
    parser = _REASON.search(text)
    text = parser[1] if parser else text.replace(enclosed(where), where)
    text = text.removeprefix("Error during planning: ")
    text = text.replace("Expected: ),", "Expected: its end,")
    return re.sub(r"found: \)$", "found: its end", text)


def enclosed(where: str) -> str:
    """The condition in brackets. Lance parses one expression and ignores anything after it; the
    brackets make trailing text an error."""
    return f"({where}\n)"


def check_where(where: Any) -> None:
    """Raise unless ``where`` is None or one SQL condition."""
    if where is None:
        return
    if not isinstance(where, str) or not where.strip():
        raise InvalidArgument(
            f'where must be an SQL condition such as "score > 0.5", got {where!r}'
        )
    plain = _QUOTED.sub("", where)
    if '"' in _TEXT.sub("", where):
        raise InvalidArgument(
            f"where={where!r}: quote the name of a field with backticks, a text with single quotes"
        )
    refused = _REFUSED.search(plain)
    if refused is not None:
        raise InvalidArgument(f"where={where!r}: {refused[0]!r} cannot be used in a condition")
    depth = 0
    for bracket in re.sub(r"[^()]", "", plain):
        depth += 1 if bracket == "(" else -1
        if depth < 0:
            raise InvalidArgument(f"where={where!r} closes a bracket that is not open")
