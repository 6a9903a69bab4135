"""Trajectories: the records of a run as a timeline of steps."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from persisting.errors import InvalidArgument
from persisting.table.indexes import is_text
from persisting.topic.topic_files import TopicFolder
from persisting.ui import pages
from persisting.ui.console import Console, topic_of
from persisting.ui.matches import vector_fields
from persisting.ui.queries import RecordHit, Run, RunQuery, RunsQuery, unless_left
from persisting.ui.requests import Parameters
from persisting.ui.value_trees import Node, brief, tree

_NEWEST = 20_000
_MAX_STEPS = 300
ARRIVAL = "*"
"""The order of the steps by arrival; no field has such a name."""
_LIKELY = ("run", "run_id", "session", "session_id", "trajectory", "episode", "agent", "thread")
_STEPS = ("step", "step_id", "step_index", "turn", "turn_id", "index", "seq", "sequence")
_ROLES = ("role", "agent", "speaker", "actor", "tool", "kind", "type")
_TEXTS = ("text", "content", "message", "thought", "output", "answer")
_SCORES = ("score", "reward", "value", "rating")


@dataclass
class Step:
    """A record of a run, as a timeline shows it."""

    hit: RecordHit
    role: str
    text: str
    score: float | None
    after: str
    """Time since the step before it."""
    nested: Node | None
    cells: list[tuple[str, str]]
    """The other fields, each as one short line."""


async def show(request: Request) -> Response:
    """Show the newest runs by a field."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)
    fields = await console.view.read(topic, _fields)
    field = given.text("field", 1_000) or _likely(fields, _LIKELY)
    runs = None
    if field is not None:
        _check_field(field, fields)
        storage = console.view.place
        query = RunsQuery(storage, topic, field, _NEWEST)
        runs = await unless_left(request, console.queries.run(query, list[Run]))
    return pages.render(
        request,
        "trajectories.html",
        topic=topic,
        fields=fields,
        field=field,
        runs=runs,
        newest=_NEWEST,
        as_value=json.dumps,
    )


async def run(request: Request) -> Response:
    """Show the steps of one run."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)
    field, value = given.required("field"), _value(given.required("value"))
    fields, vectors = await console.view.read(
        topic, lambda source: (_fields(source), vector_fields(source))
    )
    _check_field(field, fields)
    order = given.choice("order", (_likely(fields, _STEPS) or ARRIVAL, ARRIVAL, *fields))
    storage = console.view.place
    by = None if order == ARRIVAL else order
    query = RunQuery(storage, topic, field, value, _MAX_STEPS + 1, by)
    hits = await unless_left(request, console.queries.run(query, list[RecordHit]))
    return pages.render(
        request,
        "run.html",
        topic=topic,
        field=field,
        value=value,
        fields=fields,
        order=order,
        arrival=ARRIVAL,
        as_value=json.dumps,
        steps=_steps(hits[:_MAX_STEPS], field),
        is_cut=len(hits) > _MAX_STEPS,
        max_steps=_MAX_STEPS,
        has_vectors=bool(vectors),
    )


def _fields(source: TopicFolder) -> list[str]:
    """Return the fields by which records can be grouped."""
    return [
        field.name
        for field in source.schema()
        if is_text(field.type) or pa.types.is_integer(field.type) or pa.types.is_boolean(field.type)
    ]


def _likely(fields: list[str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in fields), None)


def _check_field(field: str, fields: list[str]) -> None:
    if field not in fields:
        raise InvalidArgument(
            f"records cannot be grouped by {field!r}; the fields with texts or whole numbers are: "
            f"{', '.join(fields) or 'none'}"
        )


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"value must be JSON, got {text!r:.80}") from None
    if not isinstance(value, (str, int, bool)):
        raise InvalidArgument("value must be a text, a whole number or a boolean")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidArgument("value must be a number that fits 64 bits")
    if isinstance(value, str) and not value.isascii() and _has_surrogates(value):
        raise InvalidArgument("value has half of a surrogate pair, which no text has")
    return value


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _steps(hits: list[RecordHit], field: str) -> list[Step]:
    steps, before = [], None
    for hit in hits:
        record = hit.record
        role = next((n for n in _ROLES if n != field and record.get(n)), None)
        name = next((n for n in _TEXTS if isinstance(record.get(n), str)), None)
        score = next((n for n in _SCORES if type(record.get(n)) in (int, float)), None)
        steps_name = next((n for n, value in record.items() if _is_steps(value)), None)
        nested = None if steps_name is None else tree({steps_name: record[steps_name]})
        shown = {name, steps_name, field, role, score}
        cells = [(n, brief(v)) for n, v in record.items() if v is not None and n not in shown]
        time = None if hit.time is None else dt.datetime.fromisoformat(hit.time)
        after = _duration(time - before) if time is not None and before is not None else ""
        text = "" if name is None else str(record[name])[:4_000]
        steps.append(
            Step(
                hit,
                "" if role is None else str(record[role]),
                text,
                None if score is None else record[score],
                after,
                nested and nested.children[0],
                cells,
            )
        )
        before = time
    return steps


def _is_steps(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _duration(span: dt.timedelta) -> str:
    seconds = span.total_seconds()
    return f"+{seconds * 1000:.0f} ms" if seconds < 1 else f"+{seconds:,.1f} s"
