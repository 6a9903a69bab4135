"""Committed offsets of consumer groups, in small files that only a member of the group writes.

They are stored beside the buckets, so that a bucket's owner can read them: retention may have to
wait for a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from persisting import json_files
from persisting.errors import StorageError
from persisting.fs import FileSystem


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


def least_committed(
    folder: Path, bucket: int, restored: Sequence[int], fs: FileSystem
) -> int | None:
    """Return the lowest committed offset of all groups, None if there is no group.

    ``restored`` are the ends of the bucket after each of its restores.
    """
    committed = [read_committed(group, bucket, fs) for group in groups_in(folder, fs)]
    return min((position.now(restored) for position in committed), default=None)
