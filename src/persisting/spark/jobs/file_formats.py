"""The file formats of export and ingest, and how their files are laid out in folders."""

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
_COMPRESSED = {".gz", ".bz2", ".zst", ".snappy", ".deflate"}


def named_format(given: str | None, path: str | Path) -> str | None:
    """Return the format that was given, else that of the path's suffix, else None."""
    if given is not None:
        name = JSONL if given == "json" else given
        if name not in FORMATS:
            raise InvalidArgument(f"format must be one of {', '.join(FORMATS)}, got {given!r}")
        return name
    return _by_suffix(str(path))


def detect_format(given: str | None, path: str | Path) -> str:
    """Return the format that was given, else that of the files at ``path``."""
    detected = named_format(given, path) or _format_of_content(Path(path))
    if detected is None:
        raise InvalidArgument(
            f"cannot tell the format of {path}; set format to one of {', '.join(FORMATS)}"
        )
    return detected


def lance_folders(path: Path) -> list[Path]:
    """Return the Lance datasets at or below ``path``, including partitions inside a dataset."""
    is_dataset = is_lance(path)
    folders = [path] if is_dataset else []
    for child in sorted(path.iterdir()) if path.is_dir() else ():
        if not child.is_dir() or (child.is_symlink() and not is_lance(child)):
            continue
        if not is_dataset or is_partition(child.name):
            folders += lance_folders(child)
    return folders


def layouts(root: Path) -> set[tuple[str, tuple[str, ...]]]:
    """Return the formats at or below ``root``, each with the columns that its folders name."""
    found = {(LANCE, folder_columns(path.relative_to(root))) for path in lance_folders(root)}
    for place, names in _plain_folders(root):
        columns = folder_columns(place.relative_to(root))
        kinds = {_by_suffix(name) for name in names if not name.startswith(("_", "."))}
        found |= {(kind, columns) for kind in kinds - {None, LANCE} if kind}
    return found


def folder_columns(path: PurePath) -> tuple[str, ...]:
    """Return the columns that the folders of a path name, as in ``kind=a/day=1``."""
    return tuple(unquote(part.partition("=")[0]) for part in path.parts if is_partition(part))


def is_partition(name: str) -> bool:
    """Whether the name of a folder is a column and its value."""
    return name.find("=") > 0


def is_lance(path: Path) -> bool:
    """Whether a folder is a Lance dataset."""
    return (path / "_versions").is_dir()


def _format_of_content(path: Path) -> str | None:
    if lance_folders(path):
        return LANCE
    names = (name for _, _, files in os.walk(path) for name in files)
    return next((format for name in names if (format := _by_suffix(name))), None)


def _plain_folders(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield folders with the names of their files, except Lance's own and hidden ones."""
    for place, folders, names in os.walk(root):
        is_dataset = is_lance(Path(place))
        folders[:] = [
            name
            for name in folders
            if is_partition(name) or not (is_dataset or name.startswith(("_", ".")))
        ]
        yield Path(place), [] if is_dataset else names


def _by_suffix(name: str) -> str | None:
    stem, suffix = os.path.splitext(name.rstrip("/"))
    if suffix in _COMPRESSED:
        suffix = os.path.splitext(stem)[1]
    return _SUFFIXES.get(suffix.lower())
