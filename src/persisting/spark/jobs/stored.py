"""The topic that a job works on, and its buckets as their owner has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from persisting.errors import BucketLocked
from persisting.spark.options import read_options
from persisting.spark.topics import StoredTopic
from persisting.storage.backend import TableBackend
from persisting.topic.config import TopicConfig
from persisting.topic.owning import owned


def folder_of(path: str | Path, topic: str | None = None) -> Path:
    """The folder of a topic, named as the format ``persisting`` is told it."""
    named = {} if topic is None else {"topic": topic}
    return read_options({"path": str(path), **named}).folder


def opened(path: str | Path, topic: str | None = None) -> StoredTopic:
    """The topic there, or raise."""
    return StoredTopic.open(folder_of(path, topic))


@contextmanager
def owner_of(folder: Path, config: TopicConfig, bucket: int, call: str) -> Iterator[TableBackend]:
    """Own a bucket for a job; whoever has it open is named, with the ``call`` that works there."""
    try:
        with owned(folder, config, bucket) as owner:
            yield owner
    except BucketLocked as exc:
        raise BucketLocked(
            f"{str(exc).split(';')[0]}. A job changes a topic that nobody has open for writing: "
            f"close it there, or call {call}() on its queue",
            owner=exc.owner,
        ) from exc
