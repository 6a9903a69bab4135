"""A member of a cluster that owns nothing: it reads and changes topics through their owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from persisting.cluster import interpreter_exit
from persisting.cluster.node import joined, resolved
from persisting.cluster.open_remote import open_reader_of_others
from persisting.cluster.pulsing_transport import PulsingTransport, start_system
from persisting.cluster.remote_groups import open_work_reader_of_others
from persisting.errors import InvalidArgument
from persisting.topic.open_local import BucketChoice, ReaderOptions, topic_spec
from persisting.topic.reader import QueueReader
from persisting.work.work_reader import WorkOptions, WorkReader


class ClusterReader:
    """Opens readers of the topics of a cluster without ever owning a bucket.

    ``read_queue(system)`` makes its own node a storage node if there is no other. This does not: a
    program that only reads must not hold a bucket.
    """

    def __init__(self, system: Any) -> None:
        self._system, self._transport = system, PulsingTransport(system)

    @classmethod
    async def join(
        cls, seeds: Sequence[str], address: str, passphrase: str | None, seconds: float
    ) -> ClusterReader:
        """Join a cluster; raise if no seed can be reached within that time."""
        if not seeds:
            raise InvalidArgument("a cluster is joined through at least one seed")
        numbers = [resolved(seed, "a seed") for seed in seeds]
        system = await start_system(resolved(address, "the address"), numbers, passphrase)
        try:
            await joined(system, seeds, seconds)
        except BaseException:
            await system.shutdown()
            raise
        interpreter_exit.install()
        return cls(system)

    async def nodes(self) -> list[str]:
        """Return the storage nodes that are alive."""
        return await self._transport.hosts()

    async def open(
        self,
        topic: str,
        storage_path: str,
        bucket: int | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> QueueReader:
        """Open a topic, or one of its buckets, for reading."""
        wanted, _ = topic_spec(topic)
        options = ReaderOptions(BucketChoice(bucket))
        return await open_reader_of_others(
            self._transport, wanted, storage_path, options, storage_options
        )

    async def open_work(self, topic: str, storage_path: str, group: str) -> WorkReader:
        """Join a work group that other nodes keep."""
        wanted, _ = topic_spec(topic)
        options = WorkOptions(group)
        return await open_work_reader_of_others(self._transport, wanted, storage_path, options)

    async def close(self) -> None:
        """Leave the cluster."""
        await self._system.shutdown()
