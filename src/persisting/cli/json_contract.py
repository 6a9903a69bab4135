"""The contract of ``--json``: the type that each command prints, published by ``json-schema``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import msgspec

from persisting.actions.record_window import Found

__all__ = ["CONTRACT", "Found", "Hit", "Printed", "Row", "prints", "schema_of"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Printed(NamedTuple):
    """What a command prints with ``--json``: one value, or one per line."""

    type_path: str
    """Its type as ``module:name``, imported on demand."""
    many: bool
    lines: bool

    @property
    def type(self) -> Any:
        module, name = self.type_path.split(":")
        item = getattr(import_module(module), name)
        return list[item] if self.many else item  # type: ignore[valid-type]


CONTRACT: dict[str, Printed] = {}
"""What each command prints, by the name of the command."""


def prints(
    command: str, type_path: str, *, many: bool = False, lines: bool = False
) -> Callable[[_F], _F]:
    """Register what a command prints: a value of a type, a list of them, or one per line."""

    def register(function: _F) -> _F:
        CONTRACT[command] = Printed(type_path, many, lines)
        return function

    return register


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints, or of each line."""
    return msgspec.json.schema(CONTRACT[command].type)


class Row(msgspec.Struct):
    """A record that matches a condition."""

    record: dict[str, Any]


class Hit(msgspec.Struct):
    """A record that a search found, with a distance or a score."""

    bucket: int
    offset: int
    record: dict[str, Any]
    distance: float | None = None
    score: float | None = None
