"""Clusters of real processes, and a check that none of them outlives the session."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from support.cluster_nodes import Cluster, surviving_processes


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 30
    while (survivors := list(surviving_processes())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not survivors


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster of the test's own; it has no nodes yet."""
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """A cluster of three nodes, shared by the tests of a module."""
    cluster = Cluster()
    cluster.start(3)
    yield cluster
    cluster.close()


@pytest.fixture
async def join() -> AsyncIterator[Any]:
    """Join a cluster from this process, as a client that owns no bucket."""
    from support.cluster_join import joining

    async with joining() as enter:
        yield enter
