"""Tags of a topic: one consistent point over all its buckets, kept in a small file each.

A tag pins a version in every bucket; the file, written last, makes it a tag of the topic and says
which versions and offsets belong to it.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from persisting import json_files
from persisting.errors import InvalidArgument, StorageError
from persisting.fs import FileSystem, os_errors_as
from persisting.lock import file_lock
from persisting.table.versions import check_tag

log = logging.getLogger("persisting")

FOLDER = "tags"
_PIN = "topic-"
_LOST_SECONDS = 3600


class DamagedTag(StorageError):
    """The file of a tag is not one."""


class BucketTag(msgspec.Struct, frozen=True):
    """What a tag holds of a bucket; version 0 is a bucket that held nothing."""

    version: int
    start_offset: int
    end_offset: int

    @property
    def rows(self) -> int:
        return self.end_offset - self.start_offset


class TopicTag(msgspec.Struct, frozen=True):
    """The contents of ``tags/<name>.json``."""

    name: str
    timestamp: dt.datetime
    pin: str
    """The name under which the buckets pin their versions; another one for each tag()."""
    buckets: dict[int, BucketTag]

    @property
    def rows(self) -> int:
        return sum(bucket.rows for bucket in self.buckets.values())

    @property
    def versions(self) -> dict[int, int]:
        return {number: bucket.version for number, bucket in self.buckets.items()}

    def described(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "timestamp": self.timestamp,
            "rows": self.rows,
            "buckets": {n: msgspec.to_builtins(b) for n, b in self.buckets.items()},
        }


def save(folder: Path, tag: TopicTag, fs: FileSystem) -> TopicTag | None:
    """Make a tag one of the topic's; the tag of the same name that it replaces."""
    place = folder / FOLDER
    try:
        fs.make_folder(place)
        with file_lock(folder / ".topic.lock"):
            before = _known(folder, tag.name, fs)
            fs.write_file(place / f"{tag.name}.json", msgspec.json.encode(tag) + b"\n")
            return before
    except OSError as exc:
        raise StorageError(f"cannot write the tag {place / tag.name}: {exc.strerror}") from exc


def load(folder: Path, name: str, fs: FileSystem) -> TopicTag:
    """The tag of that name, or raise."""
    path = folder / FOLDER / f"{check_tag(name)}.json"
    try:
        return json_files.decode(fs.read(path), TopicTag)
    except FileNotFoundError:
        names = ", ".join(map(repr, names_in(folder, fs))) or "none"
        raise InvalidArgument(f"there is no tag {name!r}; there are: {names}") from None
    except OSError as exc:
        raise StorageError(f"cannot read the tag file {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise DamagedTag(
            f"the tag file {path} is damaged ({exc}); restore it from a copy, or tag anew"
        ) from exc


def names_in(folder: Path, fs: FileSystem) -> list[str]:
    place = folder / FOLDER
    if not place.is_dir():
        return []
    with os_errors_as("list", place):
        return [n.removesuffix(".json") for n in fs.list(place) if n.endswith(".json")]


def all_in(folder: Path, fs: FileSystem) -> list[TopicTag]:
    """The tags of a topic; one whose file is damaged is told and left out."""
    found = [_known(folder, name, fs) for name in names_in(folder, fs)]
    return [tag for tag in found if tag is not None]


def _known(folder: Path, name: str, fs: FileSystem) -> TopicTag | None:
    if name not in names_in(folder, fs):
        return None
    try:
        return load(folder, name, fs)
    except DamagedTag as exc:
        log.warning("%s", exc)
        return None
    except InvalidArgument:
        return None  # it has just been removed


def remove(folder: Path, name: str, fs: FileSystem) -> TopicTag | None:
    """The tag, which is none from here on; None if there was none."""
    path = folder / FOLDER / f"{check_tag(name)}.json"
    with file_lock(folder / ".topic.lock"):
        before = _known(folder, name, fs)
        if path.exists():
            with os_errors_as("remove", path):
                fs.remove(path)
                fs.sync_folder(path.parent)
    return before


def new_pin() -> str:
    """A name under which buckets pin their versions; it says when it was made."""
    return f"{_PIN}{int(time.time())}-{uuid.uuid4().hex[:12]}"


def pins_in(folder: Path, fs: FileSystem) -> set[str]:
    """The pins of all tags; raises where one cannot be read: its pin would pass for a lost one."""
    return {load(folder, name, fs).pin for name in names_in(folder, fs)}


def is_lost(pin: str, known: set[str]) -> bool:
    """Whether a pin belongs to no tag and cannot belong to one that is just being made."""
    if not pin.startswith(_PIN) or pin in known:
        return False
    made = pin.removeprefix(_PIN).partition("-")[0]
    return made.isdigit() and time.time() - int(made) > _LOST_SECONDS
