"""Calls to other nodes: few at a time, each answered or failed, never left hanging."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import pulsing as pul

from persisting.cluster import wire
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import within

MAX_IN_FLIGHT = 8
"""Calls under way to one node; Pulsing's connection pool gives up at about twice as many."""

CALL_SECONDS = 20.0
"""After this a call counts as failed, although it may still be carried out: puts carry marks."""

_limits: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)


class Unreachable(Exception):
    """The node did not answer, or answered with something that is no reply."""


async def ask(ref: Any, node: str, request: Request, timeout: float | None = None) -> Reply:
    """The reply to a call; our own errors are raised as they were, all others as Unreachable."""
    answer = await _ask(ref, node, request, CALL_SECONDS if timeout is None else timeout)
    if answer is None or answer.is_stream:
        raise Unreachable(f"node {node} gave no reply to {request.op!r}")
    return wire.decode_reply(answer.payload)


async def ask_stream(ref: Any, node: str, request: Request) -> Any:
    """A stream of replies."""
    answer = await _ask(ref, node, request, CALL_SECONDS)
    if answer is None:
        raise Unreachable(f"node {node} gave no reply to {request.op!r}")
    if not answer.is_stream:
        wire.decode_reply(answer.payload)
        raise Unreachable(f"node {node} answered {request.op!r} without a stream")
    return answer.stream_reader()


async def _ask(ref: Any, node: str, request: Request, timeout: float) -> Any:
    message = pul.Message(request.op, wire.encode(request))
    limits = _limits.setdefault(asyncio.get_running_loop(), {})
    async with limits.setdefault(node, asyncio.Semaphore(MAX_IN_FLIGHT)):
        try:
            return await within(ref.ask(message), timeout)
        except asyncio.TimeoutError as exc:
            raise Unreachable(f"node {node} did not answer for {timeout:g} s") from exc
        except (RuntimeError, pul.PulsingError) as exc:
            raise Unreachable(f"node {node} cannot be reached: {plain(exc)}") from exc


def plain(exc: BaseException) -> str:
    """An error of Pulsing in its own words, without the envelope they come in."""
    text = str(exc)
    head, found, rest = text.partition("__PULSING_ERROR__:")
    if found:
        with suppress(msgspec.DecodeError):
            text = head + str(msgspec.json.decode(rest, type=dict[str, Any]).get("message", rest))
    return text
