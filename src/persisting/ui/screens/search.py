"""Search by words, by a vector, by a condition, or by all of these."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument, StorageError
from persisting.table.indexes import is_text
from persisting.topic.topic_files import TopicFolder
from persisting.ui import pages
from persisting.ui.console import Console, topic_of
from persisting.ui.matches import vector_fields
from persisting.ui.queries import QueryStopped, RecordHit, SearchQuery, unless_left
from persisting.ui.requests import Parameters
from persisting.ui.value_trees import brief, highlighted

_DEFAULT_HITS, _MAX_HITS = 20, 200
_MAX_VECTOR = 100_000
_CELLS = 8
_TEXT_FIELDS = ("text", "content", "message", "body", "prompt")


@dataclass
class Result:
    """A hit as the page shows it: its texts with marked words."""

    hit: RecordHit
    cells: list[tuple[str, Markup | str]]


async def show(request: Request) -> Response:
    """Show the form and, if it is filled, what was found."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)

    def read(source: TopicFolder) -> tuple[list[str], list[str], list[str], bool]:
        schema = source.schema()
        texts = [field.name for field in schema if is_text(field.type)]
        has_log = bool(source.config.options.get("enable_wal"))
        return schema.names, vector_fields(source), texts, has_log

    names, vectors, texts, has_log = await console.view.read(topic, read)
    problem, results, status = None, None, 200
    try:
        query = _query(console, topic, given, texts)
        if query is not None:
            hits = await unless_left(request, console.queries.run(query, list[RecordHit]))
            words = (query.text or "").split()
            results = await in_thread(
                lambda: [Result(hit, _cells(hit.record, words, names)) for hit in hits]
            )
    except (InvalidArgument, QueryStopped) as exc:
        problem, status = str(exc), 503 if isinstance(exc, QueryStopped) else 400
    except StorageError as exc:
        problem, status = str(exc), 500
    return pages.render(
        request,
        "search.html",
        status=status,
        topic=topic,
        fields=names,
        vectors=vectors,
        texts=texts,
        given=given,
        results=results,
        problem=problem,
        has_log=has_log,
        k=_DEFAULT_HITS,
        max_hits=_MAX_HITS,
    )


def _query(console: Console, topic: str, given: Parameters, texts: list[str]) -> SearchQuery | None:
    """Return the query that a form asks for, None if it is empty."""
    text, where = given.text("text", 1_000), given.text("where")
    like, vector = given.position("like"), _vector(given.text("vector", _MAX_VECTOR))
    if like is not None and vector is not None:
        raise InvalidArgument("give either a vector or the record that the hits are to be like")
    if text is None and where is None and like is None and vector is None:
        return None
    return SearchQuery(
        storage=console.view.place,
        topic=topic,
        k=given.number("k", _DEFAULT_HITS, least=1, most=_MAX_HITS),
        text=text,
        vector=vector,
        like=like,
        text_field=given.text("text_field", 1_000) or _likely(texts),
        vector_field=given.text("vector_field", 1_000),
        where=where,
    )


def _likely(texts: list[str]) -> str | None:
    """Return the field that words are searched in unless the reader chooses another."""
    return next((name for name in _TEXT_FIELDS if name in texts), None)


def _vector(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(item) in (int, float) for item in found):
        raise InvalidArgument("vector must be a JSON list of numbers, as in [0.1, 0.9]")
    try:
        return [float(item) for item in found]
    except OverflowError:
        raise InvalidArgument("vector has a number that is too large for a float") from None


def _cells(
    record: dict[str, Any], words: list[str], names: list[str]
) -> list[tuple[str, Markup | str]]:
    """Return the fields of a hit: those with a searched word first."""
    cells: list[tuple[bool, str, Markup | str]] = []
    for name in names:
        value = record.get(name)
        if value is None:
            continue
        if isinstance(value, str) and words:
            marked = highlighted(value, words)
            cells.append(("<mark>" in marked, name, marked))
        else:
            cells.append((False, name, brief(value, 200)))
    cells.sort(key=lambda cell: not cell[0])
    return [(name, value) for _, name, value in cells[:_CELLS]]
