"""The buckets of a topic that this process has open, as services for one event loop."""

from __future__ import annotations

from persisting.cluster.owned_topic import OwnedTopic
from persisting.cluster.service import BucketService
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.local import LocalHandle, LocalTopic


class OpenBuckets(OwnedTopic):
    """Services that are created when they are needed; all of them belong to one event loop."""

    def __init__(self, topic: LocalTopic) -> None:
        super().__init__(LocalHandle(topic))
        self._topic = topic

    def service(self, bucket: int) -> BucketService | None:
        """Return the service of a bucket, None if this process does not have the bucket open."""
        service = self.services.get(bucket)
        if service is not None and not service.closed and not service.lost:
            return service
        topic = self._topic
        if topic.closed or topic.open_backend(bucket) is None or topic.is_lost(bucket):
            return None
        client = self.handle.bucket(bucket)
        ownership = None if topic.store is None else client
        service = BucketService(client, str(topic.address), bucket, self.put_parts, ownership)
        self.services[bucket] = service
        return service

    async def put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> list[int]:
        for bucket, _ in parts:
            self.service(bucket)
        return await super().put_parts(parts, sequence)

    async def refuse(self) -> None:
        """Stop answering, and wait until nothing uses a bucket."""
        for service in list(self.services.values()):
            await service.close()
