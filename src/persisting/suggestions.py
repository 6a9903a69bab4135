"""Suggests names that a user may have meant."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LISTED = 8
_SUGGESTED = 3
_ALIKE = 0.6
"""Least similarity of a suggested name, from 0 to 1."""


_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*")
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|`[^`]*`""")
_COMPARED = r"(?:=|<|>|\blike\b|\bin\s*\()\s*"
_BARE_TEXT = re.compile(_COMPARED + r"(\d+[A-Za-z_][\w.-]*)", re.IGNORECASE)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question that names the nearest names, or "" if none is near."""
    near = nearest(name, names)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def choices(name: str, names: Iterable[str], listing: str = "there are") -> str:
    """Return a hint that follows an unknown name: the nearest names, else the first of all."""
    known = list(names)
    return did_you_mean(name, known) or f"{listing}: {_listed(known)}"


def field_hint(where: str, name: str, fields: Iterable[str]) -> str:
    """Return what to do about a condition that uses ``name``, which is not among ``fields``."""
    known = list(fields)
    bare = _QUOTED.sub("''", where)
    for field in known:
        if not _PLAIN_NAME.fullmatch(field) and field.lower() in bare.lower():
            return f"write the name in backticks: `{field}`"
    near = " or ".join(
        repr(field) if _PLAIN_NAME.fullmatch(field) else f"`{field}`"
        for field in nearest(name, known)
    )
    if not near and re.search(rf"{_COMPARED}{re.escape(name)}\b", bare, re.IGNORECASE):
        return f"write text in single quotes: '{name}'"
    return f"did you mean {near}?" if near else f"the fields are: {_listed(known)}"


def quotes_hint(where: str) -> str:
    """Return a hint if a condition compares with text that is not quoted, else ""."""
    bare = _BARE_TEXT.search(_QUOTED.sub("''", where))
    return "" if bare is None else f"write text in single quotes: '{bare[1]}'"


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the names most like ``name``, whatever the case of letters; the best one first."""
    import difflib

    scores = {}
    for candidate in names:
        given, other = name.lower(), candidate.lower()
        alike = difflib.SequenceMatcher(None, given, other).ratio()
        if given and (other.startswith(given) or _abbreviates(given, other)):
            alike = max(alike, _ALIKE)
        if alike >= _ALIKE:
            scores[candidate] = alike
    return sorted(scores, key=lambda candidate: -scores[candidate])[:_SUGGESTED]


def _abbreviates(short: str, long: str) -> bool:
    """Return whether ``short`` has the first letter of ``long`` and others of it, in order."""
    letters = iter(long)
    return len(short) > 1 and short[0] == long[:1] and all(letter in letters for letter in short)


def _listed(names: list[str]) -> str:
    listed = ", ".join(map(repr, names[:_LISTED])) or "none yet"
    return f"{listed} and {len(names) - _LISTED} more" if len(names) > _LISTED else listed
