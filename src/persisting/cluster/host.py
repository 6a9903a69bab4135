"""A node that owns buckets: opens them when asked, lets them go when others should have them.

The lock on a bucket's folder decides who owns it, not names or gossip: a host that does not get
the lock says who has it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pulsing as pul

from persisting import fs as filesystem
from persisting import lock
from persisting.cluster import interpreter_exit, wire
from persisting.cluster.peers import Unreachable, ask
from persisting.cluster.placement import bucket_key, ranked
from persisting.cluster.service import LANES, BucketActor, BucketService, answered
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketLocked, InvalidArgument, StorageError
from persisting.topic import spec as topics
from persisting.topic.address import TopicAddress
from persisting.topic.local import LocalHandle, open_for_writing
from persisting.topic.registry import list_backends
from persisting.topic.spec import TopicConfig, TopicSpec

log = logging.getLogger("persisting")

HOST_NAME = "persisting/host"
_PING_SECONDS = 2.0
MOVE_SECONDS = 2.0
"""How often a host looks whether a bucket should live elsewhere."""


class Host:
    """The buckets that this node owns."""

    def __init__(self, system: Any) -> None:
        self.system = system
        self.node = str(system.node_id.id)
        self.buckets: dict[str, BucketService] = {}
        self.closed = False
        self._topics: dict[str, LocalHandle] = {}
        self._opening = asyncio.Lock()
        self._mover: asyncio.Task[None] | None = None

    async def start(self) -> None:
        lock.IDENTITY.update(node=self.node, address=str(self.system.addr))
        await self.system.spawn(HostActor(self), name=HOST_NAME, public=True)
        self._mover = asyncio.create_task(self._move_for_ever())

    async def close(self) -> None:
        """Flush and close every bucket; others may open them."""
        self.closed = True
        if self._mover is not None:
            self._mover.cancel()
        with suppress(RuntimeError, pul.PulsingError):
            await self.system.stop(HOST_NAME)
        async with self._opening:
            failures = []
            for key in list(self.buckets):
                try:
                    await self._close_bucket(key)
                except Exception as exc:
                    failures.append(exc)
            for handle in self._topics.values():
                try:
                    await handle.close()
                except Exception as exc:
                    failures.append(exc)
            self._topics.clear()
        if all(host.closed for host in _hosts.values()):
            lock.IDENTITY.clear()
        if failures:
            raise failures[0]

    async def answer(self, request: Request) -> Reply:
        """The reply to a request; never raises."""
        try:
            if self.closed:
                return Reply({"leaving": self.node})
            if request.op == "open":
                return Reply(await self.open_bucket(**request.args))
            if request.op == "topics":
                return Reply(self.topics_named(**request.args))
            raise StorageError(f"unknown call {request.op!r}; do all nodes run one version?")
        except BucketLocked as exc:
            return Reply({"locked": exc.owner, "text": str(exc)})
        except Exception as exc:
            return wire.error_reply(exc)

    def topics_named(self, topic: str) -> list[dict[str, Any]]:
        """The open topics of this name: where they lie and what they are."""
        return [
            {"place": place, "config": msgspec.to_builtins(handle.config), "node": self.node}
            for place, handle in self._topics.items()
            if handle.name == topic
        ]

    async def open_bucket(
        self, place: str, storage_path: str | None, config: dict[str, Any], bucket: int
    ) -> dict[str, str]:
        """Own a bucket, or raise :class:`BucketLocked`."""
        key = bucket_key(place, bucket)
        async with self._opening:
            if self.closed:
                raise StorageError(f"node {self.node} is shutting down")
            handle = await self._topic(place, storage_path, config)
            if key in self.buckets and self.buckets[key].closed:
                await self._close_bucket(key)
            if key not in self.buckets:
                await handle.open_bucket(bucket)
                self.buckets[key] = BucketService(handle.bucket(bucket), place, bucket)
                try:
                    await self._spawn_lanes(key)
                except BaseException:
                    await self._close_bucket(key)
                    raise
            return {"node": self.node}

    async def _topic(
        self, place: str, storage_path: str | None, config: dict[str, Any]
    ) -> LocalHandle:
        wanted = msgspec.convert(config, TopicConfig)
        if storage_path is not None:
            # What the topic file says now, not what a client once read in it.
            stored = await in_thread(topics.load, Path(place), filesystem.current())
            wanted = stored if stored is not None else wanted
        known = self._topics.get(place)
        if known is not None and known.config == wanted:
            return known
        if wanted.backend not in list_backends():
            raise InvalidArgument(
                f"node {self.node} does not know the backend {wanted.backend!r}: call "
                "register_backend(name, cls) there, in every process that serves"
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
        self._topics[place] = handle
        if known is not None:
            await known.close()
        return handle

    async def _spawn_lanes(self, key: str) -> None:
        for lane in range(LANES):
            actor = BucketActor(self.buckets[key])
            await self.system.spawn(actor, name=f"{key}/{lane}", public=True)

    async def _close_bucket(self, key: str) -> None:
        service = self.buckets.pop(key)
        await service.close()
        for lane in range(LANES):
            with suppress(RuntimeError, pul.PulsingError):  # it may not have been spawned
                await self.system.stop(f"{key}/{lane}")
        await self._topics[service.place].close_bucket(service.bucket)

    async def _move_for_ever(self) -> None:
        while True:
            await asyncio.sleep(MOVE_SECONDS)
            try:
                await self._move()
            except Exception as exc:
                log.warning("node %s cannot look after its buckets: %s", self.node, exc)

    async def _move(self) -> None:
        """Let go of the buckets that another living host should have."""
        hosts = await living_hosts(self.system)
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
        """Whether a host answers: a dead node counts as alive in the cluster for a while."""
        try:
            door = await self.system.resolve_named(HOST_NAME, node_id=int(node))
            await ask(door, node, Request("topics", {"topic": ""}), _PING_SECONDS)
        except (Unreachable, StorageError, RuntimeError, pul.PulsingError):
            return False
        return True


class HostActor(pul.Actor):
    """The door to a host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def receive(self, msg: Any) -> Any:
        return await answered(msg, self._host.answer)

    async def on_stop(self) -> None:
        if not self._host.closed:
            await self._host.close()


async def living_hosts(system: Any) -> list[str]:
    """The nodes that host buckets and, as far as the cluster knows, live."""
    node = str(system.node_id.id)
    try:
        found = await system.get_named_instances(HOST_NAME)
    except (RuntimeError, pul.PulsingError):
        return _last_seen.get(node, [])  # it says so, too, when one of them does not answer
    alive = [str(one["node_id"]) for one in found if one.get("status") == "Alive"]
    _last_seen[node] = alive
    return alive


_last_seen: dict[str, list[str]] = {}


_hosts: dict[str, Host] = {}
_starting: dict[str, asyncio.Task[Host]] = {}


def host_here(system: Any) -> Host | None:
    """The host on this process's node of the system, if it is one."""
    host = _hosts.get(str(system.node_id.id))
    return host if host is not None and not host.closed else None


async def serve(system: Any) -> Host:
    """Let this node own buckets; ``await host.close()`` gives them all back."""
    system = getattr(system, "_inner", system)
    node = str(system.node_id.id)
    known = host_here(system)
    if known is not None:
        return known
    if node not in _starting:
        _starting[node] = asyncio.create_task(_start(system, node))
    try:
        return await asyncio.shield(_starting[node])
    finally:
        if node in _starting and _starting[node].done():
            del _starting[node]


async def _start(system: Any, node: str) -> Host:
    from persisting.cluster.tcp_nodelay import send_at_once

    interpreter_exit.install()
    host = Host(system)
    await host.start()
    send_at_once(str(system.addr))
    _hosts[node] = host
    return host
