"""A storage node: a member of a Pulsing cluster that owns buckets until it is closed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from persisting import metrics
from persisting.cluster.host import Host, serve
from persisting.cluster.pulsing_transport import PulsingTransport, members_of, start_system
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument, StorageError
from persisting.options import storage_folder
from persisting.store.object_store import open_store
from persisting.store.probe import probe
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress, is_store_address
from persisting.store_address import parse as parse_url

_JOIN_STEP_SECONDS = 0.1


@dataclass(frozen=True)
class NodeOptions:
    """How a storage node is reached and what it owns."""

    storage: str
    """The node owns only topics in this folder, or below this address in an object store."""
    address: str = "127.0.0.1:0"
    seeds: Sequence[str] = ()
    """Addresses of other nodes; without any, the node begins a cluster."""
    passphrase: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    join_seconds: float = 30.0
    """How long to wait for one of the seeds."""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """Credentials and settings for an object store; None: those of the environment."""


@dataclass(frozen=True)
class NodeHealth:
    """What a node sees of its cluster, and what it owns."""

    hosts: int
    """Living nodes that own buckets, this one included."""
    topics: int
    buckets: int


class StorageNode:
    """A running node."""

    def __init__(self, system: Any, host: Host, server: Any, storage: Path | StoreAddress) -> None:
        self._system, self._host, self._server = system, host, server
        self._transport = PulsingTransport(system)
        self.storage = storage
        self.address = self._transport.address
        self.node = self._transport.node

    @property
    def metrics_port(self) -> int | None:
        """The port on which metrics are served, if they are."""
        return None if self._server is None else int(self._server.server_port)

    @classmethod
    async def start(cls, options: NodeOptions) -> StorageNode:
        """Join the cluster and own buckets; raise if no seed can be reached."""
        storage = await _prepared_storage(options)
        address = resolved(options.address, "the address")
        seeds = [resolved(seed, "a seed") for seed in options.seeds]
        system = await start_system(address, seeds, options.passphrase)
        host = server = None
        try:
            if seeds and str(system.addr) not in seeds:
                await joined(system, options.seeds, options.join_seconds)
            server = _metrics_server(options)
            given = str(storage) if isinstance(storage, StoreAddress) else storage
            host = await serve(system, given, storage_options=options.storage_options)
        except BaseException:
            if server is not None:
                server.shutdown()
                server.server_close()
            await system.shutdown()
            raise
        return cls(system, host, server, storage)

    async def health(self) -> NodeHealth:
        """Return what the node sees of its cluster, and what it owns."""
        hosts = await self._transport.hosts()
        return NodeHealth(len(hosts), len(self._host.topics), len(self._host.buckets))

    async def close(self) -> None:
        """Flush and close every bucket, so that other nodes can open them, and leave."""
        try:
            if not self._host.closed:
                await self._host.close()
        finally:
            if self._server is not None:
                self._server.shutdown()
                self._server.server_close()
            await self._system.shutdown()


async def _prepared_storage(options: NodeOptions) -> Path | StoreAddress:
    """Return the storage of a node: a folder, which is created, or a store, which is probed."""
    if is_store_address(options.storage):
        address = parse_url(options.storage)
        await in_thread(probe, open_store(address, StorageOptions(options.storage_options)))
        return address
    storage = storage_folder(options.storage)
    try:
        storage.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StorageError(f"cannot create {storage}: {exc.strerror}") from exc
    return storage


def resolved(address: str, what: str) -> str:
    """Return ``host:port`` with the number of its host, which is all that Pulsing accepts."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"{what} must be host:port, as in 10.0.0.5:7000, got {address!r}")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as exc:
        raise InvalidArgument(f"{what} {address!r}: unknown host {host!r}") from exc
    number = str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
    return f"[{number}]:{port}" if ":" in number else f"{number}:{port}"


async def joined(system: Any, seeds: Sequence[str], seconds: float) -> None:
    """Wait until another node is seen."""
    deadline = time.monotonic() + seconds
    while await members_of(system) < 2:
        if time.monotonic() >= deadline:
            raise StorageError(
                f"no seed answered within {seconds:g} s ({', '.join(seeds)}): check that one of "
                "them runs, its address, and that all nodes have the same passphrase"
            )
        await asyncio.sleep(_JOIN_STEP_SECONDS)


def _metrics_server(options: NodeOptions) -> Any:
    if options.metrics_port is None:
        return None
    try:
        return metrics.serve(options.metrics_port, options.metrics_host)
    except OSError as exc:
        raise StorageError(
            f"cannot serve metrics on {options.metrics_host}:{options.metrics_port}: "
            f"{exc.strerror or exc}; choose another port"
        ) from exc
