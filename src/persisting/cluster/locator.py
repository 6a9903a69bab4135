"""Finding the node that owns a bucket, and finding it again when the bucket moves."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator

from persisting.cluster import wire
from persisting.cluster.host import host_on
from persisting.cluster.placement import LANES, lane_endpoint, ranked
from persisting.cluster.service import BucketService
from persisting.cluster.transport import (
    HOST_ENDPOINT,
    Connection,
    ReplyStream,
    RequestTarget,
    Transport,
    Unreachable,
)
from persisting.cluster.wire import Reply, Request
from persisting.errors import BucketClosed, BucketLocked, StorageError

PATIENCE_SECONDS = 30.0
"""How long a call looks for a bucket's owner before it raises."""

OPEN_SECONDS = 8.0
"""How long a node may take to open a bucket before the next one is asked."""

_PAUSE = 0.1

LOST = (Unreachable, BucketClosed)
"""Errors after which the owner is looked for again: it died, or the bucket moved."""


class Patience:
    """Time to find an owner; renewed by every sign of life."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._deadline = time.monotonic() + PATIENCE_SECONDS

    @property
    def exhausted(self) -> bool:
        return time.monotonic() > self._deadline


class OwnerLocator:
    """The way to the owner of one bucket, whichever node that is."""

    def __init__(
        self, transport: Transport, key: str, opening: Request, home: str | None = None
    ) -> None:
        """``opening`` asks a host to own the bucket. ``home`` is the only node that can have it,
        for a topic in memory."""
        self._transport, self._key, self._opening, self._home = transport, key, opening, home
        self._lane = uuid.uuid4().int % LANES
        self._owner: Connection | None = None
        self._holder: str | None = None
        """What the last host said that found the bucket's lock taken."""
        self._finding = asyncio.Lock()

    @property
    def node(self) -> str | None:
        """The node that owns the bucket, as far as it is known."""
        if self.local_service() is not None:
            return self._transport.node
        return self._owner.node if self._owner is not None else None

    def local_service(self) -> BucketService | None:
        """Return the bucket itself if this process owns it."""
        host = host_on(self._transport.node)
        service = host.buckets.get(self._key) if host is not None else None
        return service if service is not None and not service.closed else None

    def connection(self) -> RequestTarget | None:
        """Return the way to the owner, None while the owner is not known."""
        service = self.local_service()
        if service is not None:
            return _LocalTarget(service, self._transport.node)
        return self._owner

    async def locate(self, patience: Patience) -> str:
        """Return the node that owns the bucket; if it is not known, find it first."""
        return self.node or (await self._find(patience)).node

    async def ask(self, request: Request) -> Reply:
        """Send a request to the owner until it answers or patience runs out."""
        patience = Patience()
        while True:
            try:
                return await (self.connection() or await self._find(patience)).ask(request)
            except LOST as exc:
                await self.lost(exc, patience)

    async def stream(self, request: Request, patience: Patience) -> AsyncGenerator[Reply, None]:
        """Yield the owner's replies; every one of them renews ``patience``.

        Raises one of :data:`LOST` when the owner is lost: call :meth:`lost`, then resume.
        """
        owner = await self._find(patience)
        replies = owner.stream(request)
        try:
            async for reply in replies:
                patience.renew()
                yield reply
                patience.renew()  # a slow consumer's time is not the owner's
        finally:
            await replies.aclose()

    async def lost(self, exc: Exception, patience: Patience) -> None:
        """Forget the owner and pause, or raise if patience is exhausted."""
        self.forget()
        if patience.exhausted:
            raise self._unavailable(str(exc)) from exc
        await asyncio.sleep(_PAUSE)

    def forget(self) -> None:
        """Look for the owner again at the next call."""
        self._owner = None

    async def reopen(self) -> None:
        """Have a node open the bucket with the topic's present configuration."""
        self.forget()
        await self._find(Patience())

    async def _find(self, patience: Patience) -> Connection:
        async with self._finding:
            if self._owner is not None:
                return self._owner
            hint: str | None = None
            holder: str | None = None
            failure = "no node hosts buckets; call persisting.cluster.serve(system) on one"
            while True:
                hosts = await self._transport.hosts()
                order = [self._home] if self._home else ranked(self._key, hosts)
                if hint in hosts:
                    order = [hint, *(node for node in order if node != hint)]
                for node in order:
                    try:
                        self._owner = await self._open_on(node)
                        self._holder = None
                        return self._owner
                    except BucketLocked as exc:
                        holder, locking_node = str(exc), exc.owner.get("node")
                        hint = locking_node if locking_node != node else None
                    except Unreachable as exc:
                        failure = str(exc)
                self._holder = holder or self._holder
                if patience.exhausted:
                    raise self._unavailable(failure, hint)
                await asyncio.sleep(_PAUSE)

    async def _open_on(self, node: str) -> Connection:
        """Have a node own the bucket, and connect to it there."""
        host = host_on(self._transport.node)
        if host is not None and host.node == node:
            reply = _checked(await asyncio.shield(host.answer(self._opening)))
        else:
            connection = await self._transport.connect(HOST_ENDPOINT, node, OPEN_SECONDS)
            reply = await connection.ask(self._opening, OPEN_SECONDS)
        if "leaving" in reply.value:
            raise Unreachable(f"node {node} is shutting down")
        if "locked" in reply.value:
            raise BucketLocked(reply.value["text"], owner=reply.value["locked"])
        endpoint = lane_endpoint(self._key, self._lane)
        return await self._transport.connect(endpoint, node, OPEN_SECONDS)

    def _unavailable(self, failure: str, holder: str | None = None) -> StorageError:
        topic, bucket = self._opening.args["config"]["topic"], self._opening.args["bucket"]
        return StorageError(
            f"bucket {bucket} of topic {topic!r} has no owner that answers"
            + (f" (node {holder} holds it)" if holder else "")
            + f": {self._holder or failure}"
        )


class _LocalTarget:
    """A bucket of this process, asked as if it were on another node."""

    def __init__(self, service: BucketService, node: str) -> None:
        self._service, self.node = service, node

    async def ask(self, request: Request, timeout: float | None = None) -> Reply:
        return _checked(await self._service.answer(request))


def _checked(answer: Reply | ReplyStream) -> Reply:
    """Return the reply of a service in this process, or raise its error."""
    assert isinstance(answer, Reply)
    return wire.raise_error(answer)
