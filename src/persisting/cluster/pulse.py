"""Whether nodes answer at all, asked beside the calls that are under way.

A node that hangs, or whose link is cut, refuses no connection: a call to it just never returns.
With a folder nothing could be done, since such a node keeps its locks. A bucket in an object store
can be taken over, so its clients notice early that its owner is silent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from weakref import WeakKeyDictionary

from persisting.cluster.placement import KEY
from persisting.cluster.transport import (
    ALIVE_ENDPOINT,
    PING_SECONDS,
    Connection,
    Transport,
    Unreachable,
)
from persisting.cluster.wire import Reply, Request
from persisting.errors import StorageError

_SILENT_PINGS = 2
"""A node that has not answered this many pings in a row is silent."""


_REMEMBERED_SECONDS = 60.0
"""How long a node is asked after it was last listed as alive."""

_FAILED_SECONDS = 1.0
"""How long a failed ping counts for all who ask."""

_listed: dict[str, dict[str, float]] = {}
"""By own node, when other nodes were last listed as alive."""

_pings: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], asyncio.Task[str]]] = (
    WeakKeyDictionary()
)
"""By event loop, the pings under way from a node to a node."""


class Pulse:
    """Pings nodes; all who want to know about one at the same time share a ping."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._failed: dict[str, tuple[float, str]] = {}

    def known(self, listed: list[str]) -> list[str]:
        """Return the nodes that are listed as alive now, and those that were lately: Pulsing takes
        live nodes for dead at times."""
        seen, now = _listed.setdefault(self._transport.node, {}), time.monotonic()
        seen.update(dict.fromkeys(listed, now))
        for node in [node for node, at in seen.items() if now - at > _REMEMBERED_SECONDS]:
            del seen[node]
        return list(seen)

    async def failure(self, node: str) -> str:
        """Return why a node does not answer; empty if it answers within ``PING_SECONDS``."""
        failed_at, reason = self._failed.get(node, (0.0, ""))
        if reason and time.monotonic() - failed_at < _FAILED_SECONDS:
            return reason
        reason = await self._shared_ping(node)
        self._failed[node] = time.monotonic(), reason
        return reason

    async def _shared_ping(self, node: str) -> str:
        pings = _pings.setdefault(asyncio.get_running_loop(), {})
        key = self._transport.node, node
        ping = pings.get(key)
        if ping is None or ping.done():
            ping = pings[key] = asyncio.ensure_future(self._ping(node))
        return await asyncio.shield(ping)

    async def _ping(self, node: str) -> str:
        try:
            connection = await self._transport.connect(ALIVE_ENDPOINT, node, PING_SECONDS)
            await connection.ask(Request("alive"), PING_SECONDS)
        except (Unreachable, StorageError) as exc:
            return str(exc)
        return ""


class WatchedConnection:
    """A connection to a bucket through its node; calls fail soon if the node is silent."""

    def __init__(self, inner: Connection, pulse: Pulse, key: str) -> None:
        self._inner, self._pulse, self._key = inner, pulse, key

    @property
    def node(self) -> str:
        return self._inner.node

    async def ask(self, request: Request, timeout: float | None = None) -> Reply:
        call = asyncio.ensure_future(self._inner.ask(self._addressed(request), timeout))
        silent = 0
        try:
            while not (await asyncio.wait([call], timeout=PING_SECONDS))[0]:
                failure = await self._pulse.failure(self.node)
                silent = silent + 1 if failure else 0
                if silent >= _SILENT_PINGS and not call.done():
                    raise Unreachable(failure)
            return call.result()
        finally:
            call.cancel()

    def stream(self, request: Request) -> AsyncGenerator[Reply, None]:
        return self._inner.stream(self._addressed(request))

    def _addressed(self, request: Request) -> Request:
        args = {**request.args, KEY: self._key}
        return Request(request.op, args, request.rows, request.arrow)
