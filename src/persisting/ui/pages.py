"""Renders templates. Everything is escaped; markup comes only from templates and charts."""

from __future__ import annotations

import datetime as dt
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from persisting import __version__
from persisting.actions.text_values import format_size
from persisting.ui import value_trees
from persisting.ui.requests import address
from persisting.ui.texts import Translator, language_of

LANGUAGE_COOKIE = "persisting_language"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("persisting.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": format_size,
        "number": number,
        "when": when,
        "brief": value_trees.brief,
        "segment": segment,
    }
    environment.globals |= {"address": address, "product_version": __version__}
    return environment


def number(value: float) -> str:
    """Format a count, or a rate."""
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.2g}"


def when(value: str | dt.datetime | None) -> str:
    """Format a timestamp in UTC, to the millisecond."""
    if value is None:
        return ""
    if isinstance(value, str):
        value = dt.datetime.fromisoformat(value)
    utc = value.astimezone(dt.timezone.utc)
    return utc.strftime("%Y-%m-%d %H:%M:%S.") + f"{utc.microsecond // 1000:03d}"


def segment(name: str) -> str:
    """Return a name as one segment of a path."""
    return quote(name, safe="")


_templates = _environment()


def language(request: Request) -> str:
    """Return the language of a request."""
    chosen = request.cookies.get(LANGUAGE_COOKIE)
    return language_of(request.headers.get("accept-language", ""), chosen)


def compile_all() -> None:
    """Compile every template, so that the first request does not wait for it."""
    for name in _templates.list_templates():
        _templates.get_template(name)


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """Return a page."""
    chosen = language(request)
    console = request.app.state.console
    html = _templates.get_template(template).render(
        _=Translator(chosen),
        language=chosen,
        console=console,
        signed_in=console.guard.is_signed_in(request.headers),
        path=request.scope["path"],
        here=_here(request),
        **values,
    )
    return HTMLResponse(html, status_code=status, headers={"Vary": "Accept-Language, Cookie"})


def _here(request: Request) -> str:
    """Return the address of the page without its host, encoded as it was asked for."""
    path = request.scope.get("raw_path", request.scope["path"].encode()).decode("latin-1")
    query = request.url.query
    return f"{path}?{query}" if query else path
