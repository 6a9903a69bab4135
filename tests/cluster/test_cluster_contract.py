"""The queue contract on a cluster: on a system of one process, and on three nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.cluster_join import join_cluster, leave_cluster
from support.cluster_nodes import Cluster
from support.protocol_only_backend import OnlyProtocol
from support.queue_contract import QueueContract
from support.tasks import spawning
from support.topic_places import Place

from persisting.queue import register_backend
from persisting.topic import registry

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def systems(three: Cluster) -> AsyncIterator[dict[str, Any]]:
    register_backend("custom", OnlyProtocol)
    systems = {"one": await join_cluster(Cluster(), 0), "three": await join_cluster(three)}
    yield systems
    for system in systems.values():
        await leave_cluster(system)
    registry._registered.pop("custom")


@pytest_asyncio.fixture(loop_scope="module")
async def spawned() -> AsyncIterator[Any]:
    async with spawning() as spawn:
        yield spawn


async def _place(
    request: pytest.FixtureRequest, systems: dict[str, Any], folder: Path
) -> AsyncIterator[Place]:
    where, kind = request.param.split("-")
    place = Place(kind, folder / "queues", systems[where])
    yield place
    await place.close()


_ALWAYS = ["one-memory", "three-persisting"]
_NIGHTLY = ["one-lance", "one-persisting", "three-memory", "three-lance"]


def _fixture(always: list[str], nightly: list[str]) -> Any:
    """Return a fixture with a parameter for each place; some of them run nightly only."""
    params = [*always, *(pytest.param(place, marks=pytest.mark.nightly) for place in nightly)]
    return pytest_asyncio.fixture(loop_scope="module", params=params)


@_fixture(_ALWAYS, [*_NIGHTLY, "three-custom"])
async def place(request: Any, systems: Any, tmp_path: Path) -> AsyncIterator[Place]:
    async for place in _place(request, systems, tmp_path):
        yield place


@_fixture(_ALWAYS, _NIGHTLY)
async def typed_place(request: Any, systems: Any, tmp_path: Path) -> AsyncIterator[Place]:
    async for place in _place(request, systems, tmp_path):
        yield place


@_fixture(["three-lance", "three-persisting"], ["one-lance", "one-persisting"])
async def table_place(request: Any, systems: Any, tmp_path: Path) -> AsyncIterator[Place]:
    async for place in _place(request, systems, tmp_path):
        yield place


@_fixture(["three-persisting"], ["one-persisting"])
async def logged_place(request: Any, systems: Any, tmp_path: Path) -> AsyncIterator[Place]:
    async for place in _place(request, systems, tmp_path):
        yield place


class TestQueue(QueueContract):
    pass
