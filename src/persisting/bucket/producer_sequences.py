"""What each idempotent writer stored last, so that a retried put is stored once."""

from __future__ import annotations

import operator
from typing import Any

import msgspec

from persisting.errors import InvalidArgument, TableError

WRITERS = "persisting.writers"
"""Property of an append: the last number of each writer, as JSON."""

MAX_WRITERS = 1024
"""Writers remembered per bucket; beyond it one that wrote longest ago is forgotten."""

_MAX_NUMBER = (1 << 63) - 1

ANONYMOUS = "~"
"""Begins the names of writers that live as long as a connection; they are forgotten first."""


def check_writer(name: Any) -> None:
    """Raise if it cannot be the name of a writer: it is kept as text."""
    try:
        if not isinstance(name, str) or not name.encode():
            raise InvalidArgument(f"writer_id must be a non-empty string, got {name!r}")
    except UnicodeEncodeError:
        raise InvalidArgument(f"writer_id {name!r} is not valid unicode") from None


def check_number(number: Any, name: str = "number") -> int:
    """The number of a put as it is kept, or raise: it goes into the log and the table."""
    if not isinstance(number, bool) and hasattr(number, "__index__"):
        value = operator.index(number)
        if 0 <= value <= _MAX_NUMBER:
            return value
    raise InvalidArgument(f"{name} must be a whole number from 0 to 2**63 - 1, got {number!r}")


class Writers:
    """Last numbers by writer, the most recent writer last. Guarded by the bucket."""

    def __init__(self, encoded: str | None = None) -> None:
        try:
            self._last = msgspec.json.decode(encoded or b"{}", type=dict[str, int])
        except msgspec.DecodeError as exc:
            raise TableError(f"the writers kept with the table cannot be read: {exc}") from exc

    def has(self, mark: tuple[str, int]) -> bool:
        """Whether this put, or a later one of its writer, is stored."""
        return mark[1] <= self._last.get(mark[0], -1)

    def last(self, writer: str) -> int:
        """The last number of a writer, -1 if it is not known."""
        return self._last.get(writer, -1)

    def remember(self, marks: list[tuple[str, int]]) -> None:
        for writer, number in marks:
            known = self._last.pop(writer, -1)
            self._last[writer] = max(known, number)
        while len(self._last) > MAX_WRITERS:
            oldest = next(iter(self._last))
            del self._last[next((w for w in self._last if w.startswith(ANONYMOUS)), oldest)]

    def encode(self) -> str:
        """For :data:`WRITERS`; empty if there are none."""
        return msgspec.json.encode(self._last).decode() if self._last else ""
