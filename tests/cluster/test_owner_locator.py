"""Finding a bucket's owner, with nodes that are simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from persisting.cluster import locator
from persisting.cluster.locator import LOST, Patience
from persisting.cluster.node_locator import NodeLocator
from persisting.cluster.placement import bucket_key, ranked
from persisting.cluster.transport import HOST_ENDPOINT, Unreachable
from persisting.cluster.wire import Reply, Request
from persisting.errors import BucketClosed, BucketLocked, StorageError

KEY = bucket_key("/data/t", 3)
OPENING = Request("open", {"config": {"topic": "t"}, "bucket": 3})


class Nodes:
    """A transport to nodes that answer as the test wants; this process is not one of them."""

    node = "client"

    def __init__(self, *names: str) -> None:
        self.alive = list(names)
        self.owner: str | None = None
        self.opened: list[str] = []

    async def hosts(self) -> list[str]:
        return self.alive

    async def connect(self, endpoint: str, node: str, timeout: float) -> SimulatedConnection:
        return SimulatedConnection(self, endpoint, node)


class SimulatedConnection:
    def __init__(self, nodes: Nodes, endpoint: str, node: str) -> None:
        self._nodes, self._endpoint, self.node = nodes, endpoint, node

    async def ask(self, request: Request, timeout: float | None = None) -> Reply:
        if self.node not in self._nodes.alive:
            raise Unreachable(f"node {self.node} cannot be reached")
        if self._endpoint == HOST_ENDPOINT:
            return self._open()
        if self._nodes.owner != self.node:
            raise BucketClosed("no longer here")
        return Reply(f"{request.op} by {self.node}")

    def _open(self) -> Reply:
        self._nodes.opened.append(self.node)
        if self._nodes.owner in (None, self.node):
            self._nodes.owner = self.node
            return Reply({"node": self.node})
        holder = {"node": self._nodes.owner}
        return Reply({"locked": holder, "text": f"locked by node {self._nodes.owner}"})

    async def stream(self, request: Request) -> AsyncGenerator[Reply, None]:
        yield await self.ask(request)
        raise Unreachable("the stream broke")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locator.OwnerLocator, "pause_seconds", 0.001)


def located(nodes: Nodes, home: str | None = None) -> NodeLocator:
    transport: Any = nodes
    return NodeLocator(transport, KEY, OPENING, home)


async def test_the_first_ranked_node_is_asked_to_own_a_bucket() -> None:
    nodes = Nodes("a", "b", "c")
    first = ranked(KEY, nodes.alive)[0]
    assert (await located(nodes).ask(Request("flush"))).value == f"flush by {first}"
    assert nodes.opened == [first]


async def test_the_node_that_holds_the_lock_is_used_whatever_its_rank() -> None:
    nodes = Nodes("a", "b", "c")
    nodes.owner = ranked(KEY, nodes.alive)[-1]
    node_locator = located(nodes)
    assert (await node_locator.ask(Request("flush"))).value == f"flush by {nodes.owner}"
    assert node_locator.node == nodes.owner


async def test_a_known_owner_is_not_looked_for_again() -> None:
    nodes = Nodes("a", "b")
    node_locator = located(nodes)
    for _ in range(3):
        await node_locator.ask(Request("flush"))
    assert len(nodes.opened) == 1


async def test_a_bucket_that_moved_is_found_on_its_new_owner() -> None:
    nodes = Nodes("a", "b")
    node_locator = located(nodes)
    await node_locator.ask(Request("flush"))
    nodes.owner = ranked(KEY, nodes.alive)[1]
    assert (await node_locator.ask(Request("flush"))).value == f"flush by {nodes.owner}"


async def test_a_dead_owner_is_replaced_by_the_next_node() -> None:
    nodes = Nodes("a", "b")
    node_locator = located(nodes)
    await node_locator.ask(Request("flush"))
    dead = nodes.owner
    assert dead is not None
    nodes.alive.remove(dead)
    nodes.owner = None
    assert (await node_locator.ask(Request("flush"))).value == f"flush by {nodes.alive[0]}"


async def test_a_memory_topic_is_asked_for_on_its_home_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locator, "PATIENCE_SECONDS", 0.01)
    nodes = Nodes("a", "b")
    node_locator = located(nodes, home="gone")
    with pytest.raises(StorageError, match=r"bucket 3 of topic 't'.*node gone cannot be reached"):
        await node_locator.ask(Request("flush"))
    assert nodes.opened == []


async def test_the_holder_of_the_lock_is_named_when_patience_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locator, "PATIENCE_SECONDS", 0.01)
    nodes = Nodes("a", "b")
    nodes.owner = "paused"
    with pytest.raises(StorageError, match="locked by node paused"):
        await located(nodes).ask(Request("flush"))


async def test_a_cluster_without_hosts_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locator, "PATIENCE_SECONDS", 0.01)
    with pytest.raises(StorageError, match=r"persisting\.cluster\.serve"):
        await located(Nodes()).ask(Request("flush"))


async def test_a_broken_stream_is_resumed_after_the_owner_is_forgotten() -> None:
    nodes = Nodes("a", "b")
    node_locator = located(nodes)
    patience = Patience()
    for _ in range(2):
        stream = node_locator.stream(Request("watch"), patience)
        assert (await anext(stream)).value == f"watch by {nodes.owner}"
        with pytest.raises(LOST) as broken:
            await anext(stream)
        await node_locator.lost(broken.value, patience)
        assert node_locator.node is None
    assert len(nodes.opened) == 2


class Searching(locator.OwnerLocator):
    """A locator whose searches end when the test says so."""

    def __init__(self) -> None:
        super().__init__("here")
        self.searches: list[asyncio.Future[Any]] = []

    def local_service(self) -> None:
        return None

    async def _search(self, patience: Patience) -> Any:
        self.searches.append(asyncio.get_running_loop().create_future())
        return await self.searches[-1]

    def _unavailable(self, failure: str) -> StorageError:
        return StorageError(failure)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of locators."""
    given = SimpleNamespace(now=0.0)
    given.monotonic = lambda: given.now
    monkeypatch.setattr(locator, "time", given)
    return given


async def started(*calls: asyncio.Task[str]) -> None:
    """Let tasks run until all of them wait."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_failed_search_fails_the_calls_that_waited_for_most_of_it(
    clock: SimpleNamespace,
) -> None:
    searching = Searching()
    early = [asyncio.ensure_future(searching.locate(Patience())) for _ in range(100)]
    await started(*early)
    clock.now = 11.0
    late = asyncio.ensure_future(searching.locate(Patience()))
    await started(late)
    clock.now = 20.0
    searching.searches[0].set_exception(BucketLocked("open elsewhere"))
    results = await asyncio.gather(*early, return_exceptions=True)
    assert all(isinstance(result, BucketLocked) for result in results)
    await started(late)
    assert len(searching.searches) == 2
    searching.searches[1].set_result(SimulatedConnection(Nodes("a"), "bucket", "a"))
    assert await late == "a"


async def test_cancelled_search_is_continued_by_a_call_that_waits() -> None:
    searching = Searching()
    calls = [asyncio.ensure_future(searching.locate(Patience())) for _ in range(3)]
    await started(*calls)
    calls[0].cancel()
    calls[2].cancel()
    await started(*calls)
    assert len(searching.searches) == 2
    searching.searches[1].set_result(SimulatedConnection(Nodes("a"), "bucket", "a"))
    assert await calls[1] == "a"
