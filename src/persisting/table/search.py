"""Finding rows in a Lance dataset: the nearest vectors, the best texts, those that a filter keeps.

It works on any dataset in the table's layout: the table itself, or one in memory that holds what
has not been flushed yet, so that both are searched by one engine with one notion of distance,
score and filter.
"""

from __future__ import annotations

import math
import re
import uuid
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from persisting.errors import InvalidArgument, StorageError
from persisting.records.field_names import ARRIVAL
from persisting.table.lance_errors import indices_of, translated
from persisting.table.view import TableView, sizes_of

_ADDRESS = "_rowaddr"
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
    """A filter names a field that this dataset does not have."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class SearchRequest(NamedTuple):
    """One search, by a vector or by words, in one field."""

    column: str
    vector: Any = None
    text: str | None = None
    k: int = 10
    where: str | None = None
    metric: str = "l2"
    exact: bool = False


class Hit(NamedTuple):
    """A row that was found; a smaller value is better, so a score is kept negative."""

    value: float
    offset: int


def has_words(view: TableView, column: str) -> bool:
    """Whether a view has an index of the words of a field."""
    if view.dataset is None:
        return False
    return any(
        index.index_type == "Inverted" and index.field_names == [column]
        for index in indices_of(view.dataset)
    )


def in_memory(table: pa.Table, schema: pa.Schema, start: int) -> TableView:
    """Rows in the table's layout as a view; they are the rows from ``start`` on."""
    import lance

    dataset = lance.write_dataset(table, f"memory://{uuid.uuid4().hex}")
    sizes = sizes_of(fragment.metadata for fragment in dataset.get_fragments())
    return TableView(dataset, schema, sizes, start)


def hits(view: TableView, ask: SearchRequest) -> list[Hit]:
    """The best ``k`` rows of a view, best first."""
    if view.dataset is None or not view.rows or ask.column not in view.dataset.schema.names:
        return []
    by_vector = ask.vector is not None
    value = "_distance" if by_vector else "_score"
    scan: dict[str, Any] = {"columns": [value], "with_row_address": True}
    if by_vector:
        scan["nearest"] = {
            "column": ask.column,
            "q": np.asarray(ask.vector, dtype=np.float64),
            "k": min(ask.k, view.rows),
            "metric": ask.metric,
            "nprobes": max(_PROBED, view.rows // _PROBED // 4),
            "use_index": not ask.exact,
        }
    else:
        import lance

        words = lance.query.MatchQuery(ask.text or "", ask.column)
        scan |= {"full_text_query": words, "limit": ask.k}
    if ask.where is not None:
        scan |= {"filter": enclosed(ask.where), "prefilter": True}
    found = _run(view, scan, ask.where)
    offsets = view.offsets_of(found.column(_ADDRESS))
    values = found.column(value).to_pylist()
    sign = 1 if by_vector else -1
    # A vector with an infinite or undefined value has no distance; an index leaves it out, too.
    return sorted(
        Hit(sign * value, offset)
        for value, offset in zip(values, offsets, strict=True)
        if value is not None and math.isfinite(value)
    )


def check_condition(schema: pa.Schema, where: str) -> None:
    """Raise unless a table of ``schema``, in the table's layout, takes the condition."""
    view = in_memory(pa.Table.from_batches([], schema=schema), schema, 0)
    _run(view, {"columns": [], "with_row_address": True, "filter": enclosed(where)}, where)


def matching(view: TableView, where: str | None, limit: int | None) -> list[int]:
    """The offsets of the first ``limit`` rows that a filter keeps, in order."""
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
    try:
        return view.dataset.scanner(**scan).to_table()
    except ValueError as exc:
        if _DAMAGE.search(str(exc)):
            with translated("search", view.dataset.uri):
                raise
        text = str(exc).replace("Invalid user input: ", "").split(", /home/runner")[0]
        if where is None:
            raise StorageError(f"the search failed: {text}") from exc
        missing = _MISSING.search(text)
        if missing is not None:
            known = [name for name in view.schema.names if name != ARRIVAL]
            fields = ", ".join(map(repr, known)) or "none yet"
            raise UnknownField(
                missing[1], f"where={where!r} names {missing[1]!r}; the fields are: {fields}"
            ) from exc
        reason = _REASON.search(text)
        text = reason[1] if reason else text.replace(enclosed(where), where)
        # The last bracket is ours.
        text = text.replace("Expected: ),", "Expected: its end,")
        text = re.sub(r"found: \)$", "found: its end", text)
        raise InvalidArgument(f"where={where!r} cannot be used: {text}") from exc
    except BaseException as exc:
        if where is not None and ("aborted" in str(exc) or type(exc).__name__ == "PanicException"):
            raise InvalidArgument(f"where={where!r} cannot be used: Lance gives up on it") from exc
        with translated("search", view.dataset.uri):
            raise exc


def enclosed(where: str) -> str:
    """In brackets, so that Lance, which reads one expression, cannot overlook what follows it."""
    return f"({where}\n)"


def check_where(where: Any) -> None:
    """A filter is one SQL condition."""
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
    found = _REFUSED.search(plain)
    if found is not None:
        raise InvalidArgument(f"where={where!r}: {found[0]!r} cannot be used in a condition")
    depth = 0
    for bracket in re.sub(r"[^()]", "", plain):
        depth += 1 if bracket == "(" else -1
        if depth < 0:
            raise InvalidArgument(f"where={where!r} closes a bracket that is not open")
