"""Checks of arguments that datasets and streams share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from persisting.errors import InvalidArgument


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
        raise InvalidArgument(f"columns must be a list of names, got {columns!r}")
    names = tuple(columns)
    for name in names:
        if not isinstance(name, str):
            raise InvalidArgument(f"columns must be a list of names, got {name!r} in it")
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
