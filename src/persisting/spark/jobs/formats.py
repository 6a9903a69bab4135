"""The formats that are exported to and ingested from."""

from __future__ import annotations

import os
from pathlib import Path

from persisting.errors import InvalidArgument

PARQUET, LANCE, JSONL = "parquet", "lance", "jsonl"
FORMATS = (PARQUET, LANCE, JSONL)

_SUFFIXES = {
    ".parquet": PARQUET,
    ".lance": LANCE,
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".json": JSONL,
}
_PACKED = {".gz", ".bz2", ".zst", ".snappy", ".deflate"}


def named_format(given: str | None, path: str | Path) -> str | None:
    """The format that was named, or that the end of the path says; None if neither does."""
    if given is not None:
        found = JSONL if given == "json" else given
        if found not in FORMATS:
            raise InvalidArgument(f"format must be one of {', '.join(FORMATS)}, got {given!r}")
        return found
    return _by_suffix(str(path))


def found_format(given: str | None, path: str | Path) -> str:
    """The format that was named, else the one of the files there."""
    found = named_format(given, path) or _of_content(Path(path))
    if found is None:
        raise InvalidArgument(
            f"cannot tell the format of {path}; name it: format= one of {', '.join(FORMATS)}"
        )
    return found


def lance_folders(path: Path) -> list[Path]:
    """The Lance datasets at or below ``path``."""
    if is_lance(path):
        return [path]
    return [
        Path(place, name)
        for place, folders, _ in sorted(os.walk(path))
        for name in sorted(folders)
        if is_lance(Path(place, name))
    ]


def _of_content(path: Path) -> str | None:
    if lance_folders(path):
        return LANCE
    names = (name for _, _, files in os.walk(path) for name in files)
    return next((found for name in names if (found := _by_suffix(name))), None)


def is_lance(path: Path) -> bool:
    """Whether a folder is a Lance dataset."""
    return (path / "_versions").is_dir()


def _by_suffix(name: str) -> str | None:
    stem, suffix = os.path.splitext(name.rstrip("/"))
    if suffix in _PACKED:
        suffix = os.path.splitext(stem)[1]
    return _SUFFIXES.get(suffix.lower())
