"""Checks of arguments that datasets and streams share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from persisting.errors import InvalidArgument
from persisting.table.search import check_where

_QUOTED = re.compile(r"""'(?:[^']|'')*'|`[^`]*`""")
_CHANGING = re.compile(
    r"\b(?:(?:random|rand|uuid|now|today)\s*\(|current_(?:date|time|timestamp)\b|"
    r"localtime(?:stamp)?\b)",
    re.IGNORECASE,
)
"""Functions that return something else at each call."""


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """Return a whole number that is at least ``least``, or raise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name} must be a whole number from {least}, got {value!r}")
    return value


def check_rank(rank: Any, world_size: Any) -> None:
    check_count("world_size", world_size)
    check_count("rank", rank, least=0)
    if rank >= world_size:
        raise InvalidArgument(f"rank must be below world_size={world_size}, got {rank}")


def check_columns(columns: Any) -> tuple[str, ...] | None:
    """Return the names of columns as a tuple, or raise."""
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Sequence):
        raise InvalidArgument(f"columns must be a list of field names, got {columns!r}")
    names = tuple(columns)
    for name in names:
        if not isinstance(name, str):
            raise InvalidArgument(f"columns must be a list of field names, got {name!r} in it")
        if names.count(name) > 1:
            raise InvalidArgument(f"columns names {name!r} twice")
    if not names:
        raise InvalidArgument("columns names no field; leave it out to read all fields")
    return names


def check_seed(shuffle: Any) -> None:
    if shuffle is None:
        return
    if not isinstance(shuffle, int) or isinstance(shuffle, bool) or not 0 <= shuffle < 2**63:
        raise InvalidArgument(
            f"shuffle must be a seed, a whole number from 0, or None for the stored order, "
            f"got {shuffle!r}"
        )


def check_fixed_where(where: Any) -> None:
    """Raise unless a condition always selects the same rows.

    Each rank and worker evaluates it, and so does each process that resumes: they must agree on the
    numbers of the rows. A replay buffer evaluates it once for each record.
    """
    check_where(where)
    changing = None if where is None else _CHANGING.search(_QUOTED.sub("''", where))
    if changing is not None:
        name = changing[0].rstrip("( \t\n")
        raise InvalidArgument(
            f"where={where!r} uses {name}, which may select other rows in each process and each "
            "time; use a condition on fields and constants"
        )
