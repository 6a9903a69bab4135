"""Topics whose buckets live on the nodes of a cluster."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from persisting.cluster.client import RemoteTopic
from persisting.cluster.host import host_on
from persisting.cluster.node_locator import NodeLocator
from persisting.cluster.placement import bucket_key
from persisting.cluster.pulse import Pulse
from persisting.cluster.transport import Transport
from persisting.cluster.wire import Request
from persisting.errors import BucketClosed
from persisting.store.object_store import ObjectStore
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.spec import TopicConfig


class ClusterTopic(RemoteTopic):
    """A topic whose buckets live on the nodes of a cluster."""

    def __init__(
        self,
        transport: Transport,
        place: str,
        storage_path: str | None,
        config: TopicConfig,
        home: str | None,
        store: ObjectStore | None = None,
    ) -> None:
        """``home`` is the node that holds a topic in memory, which cannot move. ``store`` is that
        of a topic in an object store."""
        super().__init__(puts_directly=store is None)
        self._transport, self._place, self._config, self._home = transport, place, config, home
        self._storage_path, self._store = storage_path, store
        self._pulse = None if store is None else Pulse(transport)

    @classmethod
    def in_store(
        cls, transport: Transport, store: ObjectStore, config: TopicConfig
    ) -> ClusterTopic:
        """Return a topic in an object store."""
        address = store.address
        return cls(transport, str(address), str(address.parent), config, None, store)

    @property
    def config(self) -> TopicConfig:
        return self._config

    @property
    def folder(self) -> Path | None:
        if self._home is not None or self._store is not None:
            return None
        return Path(self._place)

    @property
    def store(self) -> ObjectStore | None:
        return self._store

    def _new_locator(self, bucket: int) -> NodeLocator:
        opening = Request(
            "open",
            {
                "place": self._place,
                "storage_path": self._storage_path,
                "config": msgspec.to_builtins(self._config),
                "bucket": bucket,
            },
        )
        key = bucket_key(self._place, bucket)
        return NodeLocator(self._transport, key, opening, self._home, self._pulse)

    async def _put_here(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None
    ) -> list[tuple[int, Rows]]:
        host = host_on(self._transport.node)
        topic = host.topics.get(self._place) if host is not None else None
        if topic is not None:
            with suppress(BucketClosed):  # the topic is being closed; nothing was stored
                missing = await topic.put_parts(parts, sequence)
                return [part for part in parts if part[0] in missing]
        return parts
