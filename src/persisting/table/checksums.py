"""Checksums of a table's files, since Lance does not notice a flipped bit.

A data file carries the CRC-32 of its bytes in its name, ``<name>-<crc>.lance``. The manifest names
the file, so the checksum is part of the commit and never stale. Files that Lance writes and commits
in one call (a widened column, an index) cannot be renamed; their checksums are recorded in the
table's configuration.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from persisting.fs import FileSystem
from persisting.table import files
from persisting.table.lance_errors import indices_of

LOOSE = "persisting-checksums"
"""Configuration key of the recorded checksums, by path under the table."""

_BLOCK = 1 << 20
_NAMED = re.compile(r"-([0-9a-f]{8})\.lance$")


class DamagedFile(NamedTuple):
    """A file whose content differs from what was written."""

    file: str
    problem: str


def crc_of(path: Path) -> str:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def sign(fs: FileSystem, root: Path, fragments: Iterable[dict[str, Any]], prefix: str = "") -> None:
    """Put the checksums of new data files into their names, on disk and in ``fragments`` (JSON).

    The new names begin with ``prefix``.
    """
    for fragment in fragments:
        for file in fragment["files"]:
            path = root / files.DATA / file["path"]
            files.check_whole(path, file.get("file_size_bytes"))
            file["path"] = f"{prefix}{path.stem}-{crc_of(path)}.lance"
            fs.rename(path, path.with_name(file["path"]))


def signed_metadata(fs: FileSystem, root: Path, fragments: Iterable[Any]) -> list[Any]:
    """Like :func:`sign`, for metadata objects of fragments; return the changed ones."""
    import lance

    plain = [fragment.to_json() for fragment in fragments]
    sign(fs, root, plain)
    return [lance.fragment.FragmentMetadata.from_json(json.dumps(fragment)) for fragment in plain]


def loose_checksums(root: Path, dataset: Any) -> dict[str, str]:
    """The checksums of all files in use without one in their name; recorded ones are not read."""
    recorded = _recorded(dataset)
    return {name: recorded.get(name) or crc_of(root / name) for name in _loose_files(root, dataset)}


def changes(root: Path, dataset: Any) -> dict[str, str] | None:
    """The entries to write to the configuration, None if it is up to date."""
    now = loose_checksums(root, dataset)
    if now == _recorded(dataset):
        return None
    return {LOOSE: msgspec.json.encode(now).decode()}


def untrusted_indexes(root: Path, dataset: Any) -> list[str]:
    """The names of indexes with files whose checksums are not recorded."""
    recorded = _recorded(dataset)

    def is_recorded(segment: Any) -> bool:
        folder = f"{files.INDICES}/{segment.uuid}"
        names = {name for name in recorded if name.startswith(f"{folder}/")}
        return bool(names) and names == set(_files_under(root, folder))

    return [
        index.name for index in indices_of(dataset) if not all(map(is_recorded, index.segments))
    ]


def check(root: Path, dataset: Any, seen: set[str]) -> tuple[list[DamagedFile], int, list[str]]:
    """(damaged files, number of files checked, files without a checksum) of a version.

    Files in ``seen`` are skipped; checked files are added to it.
    """
    recorded = _recorded(dataset)
    expected = {name: _crc_in(name) or recorded.get(name) for name in _data_files(dataset)}
    expected |= {name: recorded.get(name) for name in _index_files(root, dataset)}
    indices = tuple(f"{files.INDICES}/{uuid}/" for uuid in _index_ids(dataset))
    expected |= {name: crc for name, crc in recorded.items() if name.startswith(indices)}
    damaged, unchecked = [], []
    sizes = _sizes(dataset)
    unseen = {name: crc for name, crc in expected.items() if name not in seen}
    seen.update(unseen)
    for name, crc in unseen.items():
        problem = _problem(root / name, crc, sizes.get(name))
        if problem is not None:
            damaged.append(DamagedFile(name, problem))
        elif crc is None:
            unchecked.append(name)
    return damaged, len(unseen), unchecked


def files_of(root: Path, dataset: Any) -> Iterator[str]:
    """The paths, under the table, of the data and index files of a version."""
    yield from _data_files(dataset)
    yield from _index_files(root, dataset)


def _problem(path: Path, crc: str | None, size: int | None) -> str | None:
    try:
        actual = path.stat().st_size
        if size is not None and actual != size:
            return f"has {actual} bytes, {size} were written"
        if crc is not None and crc_of(path) != crc:
            return "its bytes are not those that were written"
    except FileNotFoundError:
        return "is missing"
    except OSError as exc:
        return f"cannot be read: {exc.strerror}"
    return None


def _recorded(dataset: Any) -> dict[str, str]:
    return msgspec.json.decode(dataset.config().get(LOOSE, "{}"), type=dict[str, str])


def _crc_in(name: str) -> str | None:
    match = _NAMED.search(name)
    return match[1] if match else None


def _data_files(dataset: Any) -> Iterator[str]:
    for name in files.data_paths(f.metadata for f in dataset.get_fragments()):
        yield f"{files.DATA}/{name}"


def _sizes(dataset: Any) -> dict[str, int | None]:
    return {
        f"{files.DATA}/{file.path}": file.file_size_bytes
        for fragment in dataset.get_fragments()
        for file in fragment.metadata.files
    }


def _index_files(root: Path, dataset: Any) -> Iterator[str]:
    """The files on disk of every index of this version."""
    for uuid in _index_ids(dataset):
        yield from _files_under(root, f"{files.INDICES}/{uuid}")


def _files_under(root: Path, folder: str) -> Iterator[str]:
    for place, _, names in os.walk(root / folder):
        for name in sorted(names):
            yield str((Path(place) / name).relative_to(root))


def _index_ids(dataset: Any) -> list[str]:
    return [segment.uuid for index in indices_of(dataset) for segment in index.segments]


def _loose_files(root: Path, dataset: Any) -> Iterator[str]:
    for name in _data_files(dataset):
        if _crc_in(name) is None:
            yield name
    yield from _index_files(root, dataset)
