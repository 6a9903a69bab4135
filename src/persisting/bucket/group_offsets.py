"""Committed offsets of consumer groups, in small files that only a member of the group writes.

They are stored beside the buckets, so that a bucket's owner can read them: retention may have to
wait for a group. A work group stores the offset below which everything is acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from persisting import json_files
from persisting.errors import StorageError
from persisting.fs import FileSystem

WORK_FOLDER = "work"
"""The folder in a work group's for its journal."""


class Hold(NamedTuple):
    """What keeps retention from removing the records from an offset on."""

    offset: int
    holder: str


class Committed(msgspec.Struct, frozen=True):
    """The committed offset of a group in a bucket, and the epoch of the bucket at the commit."""

    offset: int = 0
    generation: int = 0
    epoch: int = 0

    def now(self, restored: Sequence[int]) -> int:
        """Return the offset, lowered to the end of the bucket after each later restore."""
        return min([self.offset, *restored[self.epoch :]])


def read_committed(folder: Path, bucket: int, fs: FileSystem) -> Committed:
    """Read the committed offset of a bucket; 0 before the first commit."""
    path = folder / f"bucket_{bucket}.json"
    try:
        return json_files.decode(fs.read(path), Committed)
    except FileNotFoundError:
        return Committed()
    except OSError as exc:
        raise StorageError(f"cannot read the group's offset file {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise StorageError(
            f"the group's offset file {path} is damaged ({exc}); remove it and the group "
            "reads the bucket from its beginning"
        ) from exc


def groups_in(folder: Path, fs: FileSystem) -> list[Path]:
    """List the folders of the groups."""
    if not folder.is_dir():
        return []
    return [
        folder / name
        for name in fs.list(folder)
        if not name.startswith(".") and (folder / name).is_dir()
    ]


def is_work_group(group: Path) -> bool:
    """Whether the folder of a group is one of a work group (:mod:`persisting.work`)."""
    return (group / WORK_FOLDER).is_dir()


def holds(
    folder: Path,
    bucket: int,
    restored: Sequence[int],
    fs: FileSystem,
    *,
    consumers: bool,
    workers: bool,
) -> list[Hold]:
    """Return what the groups hold: with ``consumers`` those that commit offsets, with ``workers``
    the work groups.

    ``restored`` are the ends of the bucket after each of its restores.
    """
    found = []
    for group in groups_in(folder, fs):
        works = is_work_group(group)
        if workers if works else consumers:
            kind = "work group" if works else "group"
            offset = read_committed(group, bucket, fs).now(restored)
            found.append(Hold(offset, f"{kind} {group.name!r}"))
    return found
