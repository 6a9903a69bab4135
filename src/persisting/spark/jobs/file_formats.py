"""The formats that are exported to and ingested from, and how their files lie in folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from urllib.parse import unquote

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
    """The Lance datasets at or below ``path``, also partitions within a dataset."""
    is_one = is_lance(path)
    found = [path] if is_one else []
    for child in sorted(path.iterdir()) if path.is_dir() else ():
        if not child.is_dir() or (child.is_symlink() and not is_lance(child)):
            continue
        if not is_one or is_partition(child.name):
            found += lance_folders(child)
    return found


def layouts(root: Path) -> set[tuple[str, tuple[str, ...]]]:
    """What lies at or below ``root``: formats, each with the columns that its folders name."""
    found = {(LANCE, folder_columns(one.relative_to(root))) for one in lance_folders(root)}
    for place, names in _plain_folders(root):
        columns = folder_columns(place.relative_to(root))
        kinds = {_by_suffix(name) for name in names if not name.startswith(("_", "."))}
        found |= {(kind, columns) for kind in kinds - {None, LANCE} if kind}
    return found


def folder_columns(path: PurePath) -> tuple[str, ...]:
    """The columns that the folders of a path stand for, as in ``kind=a/day=1``."""
    return tuple(unquote(part.partition("=")[0]) for part in path.parts if is_partition(part))


def is_partition(name: str) -> bool:
    """Whether a folder is named by a column and its value."""
    return name.find("=") > 0


def is_lance(path: Path) -> bool:
    """Whether a folder is a Lance dataset."""
    return (path / "_versions").is_dir()


def _of_content(path: Path) -> str | None:
    if lance_folders(path):
        return LANCE
    names = (name for _, _, files in os.walk(path) for name in files)
    return next((found for name in names if (found := _by_suffix(name))), None)


def _plain_folders(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Folders with the names of their files, but for those that are Lance's or hidden."""
    for place, folders, names in os.walk(root):
        is_one = is_lance(Path(place))
        folders[:] = [
            name
            for name in folders
            if is_partition(name) or not (is_one or name.startswith(("_", ".")))
        ]
        yield Path(place), [] if is_one else names


def _by_suffix(name: str) -> str | None:
    stem, suffix = os.path.splitext(name.rstrip("/"))
    if suffix in _PACKED:
        suffix = os.path.splitext(stem)[1]
    return _SUFFIXES.get(suffix.lower())
