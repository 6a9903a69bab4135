"""A node that owns buckets: opens them on request, and gives them up to nodes that rank higher.

The lock on a bucket's folder decides who owns it, not names or gossip: a host that does not get
the lock answers with the present owner. In an object store it is the bucket's ``owner.json``, and
the lease of the owner's log says whether it is alive (:mod:`persisting.cluster.store_host`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from persisting import fs as filesystem
from persisting import lock
from persisting.cluster import interpreter_exit, wire
from persisting.cluster.owned_topic import OwnedTopic
from persisting.cluster.placement import (
    KEY,
    LANES,
    NODE_LANES,
    bucket_key,
    lane_endpoint,
    node_lane_endpoint,
    ranked,
)
from persisting.cluster.service import BucketService
from persisting.cluster.store_access import QUICK_SECONDS
from persisting.cluster.store_host import NodeStores, StoreUnavailable
from persisting.cluster.transport import (
    ALIVE_ENDPOINT,
    HOST_ENDPOINT,
    PING_SECONDS,
    Answer,
    HostTransport,
    Unreachable,
)
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, BucketLocked, InvalidArgument, StorageError
from persisting.options import storage_folder
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress, is_store_address
from persisting.store_address import parse as parse_url
from persisting.topic import spec as topics
from persisting.topic.address import TopicAddress
from persisting.topic.local import open_for_writing
from persisting.topic.registry import list_backends
from persisting.topic.spec import TopicConfig, TopicSpec

if TYPE_CHECKING:
    from persisting.cluster.work_host import NodeGroups

log = logging.getLogger("persisting")

ANSWER_SECONDS = 5.0
"""How long a client waits until a bucket in an object store is open, before it is told why that
takes so long; less than it waits for an answer."""

REBALANCE_SECONDS = 2.0
"""How often a host checks whether its buckets belong on other nodes."""


class Host:
    """The buckets that this node owns."""

    def __init__(
        self,
        transport: HostTransport,
        storage: Path | StoreAddress | None = None,
        options: StorageOptions | None = None,
    ) -> None:
        """``storage``: the only folder, or address in an object store, whose topics this node owns;
        None: any. ``options`` are for object stores."""
        self._transport = transport
        self._storage = storage.resolve() if isinstance(storage, Path) else storage
        self.stores = NodeStores(options)
        self.node = transport.node
        self.buckets: dict[str, BucketService] = {}
        self.closed = False
        self.topics: dict[str, OwnedTopic] = {}
        self._opening = asyncio.Lock()
        self._openings: dict[tuple[str, bytes], asyncio.Task[dict[str, str]]] = {}
        """By key and configuration, the buckets in object stores that are being opened."""
        self._rebalancer: asyncio.Task[None] | None = None
        self.groups: NodeGroups | None = None
        """The work groups that this node keeps."""

    async def start(self) -> None:
        lock.IDENTITY.update(node=self.node, address=self._transport.address)
        await self._transport.publish(ALIVE_ENDPOINT, self._answer_ping)
        for lane in range(NODE_LANES):
            await self._transport.publish(node_lane_endpoint(lane), self._answer_for_bucket)
        await self._transport.publish(HOST_ENDPOINT, self.answer, self._close_if_open)
        self._rebalancer = asyncio.create_task(self._rebalance_forever())

    async def close(self) -> None:
        """Flush and close every bucket, so that other nodes can open them."""
        self.closed = True
        if self._rebalancer is not None:
            self._rebalancer.cancel()
        await self._transport.withdraw(HOST_ENDPOINT)
        async with self._opening:
            failures: list[Exception] = []
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
        for endpoint in (ALIVE_ENDPOINT, *map(node_lane_endpoint, range(NODE_LANES))):
            await self._transport.withdraw(endpoint)
        if all(host.closed for host in _hosts.values()):
            lock.IDENTITY.clear()
        if failures:
            raise failures[0]

    async def _close_if_open(self) -> None:
        if not self.closed:
            await self.close()

    async def _answer_ping(self, request: Request) -> Reply:
        return Reply({"node": self.node})

    async def _answer_for_bucket(self, request: Request) -> Answer:
        """Pass a request on to the bucket in an object store that it names."""
        service = self.buckets.get(request.args.pop(KEY, ""))
        if service is None:
            return wire.error_reply(BucketClosed(f"node {self.node} does not own the bucket"))
        return await service.answer(request)

    async def answer(self, request: Request) -> Reply:
        """Return the reply to a request; errors become replies."""
        try:
            if self.closed:
                return Reply({"leaving": self.node})
            if request.op == "open":
                return Reply(await self.open_bucket(**request.args))
            if request.op == "topics":
                return Reply(self.topics_named(**request.args))
            if request.op == "reaches":
                return Reply(await self._reaches(**request.args))
            raise wire.unknown_request(request.op)
        except BucketLocked as exc:
            return Reply({"locked": exc.owner, "text": str(exc)})
        except StoreUnavailable as exc:
            return Reply({"unavailable": str(exc)})
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
        if storage_path is not None:
            self._check_served(place)
        if TopicAddress.parse(place).store is None:
            return await self._open_bucket(place, storage_path, config, bucket)
        service = self.buckets.get(bucket_key(place, bucket))
        if service is not None and not service.closed and not service.lost:
            if overdue := service.overdue:  # another node may be able to reach the store
                raise StoreUnavailable(overdue)
            known = self.topics[place].handle.config
            if known == msgspec.convert(config, TopicConfig):
                return {"node": self.node}  # many clients ask at the same time after a take-over
        else:
            # Without the lock: other buckets do not wait for a store that does not answer.
            await self.stores.check_free(place, bucket)
        return await self._open_in_store(place, storage_path, config, bucket)

    async def _open_in_store(
        self, place: str, storage_path: str | None, config: dict[str, Any], bucket: int
    ) -> dict[str, str]:
        """Open a bucket in an object store; raise :class:`StoreUnavailable` with the cause if that
        takes too long, and keep trying. The next call for the bucket joins."""
        known = bucket_key(place, bucket), msgspec.msgpack.encode(config)
        opening = self._openings.get(known)
        if opening is None:

            async def remembering() -> dict[str, str]:
                with self.stores.failures_remembered(place, bucket):
                    return await self._open_bucket(place, storage_path, config, bucket)

            opening = self._openings[known] = asyncio.create_task(remembering())
            opening.add_done_callback(lambda done: self._opened(known, done))
        await asyncio.wait([opening], timeout=ANSWER_SECONDS)
        if not opening.done():
            owned = self.topics.get(place)
            store = owned.handle.store if owned is not None else None
            trouble = (store.trouble if store is not None else "") or self.stores.trouble(place)
            raise StoreUnavailable(
                f"bucket {bucket} of {place} is being opened"
                + (f", but the store prevents it: {trouble}" if trouble else "")
            )
        return opening.result()

    def _opened(self, known: tuple[str, bytes], opening: asyncio.Task[dict[str, str]]) -> None:
        self._openings.pop(known, None)
        if not opening.cancelled():
            opening.exception()  # perhaps nobody waits for it

    def _check_served(self, place: str) -> None:
        """Raise if this node does not own topics there."""
        address = TopicAddress.parse(place)
        parent = Path(place).parent if address.store is None else address.store.parent
        if self._storage not in (None, parent):
            raise InvalidArgument(
                f"node {self.node} serves only topics in {self._storage}, not {place}: use "
                "that folder as storage_path"
            )

    async def _reaches(self, place: str) -> bool:
        """Whether this node serves and reaches a topic in an object store."""
        self._check_served(place)
        return await self.stores.load_config(place) is not None

    async def _open_bucket(
        self, place: str, storage_path: str | None, config: dict[str, Any], bucket: int
    ) -> dict[str, str]:
        key, in_store = bucket_key(place, bucket), TopicAddress.parse(place).store is not None
        async with self._opening:
            if self.closed:
                raise StorageError(f"node {self.node} is shutting down")
            topic = await self._topic(place, storage_path, config)
            client = topic.handle.bucket(bucket)
            if key in self.buckets and (self.buckets[key].closed or client.lost):
                await self._close_bucket(key)
            if key not in self.buckets:
                if client.lost:  # it could not be closed
                    await topic.handle.close_bucket(bucket)
                await topic.handle.open_bucket(bucket)
                ownership = client if in_store else None
                service = BucketService(client, place, bucket, topic.put_parts, ownership)
                if bucket == 0 and storage_path is not None:
                    service.work = partial(self._call_group, place)
                    if self.groups is not None:
                        self.groups.add(place)
                self.buckets[key] = topic.services[bucket] = service
                if in_store:
                    return {"node": self.node}
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
        in_store = TopicAddress.parse(place).store is not None
        # The topic file as it is now: the client may have read it long ago.
        if in_store:
            wanted = await self.stores.load_config(place) or wanted
        elif storage_path is not None:
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
            None if in_store else storage_path,
            None,
            store=self.stores.of(place) if in_store else None,
        )
        if current is None:
            self.topics[place] = OwnedTopic(handle)
        else:
            previous, current.handle = current.handle, handle
            await previous.close()
        return self.topics[place]

    async def _call_group(self, place: str, group: str, op: str, args: dict[str, Any]) -> Any:
        """Answer a member of a work group, whose topic has its bucket 0 here."""
        if self.groups is None or place not in self.topics:
            raise BucketClosed(f"node {self.node} does not keep the groups of {place}")
        return await self.groups.call(place, self.topics[place].handle.config, group, op, args)

    async def _publish_lanes(self, key: str) -> None:
        for lane in range(LANES):
            endpoint = lane_endpoint(key, lane)
            await self._transport.publish(endpoint, self.buckets[key].answer)

    async def _close_bucket(self, key: str) -> None:
        service = self.buckets.pop(key)
        topic = self.topics[service.place]
        if topic.services.get(service.bucket) is service:
            del topic.services[service.bucket]
        if service.work is not None and self.groups is not None:
            service.work = None
            await self.groups.close(service.place)
        await service.close()
        if TopicAddress.parse(service.place).store is None:
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
        """Close the buckets that belong on another live host, and those that were lost to one."""
        hosts = await self._transport.hosts()
        for key, service in list(self.buckets.items()):
            if service.lost:
                async with self._opening:
                    if self.buckets.get(key) is service:
                        log.warning("bucket %s is lost: %s", key, service.lost)
                        await self._close_bucket(key)
                continue
            if TopicAddress.parse(service.place).is_in_memory or self.node not in hosts:
                continue
            better = ranked(key, hosts)[0]
            if better != self.node and await self._answers(better, service.place):
                async with self._opening:
                    if key in self.buckets:
                        log.info("bucket %s moves to another node", key)
                        await self._close_bucket(key)

    async def _answers(self, node: str, place: str) -> bool:
        """Whether a host answers, and reaches the topic: the cluster lists a dead node as alive for
        a while."""
        try:
            connection = await self._transport.connect(HOST_ENDPOINT, node, PING_SECONDS)
            await connection.ask(Request("topics", {"topic": ""}), PING_SECONDS)
            if TopicAddress.parse(place).store is None:
                return True
            reply = await connection.ask(Request("reaches", {"place": place}), 2 * QUICK_SECONDS)
        except (Unreachable, StorageError):
            return False
        return reply.value is True


_hosts: dict[str, Host] = {}
_starting: dict[str, asyncio.Task[Host]] = {}


def host_on(node: str) -> Host | None:
    """Return the host of this process with that node id, if there is one."""
    host = _hosts.get(node)
    return host if host is not None and not host.closed else None


def host_here(system: Any) -> Host | None:
    """Return the host on this process's node of a system, if there is one."""
    return host_on(str(system.node_id.id))


async def serve(
    system: Any,
    storage_path: str | Path | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Host:
    """Let this node own buckets; ``await host.close()`` gives them all up.

    With a ``storage_path`` the node owns only topics in that folder, or below that address in an
    object store, and topics in memory. ``storage_options`` are this node's credentials and settings
    for object stores; without them its environment decides.
    """
    from persisting.cluster.pulsing_transport import PulsingTransport

    transport = PulsingTransport(system)
    node = transport.node
    running = host_on(node)
    if running is not None:
        return running
    if node not in _starting:
        options = None if storage_options is None else StorageOptions(storage_options)
        starting = _start(transport, _served_storage(storage_path), options)
        _starting[node] = asyncio.create_task(starting)
    try:
        return await asyncio.shield(_starting[node])
    finally:
        if node in _starting and _starting[node].done():
            del _starting[node]


def _served_storage(storage_path: str | Path | None) -> Path | StoreAddress | None:
    if storage_path is None:
        return None
    if isinstance(storage_path, str) and is_store_address(storage_path):
        return parse_url(storage_path)
    return storage_folder(storage_path)


async def _start(
    transport: HostTransport, storage: Path | StoreAddress | None, options: StorageOptions | None
) -> Host:
    from persisting.cluster.tcp_nodelay import disable_nagle
    from persisting.cluster.work_host import NodeGroups

    interpreter_exit.install()
    host = Host(transport, storage, options)
    host.groups = NodeGroups(transport, host.stores)
    await host.start()
    disable_nagle(transport.address)
    _hosts[transport.node] = host
    return host
