"""Decodes the small JSON files of a topic, which anyone may have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from persisting.errors import StorageError

_T = TypeVar("_T")


class _Format(msgspec.Struct):
    format: int = 0


def decode(data: bytes, kind: type[_T]) -> _T:
    """Decode a file, or raise :class:`msgspec.DecodeError`, even if it is nested too deeply."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as exc:
        raise msgspec.DecodeError("it is nested too deeply") from exc


def check_format(data: bytes, path: Path | str, newest: int) -> None:
    """Raise if a newer version of Persisting wrote the file; its other content may be invalid."""
    try:
        version = decode(data, _Format).format
    except msgspec.DecodeError:
        return
    if version > newest:
        raise StorageError(
            f"{path} has format {version}, but this version reads up to {newest}; "
            "upgrade persisting"
        )


def decode_any(data: bytes) -> Any:
    """Decode JSON of any structure."""
    return decode(data, object)
