"""Pulsing as a transport: few calls at a time, each answered or failed, none left hanging."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import pulsing as pul

from persisting.cluster import wire
from persisting.cluster.actor import EndpointActor
from persisting.cluster.pulsing_messages import message, payload_of
from persisting.cluster.transport import (
    ALIVE_ENDPOINT,
    HOST_ENDPOINT,
    KEEPALIVE_SECONDS,
    Answering,
    StopHook,
    Unreachable,
)
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import within
from persisting.errors import StorageError

MAX_IN_FLIGHT = 8
"""Concurrent calls to one node; Pulsing's connection pool gives up at about twice as many."""

CALL_SECONDS = 20.0
"""A call without an answer for this long has failed. The owner may still carry it out: that is
why every put has a producer sequence."""

_FAILURES = (RuntimeError, pul.PulsingError)
"""What Pulsing raises when a node or an actor cannot be reached."""

_limits: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)
_last_seen: dict[str, list[str]] = {}
_references: dict[tuple[str, str, str], Any] = {}
"""By own node, endpoint and node, what Pulsing last resolved."""

_MOST_REFERENCES = 4096


class PulsingTransport:
    """A node of a Pulsing system: a :class:`~persisting.cluster.transport.HostTransport`."""

    def __init__(self, system: Any) -> None:
        self._system = unwrapped(system)
        self.node = node_of(system)
        self.address = str(self._system.addr)

    async def hosts(self) -> list[str]:
        try:
            instances = await self._system.get_named_instances(HOST_ENDPOINT)
        except _FAILURES:
            # Pulsing also raises when a single instance does not answer.
            return _last_seen.get(self.node, [])
        alive = [str(i["node_id"]) for i in instances if i.get("status") == "Alive"]
        _last_seen[self.node] = alive
        return alive

    async def connect(self, endpoint: str, node: str, timeout: float) -> PulsingConnection:
        reference = await self._resolved(endpoint, node, timeout)
        # Pings must not wait for the calls whose node they ask about.
        limit = f"{node} {endpoint}" if endpoint == ALIVE_ENDPOINT else node
        return PulsingConnection(reference, node, limit)

    async def _resolved(self, endpoint: str, node: str, timeout: float) -> Any:
        """Return a reference to an endpoint; the last one if Pulsing gives none now.

        On a busy machine, or while another node hangs, Pulsing takes live nodes for dead at
        times. Their endpoints still answer, and a dead node's refuse.
        """
        key = self.node, endpoint, node
        try:
            resolving = self._system.resolve_named(endpoint, node_id=int(node))
            reference = await _reached(resolving, node, timeout)
        except Unreachable:
            if key not in _references:
                raise
            return _references[key]
        if len(_references) >= _MOST_REFERENCES:
            _references.clear()
        _references[key] = reference
        return reference

    async def publish(
        self, endpoint: str, answering: Answering, on_stop: StopHook | None = None
    ) -> None:
        actor = EndpointActor(answering, on_stop)
        await self._system.spawn(actor, name=endpoint, public=True)

    async def withdraw(self, endpoint: str) -> None:
        with suppress(*_FAILURES):
            await self._system.stop(endpoint)


class PulsingConnection:
    """A reference to an actor: a :class:`~persisting.cluster.transport.Connection`."""

    def __init__(self, ref: Any, node: str, limit: str) -> None:
        """``limit`` names the calls that count together towards ``MAX_IN_FLIGHT``."""
        self._ref, self.node, self._limit = ref, node, limit
        self._reads_text = False

    async def ask(self, request: Request, timeout: float | None = None) -> Reply:
        answer = await self._send(request, CALL_SECONDS if timeout is None else timeout)
        if answer.is_stream:
            raise Unreachable(f"node {self.node} answered {request.op!r} with a stream")
        reply = wire.decode_reply(payload_of(answer))
        self._reads_text = reply.reads_text
        return reply

    async def stream(self, request: Request) -> AsyncGenerator[Reply, None]:
        answer = await self._send(request, CALL_SECONDS)
        if not answer.is_stream:
            wire.decode_reply(payload_of(answer))
            raise Unreachable(f"node {self.node} answered {request.op!r} without a stream")
        reader = answer.stream_reader()
        while True:
            yield await self._next_reply(reader)

    async def _send(self, request: Request, timeout: float) -> Any:
        sent = message(request.op, wire.encode(request), as_text=self._reads_text)
        limits = _limits.setdefault(asyncio.get_running_loop(), {})
        async with limits.setdefault(self._limit, asyncio.Semaphore(MAX_IN_FLIGHT)):
            answer = await _reached(self._ref.ask(sent), self.node, timeout)
        if answer is None:
            raise Unreachable(f"node {self.node} gave no reply to {request.op!r}")
        return answer

    async def _next_reply(self, reader: Any) -> Reply:
        silence = 3 * KEEPALIVE_SECONDS
        try:
            data = await within(anext(reader, None), silence)
        except asyncio.TimeoutError as exc:
            raise Unreachable(f"node {self.node}: a stream was silent for {silence:g} s") from exc
        except _FAILURES as exc:
            raise Unreachable(f"node {self.node}: a stream broke: {_message(exc)}") from exc
        if data is None:
            # Pulsing ends streams of a stopped actor, and those of 300 s, without an error.
            raise Unreachable(f"node {self.node}: a stream ended without a last reply")
        return wire.decode_reply(data)


async def start_system(address: str, seeds: list[str], passphrase: str | None) -> Any:
    """Return a new actor system at an address, or raise."""
    try:
        return await pul.actor_system(address, seeds=seeds or None, passphrase=passphrase)
    except (ValueError, *_FAILURES) as exc:
        raise StorageError(f"cannot listen on {address}: {_message(exc)}") from exc


async def members_of(system: Any) -> int:
    """Return how many live members of the cluster a system sees, itself included."""
    return sum(member.get("status") == "Alive" for member in await unwrapped(system).members())


def unwrapped(system: Any) -> Any:
    """Return the core system below Pulsing's Python wrapper."""
    return getattr(system, "_inner", system)


def node_of(system: Any) -> str:
    """Return the id of this process's node of a system."""
    return str(system.node_id.id)


async def _reached(awaitable: Any, node: str, timeout: float) -> Any:
    try:
        return await within(awaitable, timeout)
    except asyncio.TimeoutError as exc:
        raise Unreachable(f"node {node} did not answer for {timeout:g} s") from exc
    except _FAILURES as exc:
        raise Unreachable(f"node {node} cannot be reached: {_message(exc)}") from exc


def _message(exc: BaseException) -> str:
    """Return the message of an error of Pulsing without its JSON envelope."""
    text = str(exc)
    head, envelope, rest = text.partition("__PULSING_ERROR__:")
    if envelope:
        with suppress(msgspec.DecodeError):
            text = head + str(msgspec.json.decode(rest, type=dict[str, Any]).get("message", rest))
    return text
