"""The buckets of one topic that a node owns, and puts to several of them in one call."""

from __future__ import annotations

from contextlib import ExitStack

from persisting.cluster.service import BucketService
from persisting.errors import BucketLocked, WALError
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.local import BucketsTaken, LocalHandle


class OwnedTopic:
    """An open topic and the services of its buckets on this node."""

    def __init__(self, handle: LocalHandle) -> None:
        self.handle = handle
        self.services: dict[int, BucketService] = {}

    async def put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> list[int]:
        """Store rows in several buckets and return an empty list.

        If some of the buckets are not on this node, return those instead: nothing is stored in
        them. Without a log the other buckets may have stored their parts. Buckets in an object
        store whose log was lost may have stored theirs: only numbered puts may be repeated.
        """
        services = {bucket: self.services.get(bucket) for bucket, _ in parts}
        missing = [b for b, service in services.items() if service is None or service.closed]
        if missing:
            return missing
        with ExitStack() as keeping_open:
            for service in services.values():
                assert service is not None
                keeping_open.enter_context(service.kept_open())
                if sequence is not None:
                    keeping_open.enter_context(service.numbered_puts.carrying_out(sequence))
            try:
                await self.handle.put_parts(parts, sequence)
            except BucketsTaken as exc:
                for bucket in (taken := [bucket for bucket, _ in exc.left]):
                    await services[bucket].is_still_here()  # type: ignore[union-attr]
                return taken
            except BucketLocked:
                # One was closed to be reopened with new options, and another node took its lock. Or
                # another node has taken over, in an object store.
                taken = [b for b, s in services.items() if s and not await s.is_still_here()]
                return taken or list(services)
            except WALError:
                if not any(service.lost for service in services.values() if service):
                    raise
                # Whether they are stored is unknown here: the next owner knows, and puts are
                # numbered.
                return list(services)
        return []
