"""Calls to a node that no longer answers fail soon; slow calls do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.waiting import until

from persisting.cluster import pulse
from persisting.cluster.pulse import Pulse, WatchedConnection
from persisting.cluster.transport import ALIVE_ENDPOINT, Unreachable
from persisting.cluster.wire import Reply, Request


class Node:
    """A node and the way to it; it answers calls when told to, and pings unless it is silent."""

    node = "7"

    def __init__(self) -> None:
        self.answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.silent = False
        self.pings = 0
        self.cancelled = False

    async def ask(self, request: Request, timeout: float | None = None) -> Reply:
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def was_pinged_often(self) -> bool:
        return self.pings >= 5

    async def connect(self, endpoint: str, node: str, timeout: float) -> Any:
        assert (endpoint, node) == (ALIVE_ENDPOINT, self.node)
        return Ping(self)


class Ping:
    def __init__(self, node: Node) -> None:
        self._node = node

    async def ask(self, request: Request, timeout: float) -> Reply:
        self._node.pings += 1
        await asyncio.sleep(0)
        if self._node.silent:
            raise Unreachable("no answer")
        return Reply("alive")


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "PING_SECONDS", 0.01)


def watched(node: Node) -> WatchedConnection:
    return WatchedConnection(node, Pulse(node), "bucket")  # type: ignore[arg-type]


async def test_call_to_a_silent_node_fails_and_is_cancelled(quick_pings: None) -> None:
    node = Node()
    node.silent = True
    with pytest.raises(Unreachable, match="no answer"):
        await watched(node).ask(Request("put"))
    await asyncio.sleep(0)
    assert node.cancelled


async def test_slow_call_continues_while_its_node_answers_pings(
    quick_pings: None,
) -> None:
    node = Node()
    call = asyncio.ensure_future(watched(node).ask(Request("put")))
    await until(node.was_pinged_often)
    assert not call.done()
    node.answer.set_result(Reply("stored"))
    assert (await call).value == "stored"


async def test_calls_that_wait_for_the_same_node_share_its_pings() -> None:
    node = Node()
    together = Pulse(node)  # type: ignore[arg-type]
    others = Pulse(node)  # type: ignore[arg-type]
    pings = [pulse_.failure("7") for pulse_ in (together, others) for _ in range(10)]
    assert await asyncio.gather(*pings) == [""] * 20
    assert node.pings == 1
    node.silent = True
    assert await together.failure("7") == "no answer"
