"""Clusters of real processes, and the session's promise that none of them is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from support.cluster_nodes import Cluster, left_over


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while (left := list(left_over())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster of the test's own, without nodes yet."""
    made = Cluster()
    yield made
    made.close()


@pytest.fixture
async def join() -> AsyncIterator[Any]:
    """Join a cluster from this process, as a client that owns no bucket."""
    from support.cluster_join import joined, left

    systems: list[Any] = []

    async def enter(cluster: Cluster, hosts: int | None = None, **given: Any) -> Any:
        systems.append(await joined(cluster, hosts, **given))
        return systems[-1]

    yield enter
    for system in systems:
        await left(system)


@pytest.fixture
async def spawned() -> AsyncIterator[Any]:
    tasks: list[asyncio.Task[Any]] = []

    def spawn(coroutine: Any) -> asyncio.Task[Any]:
        tasks.append(asyncio.create_task(coroutine))
        return tasks[-1]

    yield spawn
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
