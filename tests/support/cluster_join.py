"""This process as a member of a test's cluster."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pulsing as pul

from persisting.cluster.host import host_here
from persisting.cluster.pulsing_transport import PulsingTransport
from support.cluster_nodes import Cluster


async def joined(cluster: Cluster, hosts: int | None = None, **given: Any) -> Any:
    """A system in the cluster that sees its hosts (all living nodes unless told otherwise)."""
    seeds = cluster.seeds
    system = await pul.actor_system("127.0.0.1:0", seeds=seeds or None, **given)
    wanted = len(seeds) if hosts is None else hosts
    deadline = time.monotonic() + 20
    transport = PulsingTransport(system)
    while len(hosts_seen := await transport.hosts()) < wanted:
        assert time.monotonic() < deadline, f"the client sees only the hosts {hosts_seen}"
        await asyncio.sleep(0.05)
    return system


async def left(system: Any) -> None:
    host = host_here(system._inner)
    if host is not None:
        await host.close()
    await system.shutdown()
