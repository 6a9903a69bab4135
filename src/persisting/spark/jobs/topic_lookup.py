"""Finds the topic that a job works on."""

from __future__ import annotations

from pathlib import Path

from persisting.spark.source_options import read_options
from persisting.topic.topic_files import TopicFolder


def topic_folder(path: str | Path, topic: str | None = None) -> Path:
    """Return the folder of a topic, given as in the options of the format ``persisting``."""
    given = {} if topic is None else {"topic": topic}
    return read_options({"path": str(path), **given}).folder


def open_topic(path: str | Path, topic: str | None = None) -> TopicFolder:
    """Open a stored topic; raise if there is none."""
    return TopicFolder.open(topic_folder(path, topic))
