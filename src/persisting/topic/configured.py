"""The properties of an open topic that its configuration decides."""

from __future__ import annotations

from abc import ABC, abstractmethod

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
