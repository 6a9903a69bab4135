"""The topic that a job works on."""

from __future__ import annotations

from pathlib import Path

from persisting.spark.source_options import read_options
from persisting.topic.topic_files import TopicFolder


def folder_of(path: str | Path, topic: str | None = None) -> Path:
    """The folder of a topic, named as the format ``persisting`` is told it."""
    named = {} if topic is None else {"topic": topic}
    return read_options({"path": str(path), **named}).folder


def opened(path: str | Path, topic: str | None = None) -> TopicFolder:
    """The topic there, or raise."""
    return TopicFolder.open(folder_of(path, topic))
