"""Places in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from support.object_stores import Server
from support.owner_process import OwnerProcess
from support.socket_places import SocketHome
from support.topic_homes import Home

CLUSTER_LEASE = 2.0
"""Seconds until the buckets of a dead node or member are taken over."""
GROUP_LEASE = 20.0
"""Members of a group are not taken for dead if the machine stops for a while."""


def topic_store(where: Mapping[str, Any]) -> ObjectStore:
    """Return the objects of the topic that these arguments of a queue name."""
    address = parse(where["storage_path"]) / where["topic"]
    return open_store(address, StorageOptions(where["storage_options"]))


class StoreHome(Home):
    """Opens topics below one prefix of an object store."""

    def __init__(self, server: Server, prefix: str, lease: float, *opener: Any) -> None:
        """``opener`` is the Pulsing system or the process that opens the buckets, if any."""
        super().__init__("persisting", Path(prefix), *opener)
        self.options = {**(self.options or {}), "lease": lease}
        self._server, self._prefix = server, prefix

    async def read(self, **given: Any) -> Any:
        if given.get("storage_path", "") is None:  # an open topic is found without its place
            given["storage_options"] = None
        return await super().read(**given)

    def store(self) -> ObjectStore:
        """Return the objects of the test's topic."""
        return topic_store({"topic": self.topic, **self._where()})

    def _where(self) -> dict[str, Any]:
        where = self._server.url(self._prefix)
        return {"storage_path": where, "storage_options": self._server.options()}


class StorePlace(StoreHome):
    """Opens the topics in this process."""

    def __init__(self, server: Server, prefix: str) -> None:
        super().__init__(server, prefix, GROUP_LEASE)


class ClusterStorePlace(StoreHome):
    """Opens the topics through a Pulsing system."""

    def __init__(self, server: Server, prefix: str, system: Any) -> None:
        super().__init__(server, prefix, CLUSTER_LEASE, system)


class StoreSocketPlace(StoreHome, SocketHome):
    """Opens topics whose buckets another process owns."""

    def __init__(self, server: Server, prefix: str, owner: OwnerProcess) -> None:
        super().__init__(server, prefix, GROUP_LEASE, owner)

    async def _give(self, topic: str, given: dict[str, Any]) -> None:
        await self._owner.ask("own", topic, {"topic": topic, **self._where()})
