"""This process as a member of a test's cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pulsing as pul

from persisting.cluster.host import host_here
from persisting.cluster.pulsing_transport import PulsingTransport
from support.cluster_nodes import Cluster


async def join_cluster(cluster: Cluster, hosts: int | None = None, **options: Any) -> Any:
    """Return a system that sees ``hosts`` hosts of the cluster, by default every living node."""
    seeds = cluster.seeds
    system = await pul.actor_system("127.0.0.1:0", seeds=seeds or None, **options)
    expected = len(seeds) if hosts is None else hosts
    deadline = time.monotonic() + 120
    transport = PulsingTransport(system)
    while len(hosts_seen := await transport.hosts()) < expected:
        assert time.monotonic() < deadline, f"the client sees only the hosts {hosts_seen}"
        await asyncio.sleep(0.05)
    return system


async def leave_cluster(system: Any) -> None:
    """Close this process's host, if it has one, and its system."""
    host = host_here(system._inner)
    if host is not None:
        await host.close()
    await system.shutdown()


@asynccontextmanager
async def joining() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Join clusters as :func:`join_cluster` does; leave them at the end."""
    systems: list[Any] = []

    async def enter(cluster: Cluster, hosts: int | None = None, **options: Any) -> Any:
        systems.append(await join_cluster(cluster, hosts, **options))
        return systems[-1]

    yield enter
    for system in systems:
        await leave_cluster(system)
