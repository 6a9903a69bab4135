"""The contract of queues on Pulsing: in one process, and on three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.cluster_join import joined, left
from support.cluster_nodes import Cluster
from support.protocol_only_backend import OnlyProtocol
from support.queue_contract import (
    FindingContract,
    GroupContract,
    OnceContract,
    ReadingContract,
    SchemaContract,
    WritingContract,
)
from support.topic_places import Place

from persisting.queue import register_backend
from persisting.topic import registry

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    made = Cluster()
    made.start(3)
    yield made
    made.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def systems(three: Cluster) -> AsyncIterator[dict[str, Any]]:
    register_backend("custom", OnlyProtocol)
    made = {"one": await joined(Cluster(), 0), "three": await joined(three)}
    yield made
    for system in made.values():
        await left(system)
    registry._registered.pop("custom")


@pytest_asyncio.fixture(loop_scope="module")
async def spawned() -> AsyncIterator[Any]:
    tasks: list[asyncio.Task[Any]] = []

    def spawn(coroutine: Any) -> asyncio.Task[Any]:
        tasks.append(asyncio.create_task(coroutine))
        return tasks[-1]

    yield spawn
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _place(
    request: pytest.FixtureRequest, systems: dict[str, Any], folder: Path
) -> AsyncIterator[Place]:
    where, kind = request.param.split("-")
    made = Place(kind, folder / "queues", systems[where])
    yield made
    await made.close()


_ALWAYS = ["one-memory", "three-persisting"]
_NIGHTLY = ["one-lance", "one-persisting", "three-memory", "three-lance"]


def _fixture(always: list[str], nightly: list[str]) -> Any:
    """On these places always, on those where the long forms run."""
    params = [*always, *(pytest.param(place, marks=pytest.mark.nightly) for place in nightly)]
    return pytest_asyncio.fixture(loop_scope="module", params=params)


@_fixture(_ALWAYS, [*_NIGHTLY, "three-custom"])
async def place(request: Any, systems: Any, tmp_path: Path) -> AsyncIterator[Place]:
    async for made in _place(request, systems, tmp_path):
        yield made


@_fixture(_ALWAYS, _NIGHTLY)
async def typed_place(request: Any, systems: Any, tmp_path: Path) -> AsyncIterator[Place]:
    async for made in _place(request, systems, tmp_path):
        yield made


@_fixture(["three-lance", "three-persisting"], ["one-lance", "one-persisting"])
async def table_place(request: Any, systems: Any, tmp_path: Path) -> AsyncIterator[Place]:
    async for made in _place(request, systems, tmp_path):
        yield made


@_fixture(["three-persisting"], ["one-persisting"])
async def logged_place(request: Any, systems: Any, tmp_path: Path) -> AsyncIterator[Place]:
    async for made in _place(request, systems, tmp_path):
        yield made


class TestWriting(WritingContract):
    pass


class TestReading(ReadingContract):
    pass


class TestFinding(FindingContract):
    pass


class TestSchema(SchemaContract):
    pass


class TestGroups(GroupContract):
    pass


class TestOnce(OnceContract):
    pass
