"""The properties of an open topic that its configuration decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any

from persisting.store.object_store import ObjectStore
from persisting.topic.spec import TopicConfig


class ConfiguredTopic(ABC):
    """Base of the implementations of :class:`~persisting.topic.bucket_client.Topic`."""

    @property
    @abstractmethod
    def config(self) -> TopicConfig:
        """The configuration that the topic is open with."""

    @property
    def name(self) -> str:
        return self.config.topic

    @property
    def num_buckets(self) -> int:
        return self.config.num_buckets

    @property
    def bucket_column(self) -> str:
        return self.config.bucket_column

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    @property
    def store(self) -> ObjectStore | None:
        """The objects of a topic in an object store; None for all others."""
        return None

    def must_flush(self, bucket: int) -> bool:
        """Whether a writer that has put to a bucket may not be closed if a flush fails."""
        return True

    def put_soon(self, bucket: int, record: dict[str, Any]) -> Awaitable[None] | None:
        """Queue a record and return what to wait for; None if only a client can store it."""
        return None

    def put_from_thread(self, bucket: int, record: dict[str, Any]) -> bool:
        """Store a record from a thread that may block; False if only a coroutine can."""
        return False
