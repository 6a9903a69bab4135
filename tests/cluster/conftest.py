"""Clusters of real processes, and a check that none of them outlives the session."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_nodes import Cluster, surviving_processes
from support.cluster_traffic import starting_traffic


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 30
    while (survivors := list(surviving_processes())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not survivors


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """The test's own cluster; it has no nodes yet."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """A cluster of three nodes, shared by the tests of a module."""
    with Cluster() as cluster:
        cluster.start(3)
        yield cluster


@pytest.fixture
async def join() -> AsyncIterator[Any]:
    """Join a cluster from this process, as a client that owns no bucket."""
    from support.cluster_join import joining

    async with joining() as enter:
        yield enter


@pytest.fixture
async def traffic(tmp_path: Path) -> AsyncIterator[Any]:
    """Start a producer and a consumer; they are stopped at the end of the test."""
    async with starting_traffic(tmp_path) as start:
        yield start
