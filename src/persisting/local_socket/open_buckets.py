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
        if service is not None and not service.closed:
            return service
        if self._topic.closed or self._topic.open_backend(bucket) is None:
            return None
        service = BucketService(
            self.handle.bucket(bucket), str(self._topic.address), bucket, self.put_parts
        )
        self.services[bucket] = service
        return service

    async def put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> list[int]:
        for bucket, _ in parts:
            self.service(bucket)
        return await super().put_parts(parts, sequence)

    async def refuse(self) -> None:
        """Answer nothing more; return when nothing uses a bucket."""
        for service in list(self.services.values()):
            await service.close()
