"""Finds the topic that a job works on."""

from __future__ import annotations

from pathlib import Path

from persisting.spark.source_options import read_options
from persisting.store_address import StoreAddress, is_store_address, parse
from persisting.topic.topic_files import TopicFolder, open_stored


def topic_place(path: str | Path, topic: str | None = None) -> Path | StoreAddress:
    """Return the folder of a topic, or its address in an object store, given as in the options of
    the format ``persisting``."""
    given = {} if topic is None else {"topic": topic}
    return read_options({"path": str(path), **given}).folder


def open_topic(path: str | Path, topic: str | None = None) -> TopicFolder:
    """Open a stored topic; raise if there is none."""
    return open_stored(topic_place(path, topic))


def place_of(stored: TopicFolder) -> Path | StoreAddress:
    """Return the folder of an open topic, or its address in an object store."""
    return parse(stored.place) if is_store_address(stored.place) else stored.folder
