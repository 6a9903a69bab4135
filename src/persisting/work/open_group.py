"""What must be true of a topic and a group before a member joins."""

from __future__ import annotations

from pathlib import Path

from persisting import fs as filesystem
from persisting.backends.table_backend import TableBackend
from persisting.bucket.group_offsets import is_work_group
from persisting.errors import InvalidArgument, NoSuchTopic
from persisting.topic import spec as topics
from persisting.topic.bucket_client import Topic
from persisting.topic.groups import group_folder
from persisting.topic.registry import get_backend_class
from persisting.topic.spec import TopicConfig


def has_log(config: TopicConfig) -> bool:
    """Whether records of a topic are durable before a flush."""
    return config.options.get("enable_wal") is True


def check_backend(config: TopicConfig) -> None:
    """Raise if a topic is not stored in tables, whose offsets never change."""
    if not issubclass(get_backend_class(config.backend), TableBackend):
        raise InvalidArgument(
            f"topic {config.topic!r} has the backend {config.backend!r}, which cannot have work "
            "groups; use 'persisting'"
        )


def folder_of(topic: Topic) -> Path:
    """Return the absolute folder of a topic on disk."""
    return Path(topic.folder).resolve()


def check_same_topic(folder: Path, config: TopicConfig) -> None:
    """Raise if a topic was deleted since it was opened, also if it was created again. Blocking."""
    found = topics.load(folder, filesystem.current())
    if found is None or found.id != config.id:
        what = "deleted" if found is None else "deleted and created again"
        raise NoSuchTopic(
            f"topic {config.topic!r} in {folder.parent} was {what} since this reader was opened; "
            "open a new reader"
        )


def check_mode(topic_folder: Path, group: str) -> None:
    """Raise if a group is one that commits offsets. Blocking."""
    folder = group_folder(topic_folder, group)
    if folder.is_dir() and not is_work_group(folder) and any(folder.glob("bucket_*.json")):
        raise InvalidArgument(
            f"group {group!r} reads by offset: it cannot be read with mode='work'. Use another "
            "group, or delete this one with 'persisting groups delete'"
        )
