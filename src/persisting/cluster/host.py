"""A node that owns buckets: opens them on request, and gives them up to nodes that rank higher.

The lock on a bucket's folder decides who owns it, not names or gossip: a host that does not get
the lock answers with the present owner.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec

from persisting import fs as filesystem
from persisting import lock
from persisting.cluster import interpreter_exit, wire
from persisting.cluster.owned_topic import OwnedTopic
from persisting.cluster.placement import LANES, bucket_key, lane_endpoint, ranked
from persisting.cluster.service import BucketService
from persisting.cluster.transport import HOST_ENDPOINT, HostTransport, Unreachable
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketLocked, InvalidArgument, StorageError
from persisting.options import storage_folder
from persisting.topic import spec as topics
from persisting.topic.address import TopicAddress
from persisting.topic.local import open_for_writing
from persisting.topic.registry import list_backends
from persisting.topic.spec import TopicConfig, TopicSpec

log = logging.getLogger("persisting")

_PING_SECONDS = 2.0
REBALANCE_SECONDS = 2.0
"""How often a host checks whether its buckets belong on other nodes."""


class Host:
    """The buckets that this node owns."""

    def __init__(self, transport: HostTransport, storage: Path | None = None) -> None:
        """``storage``: the only folder whose topics this node owns; None: any folder."""
        self._transport = transport
        self._storage = None if storage is None else storage.resolve()
        self.node = transport.node
        self.buckets: dict[str, BucketService] = {}
        self.closed = False
        self.topics: dict[str, OwnedTopic] = {}
        self._opening = asyncio.Lock()
        self._rebalancer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        lock.IDENTITY.update(node=self.node, address=self._transport.address)
        await self._transport.publish(HOST_ENDPOINT, self.answer, self._close_if_open)
        self._rebalancer = asyncio.create_task(self._rebalance_forever())

    async def close(self) -> None:
        """Flush and close every bucket, so that other nodes can open them."""
        self.closed = True
        if self._rebalancer is not None:
            self._rebalancer.cancel()
        await self._transport.withdraw(HOST_ENDPOINT)
        async with self._opening:
            failures = []
            for key in list(self.buckets):
                try:
                    await self._close_bucket(key)
                except Exception as exc:
                    failures.append(exc)
            for topic in self.topics.values():
                try:
                    await topic.handle.close()
                except Exception as exc:
                    failures.append(exc)
            self.topics.clear()
        if all(host.closed for host in _hosts.values()):
            lock.IDENTITY.clear()
        if failures:
            raise failures[0]

    async def _close_if_open(self) -> None:
        if not self.closed:
            await self.close()

    async def answer(self, request: Request) -> Reply:
        """Return the reply to a request; errors become replies."""
        try:
            if self.closed:
                return Reply({"leaving": self.node})
            if request.op == "open":
                return Reply(await self.open_bucket(**request.args))
            if request.op == "topics":
                return Reply(self.topics_named(**request.args))
            raise wire.unknown_request(request.op)
        except BucketLocked as exc:
            return Reply({"locked": exc.owner, "text": str(exc)})
        except Exception as exc:
            return wire.error_reply(exc)

    def topics_named(self, topic: str) -> list[dict[str, Any]]:
        """Return the open topics of this name: where each is and how it is configured."""
        return [
            {"place": place, "config": msgspec.to_builtins(owned.handle.config), "node": self.node}
            for place, owned in self.topics.items()
            if owned.handle.name == topic
        ]

    async def open_bucket(
        self, place: str, storage_path: str | None, config: dict[str, Any], bucket: int
    ) -> dict[str, str]:
        """Open a bucket on this node, or raise :class:`BucketLocked`."""
        if self._storage is not None and storage_path is not None:
            if Path(place).parent != self._storage:
                raise InvalidArgument(
                    f"node {self.node} serves only topics in {self._storage}, not {place}: use "
                    "that folder as storage_path"
                )
        key = bucket_key(place, bucket)
        async with self._opening:
            if self.closed:
                raise StorageError(f"node {self.node} is shutting down")
            topic = await self._topic(place, storage_path, config)
            if key in self.buckets and self.buckets[key].closed:
                await self._close_bucket(key)
            if key not in self.buckets:
                await topic.handle.open_bucket(bucket)
                client = topic.handle.bucket(bucket)
                service = BucketService(client, place, bucket, topic.put_parts)
                self.buckets[key] = topic.services[bucket] = service
                try:
                    await self._publish_lanes(key)
                except BaseException:
                    await self._close_bucket(key)
                    raise
            return {"node": self.node}

    async def _topic(
        self, place: str, storage_path: str | None, config: dict[str, Any]
    ) -> OwnedTopic:
        """Return the topic, opened or reopened if its configuration is new."""
        wanted = msgspec.convert(config, TopicConfig)
        if storage_path is not None:
            # The topic file as it is now: the client may have read it long ago.
            stored = await in_thread(topics.load, Path(place), filesystem.current())
            wanted = stored if stored is not None else wanted
        current = self.topics.get(place)
        if current is not None and current.handle.config == wanted:
            return current
        if wanted.backend not in list_backends():
            raise InvalidArgument(
                f"node {self.node} does not know the backend {wanted.backend!r}: call "
                "register_backend(name, cls) in every process that serves buckets"
            )
        handle = await open_for_writing(
            TopicSpec(
                topic=wanted.topic,
                num_buckets=wanted.num_buckets,
                bucket_column=wanted.bucket_column,
                backend=wanted.backend,
                batch_size=wanted.batch_size,
                options=wanted.options,
            ),
            storage_path,
            None,
        )
        if current is None:
            self.topics[place] = OwnedTopic(handle)
        else:
            previous, current.handle = current.handle, handle
            await previous.close()
        return self.topics[place]

    async def _publish_lanes(self, key: str) -> None:
        for lane in range(LANES):
            endpoint = lane_endpoint(key, lane)
            await self._transport.publish(endpoint, self.buckets[key].answer)

    async def _close_bucket(self, key: str) -> None:
        service = self.buckets.pop(key)
        topic = self.topics[service.place]
        if topic.services.get(service.bucket) is service:
            del topic.services[service.bucket]
        await service.close()
        for lane in range(LANES):
            await self._transport.withdraw(lane_endpoint(key, lane))
        await topic.handle.close_bucket(service.bucket)

    async def _rebalance_forever(self) -> None:
        while True:
            await asyncio.sleep(REBALANCE_SECONDS)
            try:
                await self._rebalance()
            except Exception as exc:
                log.warning("node %s failed to rebalance its buckets: %s", self.node, exc)

    async def _rebalance(self) -> None:
        """Close the buckets that belong on another living host."""
        hosts = await self._transport.hosts()
        for key, service in list(self.buckets.items()):
            if TopicAddress.parse(service.place).is_in_memory or self.node not in hosts:
                continue
            better = ranked(key, hosts)[0]
            if better != self.node and await self._answers(better):
                async with self._opening:
                    if key in self.buckets:
                        log.info("bucket %s moves to another node", key)
                        await self._close_bucket(key)

    async def _answers(self, node: str) -> bool:
        """Whether a host answers: the cluster lists a dead node as alive for a while."""
        try:
            connection = await self._transport.connect(HOST_ENDPOINT, node, _PING_SECONDS)
            await connection.ask(Request("topics", {"topic": ""}), _PING_SECONDS)
        except (Unreachable, StorageError):
            return False
        return True


_hosts: dict[str, Host] = {}
_starting: dict[str, asyncio.Task[Host]] = {}


def host_on(node: str) -> Host | None:
    """Return the host of this process with that node id, if there is one."""
    host = _hosts.get(node)
    return host if host is not None and not host.closed else None


def host_here(system: Any) -> Host | None:
    """Return the host on this process's node of a system, if there is one."""
    return host_on(str(system.node_id.id))


async def serve(system: Any, storage_path: str | Path | None = None) -> Host:
    """Let this node own buckets; ``await host.close()`` gives them all up.

    With a ``storage_path`` the node owns only topics in that folder, and topics in memory.
    """
    from persisting.cluster.pulsing_transport import PulsingTransport

    transport = PulsingTransport(system)
    node = transport.node
    running = host_on(node)
    if running is not None:
        return running
    if node not in _starting:
        storage = None if storage_path is None else storage_folder(storage_path)
        _starting[node] = asyncio.create_task(_start(transport, storage))
    try:
        return await asyncio.shield(_starting[node])
    finally:
        if node in _starting and _starting[node].done():
            del _starting[node]


async def _start(transport: HostTransport, storage: Path | None) -> Host:
    from persisting.cluster.tcp_nodelay import disable_nagle

    interpreter_exit.install()
    host = Host(transport, storage)
    await host.start()
    disable_nagle(transport.address)
    _hosts[transport.node] = host
    return host
