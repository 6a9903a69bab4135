"""Fixes what is read: one version of every bucket, so that rows have numbers that never change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from persisting import fs as filesystem
from persisting.errors import InvalidArgument, StorageError
from persisting.options import local_path
from persisting.topic import tags
from persisting.topic.topic_files import TopicFolder


class Pin(msgspec.Struct, frozen=True):
    """The versions of a topic's buckets that are read. It is small, and pickles."""

    folder: str
    topic: str
    """The topic's id, which a recreated topic of the same name does not share."""
    versions: list[int]
    """By bucket; 0 for a bucket that was empty."""
    tag: str | None = None
    tag_id: str | None = None
    """Differs if a tag was replaced by another of the same name."""

    @property
    def source(self) -> str:
        """What is read, for messages."""
        return self.folder if self.tag is None else f"tag {self.tag!r} of {self.folder}"


def topic_path(path: Any) -> Path:
    """Return the folder of a topic, or raise."""
    if not isinstance(path, (str, Path)) or not str(path):
        raise InvalidArgument(f"path must be a topic's folder, got {path!r}")
    return local_path("path", path)


def pin_tag(path: Any, tag: str) -> Pin:
    """Pin the versions that a tag holds."""
    topic = TopicFolder.open(topic_path(path))
    held = tags.load(topic.folder, tag, filesystem.current())
    versions = [held.versions.get(bucket, 0) for bucket in topic.buckets]
    return Pin(str(topic.folder), topic.config.id, versions, tag, held.pin)


def pin_newest(path: Any) -> Pin:
    """Pin the newest versions, which hold everything that was flushed.

    Records in the log of a crashed owner are moved to the tables first.
    """
    topic = TopicFolder.open(topic_path(path))
    topic.recover()
    versions = [topic.view(bucket).version for bucket in topic.buckets]
    return Pin(str(topic.folder), topic.config.id, versions)


def pin_of(path: Any, tag: str | None) -> Pin:
    return pin_newest(path) if tag is None else pin_tag(path, tag)


def check_readable(pin: Pin, error: StorageError) -> StorageError:
    """Return an error that says that a version without a tag was removed, if that is the reason."""
    topic = TopicFolder.open(Path(pin.folder))
    if topic.config.id != pin.topic:
        return StorageError(f"the topic in {pin.folder} was recreated since it was opened")
    if pin.tag is None:
        return StorageError(
            f"a version of {pin.folder} that is read was removed ({error}): the topic keeps "
            "versions without a tag for keep_versions seconds. Tag the topic and read the tag"
        )
    return error
