"""Finding the node that owns a bucket of a cluster."""

from __future__ import annotations

import asyncio
import uuid

from persisting.cluster.host import host_on
from persisting.cluster.locator import OwnerLocator, Patience, checked
from persisting.cluster.placement import (
    LANES,
    NODE_LANES,
    lane_endpoint,
    node_lane_endpoint,
    ranked,
)
from persisting.cluster.pulse import Pulse, WatchedConnection
from persisting.cluster.service import BucketService
from persisting.cluster.transport import HOST_ENDPOINT, Connection, Transport, Unreachable
from persisting.cluster.wire import Request
from persisting.errors import BucketLocked, StorageError

OPEN_SECONDS = 8.0
"""How long a node may take to open a bucket before the next one is asked."""


STORE_PAUSE_SECONDS = 0.3
"""The same pause for a bucket in an object store: it is taken over after seconds, not
immediately."""


class NodeLocator(OwnerLocator):
    """The way to the owner of one bucket, whichever node that is."""

    def __init__(
        self,
        transport: Transport,
        key: str,
        opening: Request,
        home: str | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """``opening`` asks a host to own the bucket. ``home`` is the only node that can have it,
        for a topic in memory. ``pulse`` is for a bucket in an object store, which others may take
        from an owner that is silent."""
        super().__init__(transport.node)
        self._pulse = pulse
        if pulse is not None:
            self.pause_seconds = STORE_PAUSE_SECONDS
        self._transport, self._key, self._opening, self._home = transport, key, opening, home
        self._lane = uuid.uuid4().int % (LANES if pulse is None else NODE_LANES)
        self._holder: str | None = None
        """What the last host said that found the bucket owned by another."""

    def local_service(self) -> BucketService | None:
        host = host_on(self._transport.node)
        service = host.buckets.get(self._key) if host is not None else None
        return service if service is not None and not service.closed else None

    async def _search(self, patience: Patience) -> Connection:
        hint: str | None = None
        holder: str | None = None
        failures: dict[str, str] = {}
        failure = "no node hosts buckets; call persisting.cluster.serve(system) on one"
        while True:
            hosts = await self._transport.hosts()
            if self._pulse is not None:
                hosts = self._pulse.known(hosts)
            order = [self._home] if self._home else ranked(self._key, hosts)
            # A node that sends heartbeats is alive, even if this node has not heard of it yet.
            if hint is not None and (hint in hosts or self._pulse is not None):
                order = [hint, *(node for node in order if node != hint)]
            for node in order:
                try:
                    owner = await self._open_on(node)
                    self._holder = None
                    return owner
                except BucketLocked as exc:
                    holder, locking_node = str(exc), exc.owner.get("node")
                    failures.pop(node, None)
                    hint = locking_node if locking_node != node else None
                except Unreachable as exc:
                    failure = failures[node] = str(exc)
            if self._pulse is not None:
                said = [holder] if holder is not None else []
                self._holder = "; ".join([*said, *failures.values()]) or self._holder
            else:
                self._holder = holder or self._holder
            if patience.exhausted:
                raise self._without_owner(self._holder or failure, hint)
            await asyncio.sleep(self.pause_seconds)

    async def _open_on(self, node: str) -> Connection:
        """Have a node own the bucket, and connect to it there."""
        host = host_on(self._transport.node)
        if host is not None and host.node == node:
            reply = checked(await asyncio.shield(host.answer(self._opening)))
        else:
            if self._pulse is not None and (failure := await self._pulse.failure(node)):
                raise Unreachable(failure)
            connection = await self._transport.connect(HOST_ENDPOINT, node, OPEN_SECONDS)
            reply = await connection.ask(self._opening, OPEN_SECONDS)
        if "leaving" in reply.value:
            raise Unreachable(f"node {node} is shutting down")
        if "unavailable" in reply.value:
            raise Unreachable(f"node {node}: {reply.value['unavailable']}")
        if "locked" in reply.value:
            raise BucketLocked(reply.value["text"], owner=reply.value["locked"])
        if self._pulse is None:
            endpoint = lane_endpoint(self._key, self._lane)
            return await self._transport.connect(endpoint, node, OPEN_SECONDS)
        endpoint = node_lane_endpoint(self._lane)
        owner = await self._transport.connect(endpoint, node, OPEN_SECONDS)
        return WatchedConnection(owner, self._pulse, self._key)

    def _unavailable(self, failure: str) -> StorageError:
        # What the nodes said at the last search, and what the last call to an owner has met.
        known = [self._holder] if self._holder else []
        if not known or (self._pulse is not None and failure not in known[0]):
            known.append(failure)
        return self._without_owner("; ".join(known))

    def _without_owner(self, cause: str, holder: str | None = None) -> StorageError:
        topic, bucket = self._opening.args["config"]["topic"], self._opening.args["bucket"]
        return StorageError(
            f"bucket {bucket} of topic {topic!r} has no owner that answers"
            + (f" (node {holder} holds it)" if holder else "")
            + f": {cause}"
        )
