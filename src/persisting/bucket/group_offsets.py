"""How far consumer groups have come: small files that only the group's member writes.

They lie beside the buckets, so the bucket's owner can read them: retention may have to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from persisting import json_files
from persisting.errors import StorageError
from persisting.fs import FileSystem


class Committed(msgspec.Struct, frozen=True):
    """How far a group has come in a bucket, and in which epoch of the bucket that was."""

    offset: int = 0
    generation: int = 0
    epoch: int = 0

    def now(self, restored: Sequence[int]) -> int:
        """The offset, or what restores since then have left of it."""
        return min([self.offset, *restored[self.epoch :]])


def read_committed(folder: Path, bucket: int, fs: FileSystem) -> Committed:
    """The committed offset of a bucket; 0 before the first commit."""
    path = folder / f"bucket_{bucket}.json"
    try:
        return json_files.decode(fs.read(path), Committed)
    except FileNotFoundError:
        return Committed()
    except OSError as exc:
        raise StorageError(f"cannot read the group's offset file {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise StorageError(
            f"the group's offset file {path} is damaged ({exc}); remove it to have the group read "
            "the bucket from its beginning"
        ) from exc


def groups_in(folder: Path, fs: FileSystem) -> list[Path]:
    """The folders of the groups."""
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
    """The lowest offset that some group still needs, None if there is no group.

    ``restored`` are the ends of the bucket after each of its restores.
    """
    found = [read_committed(group, bucket, fs) for group in groups_in(folder, fs)]
    return min((one.now(restored) for one in found), default=None)
