"""The small JSON files of a topic, read as bytes that anybody may have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from persisting.errors import StorageError

_T = TypeVar("_T")


class _Format(msgspec.Struct):
    format: int = 0


def decode(data: bytes, kind: type[_T]) -> _T:
    """The contents of a file, or :class:`msgspec.DecodeError`, also where it is nested too deep."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as exc:
        raise msgspec.DecodeError("it is nested too deep") from exc


def check_format(data: bytes, path: Path, newest: int) -> None:
    """Raise if a newer version wrote a file, whatever else it has in it."""
    try:
        found = decode(data, _Format).format
    except msgspec.DecodeError:
        return
    if found > newest:
        raise StorageError(
            f"{path} has format {found}, this version reads up to {newest}; upgrade persisting"
        )


def decode_any(data: bytes) -> Any:
    """JSON of no certain form."""
    return decode(data, object)
