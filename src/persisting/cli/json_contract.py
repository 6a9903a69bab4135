"""``--json`` is a contract: every command says what it prints, and ``json-schema`` tells it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import msgspec

_F = TypeVar("_F", bound=Callable[..., Any])


class Printed(NamedTuple):
    """What a command prints with ``--json``: one value, or one a line."""

    home: str
    """Where its type is: ``module:name``, loaded when it is asked for."""
    many: bool
    lines: bool

    @property
    def type(self) -> Any:
        module, name = self.home.split(":")
        one = getattr(import_module(module), name)
        return list[one] if self.many else one  # type: ignore[valid-type]


CONTRACT: dict[str, Printed] = {}
"""By command."""


def prints(
    command: str, home: str, *, many: bool = False, lines: bool = False
) -> Callable[[_F], _F]:
    """Note what a command prints: a value of a type, a list of them, or one a line."""

    def note(function: _F) -> _F:
        CONTRACT[command] = Printed(home, many, lines)
        return function

    return note


class Found(msgspec.Struct):
    """A record and where it lies."""

    bucket: int
    offset: int
    record: dict[str, Any]
    time: str | None = None
    """When it was accepted."""


def schema_of(command: str) -> dict[str, Any]:
    """The JSON schema of what a command prints, or of each of its lines."""
    return msgspec.json.schema(CONTRACT[command].type)


class Row(msgspec.Struct):
    """A record that a condition keeps."""

    record: dict[str, Any]


class Hit(msgspec.Struct):
    """A record that a search found; it has a distance or a score."""

    bucket: int
    offset: int
    record: dict[str, Any]
    distance: float | None = None
    score: float | None = None
