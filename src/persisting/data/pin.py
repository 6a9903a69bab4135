"""Fixes what is read: one version of every bucket, so that rows have numbers that never change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from persisting.data.place import TopicLocation, place_of
from persisting.errors import InvalidArgument, StorageError


class Pin(msgspec.Struct, frozen=True):
    """The versions of a topic's buckets that are read. It is small, and pickles."""

    place: TopicLocation
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
        return str(self.place) if self.tag is None else f"tag {self.tag!r} of {self.place}"


def pin_tag(place: TopicLocation, tag: str) -> Pin:
    """Pin the versions that a tag holds."""
    topic = place.open()
    held = topic.tag_files.load(tag)
    versions = [held.versions.get(bucket, 0) for bucket in topic.buckets]
    return Pin(place, topic.config.id, versions, tag, held.pin)


def pin_newest(place: TopicLocation) -> Pin:
    """Pin the newest versions, which hold everything that was flushed.

    In a folder, records in the log of a crashed owner are moved to the tables first; in an object
    store the next owner does that.
    """
    topic = place.open()
    if not place.is_in_store:
        topic.recover()
    versions = [topic.view(bucket).version for bucket in topic.buckets]
    return Pin(place, topic.config.id, versions)


def pin_of(path: Any, tag: str | None, options: Mapping[str, Any] | None = None) -> Pin:
    place = place_of(path, options)
    return pin_newest(place) if tag is None else pin_tag(place, tag)


def check_readable(pin: Pin, error: StorageError) -> StorageError:
    """Return an error that says that what is read was removed, if that is the reason."""
    topic = pin.place.open()
    if topic.config.id != pin.topic:
        return StorageError(f"the topic in {pin.place} was recreated since it was opened")
    if pin.tag is None:
        return StorageError(
            f"a version of {pin.place} that is read was removed ({error}): the topic keeps "
            "versions without a tag for keep_versions seconds. Tag the topic and read the tag"
        )
    try:
        is_left = topic.tag_files.load(pin.tag).pin == pin.tag_id
    except InvalidArgument:
        is_left = False
    if not is_left:
        return StorageError(
            f"{pin.source} was deleted or replaced since it was opened, and its rows no longer "
            f"exist: {error}"
        )
    return error
