"""What must be true of a topic before a member of a work group joins."""

from __future__ import annotations

from persisting.backends.table_backend import TableBackend
from persisting.errors import InvalidArgument
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
