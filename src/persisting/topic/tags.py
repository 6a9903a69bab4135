"""Tags of a topic: each is one consistent point over all buckets, stored in a small file.

A tag pins a version in every bucket. Its file is written last: it makes the pins a tag of the topic
and says which versions and offsets belong to it.
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
from persisting.suggestions import choices
from persisting.table.versions import check_tag

log = logging.getLogger("persisting")

FOLDER = "tags"
_PIN = "topic-"
_LOST_SECONDS = 3600


class DamagedTag(StorageError):
    """A tag's file cannot be decoded."""


class BucketTag(msgspec.Struct, frozen=True):
    """A tag's part of one bucket; version 0 means that the bucket was empty."""

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
    """The name under which the buckets pin their versions; unique to each tag() call."""
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


class TagFiles:
    """The tags of one topic. Blocking."""

    def __init__(self, folder: Path, fs: FileSystem) -> None:
        """``folder`` is that of the topic."""
        self._folder, self._fs = folder, fs

    def save(self, tag: TopicTag) -> TopicTag | None:
        """Store a tag; return the tag of the same name that it replaces."""
        return save(self._folder, tag, self._fs)

    def load(self, name: str) -> TopicTag:
        """Return the tag of that name, or raise."""
        return load(self._folder, name, self._fs)

    def names(self) -> list[str]:
        """Return the names of all tags."""
        return names_in(self._folder, self._fs)

    def all(self) -> list[TopicTag]:
        """Return all tags; a damaged one is logged and left out."""
        return all_in(self._folder, self._fs)

    def remove(self, name: str) -> TopicTag | None:
        """Delete the tag and return it; None if there was no such tag."""
        return remove(self._folder, name, self._fs)

    def pins(self) -> set[str]:
        """Return the pins of all tags; raise if a tag cannot be read."""
        return pins_in(self._folder, self._fs)


def save(folder: Path, tag: TopicTag, fs: FileSystem) -> TopicTag | None:
    """Write a tag's file; return the tag of the same name that it replaces."""
    place = folder / FOLDER
    try:
        fs.make_folder(place)
        with file_lock(folder / ".topic.lock"):
            replaced = _load_if_present(folder, tag.name, fs)
            file = place / f"{tag.name}.json"
            fs.remove_drafts(place, of=file.name)
            fs.write_file(file, msgspec.json.encode(tag) + b"\n")
            return replaced
    except OSError as exc:
        raise StorageError(f"cannot write the tag {place / tag.name}: {exc.strerror}") from exc


def load(folder: Path, name: str, fs: FileSystem) -> TopicTag:
    """Return the tag of that name, or raise."""
    path = folder / FOLDER / f"{check_tag(name)}.json"
    try:
        return json_files.decode(fs.read(path), TopicTag)
    except FileNotFoundError:
        hint = choices(name, names_in(folder, fs))
        raise InvalidArgument(f"there is no tag {name!r}; {hint}") from None
    except OSError as exc:
        raise StorageError(f"cannot read the tag file {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise DamagedTag(
            f"the tag file {path} is damaged ({exc}); restore it from a copy, or tag again"
        ) from exc


def names_in(folder: Path, fs: FileSystem) -> list[str]:
    place = folder / FOLDER
    if not place.is_dir():
        return []
    with os_errors_as("list", place):
        return [n.removesuffix(".json") for n in fs.list(place) if n.endswith(".json")]


def all_in(folder: Path, fs: FileSystem) -> list[TopicTag]:
    """Return the tags of a topic; a tag whose file is damaged is logged and left out."""
    found = [_load_if_present(folder, name, fs) for name in names_in(folder, fs)]
    return [tag for tag in found if tag is not None]


def _load_if_present(folder: Path, name: str, fs: FileSystem) -> TopicTag | None:
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
    """Delete the tag and return it; None if there was no such tag."""
    path = folder / FOLDER / f"{check_tag(name)}.json"
    with file_lock(folder / ".topic.lock"):
        removed = _load_if_present(folder, name, fs)
        if path.exists():
            with os_errors_as("remove", path):
                fs.remove(path)
                fs.sync_folder(path.parent)
    return removed


def new_pin() -> str:
    """Return a new name for pins; it contains the time of its creation."""
    return f"{_PIN}{int(time.time())}-{uuid.uuid4().hex[:12]}"


def pins_in(folder: Path, fs: FileSystem) -> set[str]:
    """Return the pins of all tags.

    Raises if a tag cannot be read, since its pin would be taken for a lost one.
    """
    pins = set()
    for name in names_in(folder, fs):
        try:
            pins.add(load(folder, name, fs).pin)
        except InvalidArgument:
            if name in names_in(folder, fs):
                raise
            # Deleted since it was listed.
    return pins


def is_lost(pin: str, used: set[str]) -> bool:
    """Whether a pin belongs to no tag, and is too old for a tag that is still being made."""
    if not pin.startswith(_PIN) or pin in used:
        return False
    created = pin.removeprefix(_PIN).partition("-")[0]
    return created.isdigit() and time.time() - int(created) > _LOST_SECONDS
