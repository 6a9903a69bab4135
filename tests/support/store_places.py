"""Places in an object store whose buckets the nodes of a cluster own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.object_stores import SeaweedFS, url
from support.topic_homes import Home

GROUP_LEASE = 2.0
"""Seconds until the buckets of a dead node or member are taken over."""


class ClusterStorePlace(Home):
    """Opens topics below one prefix of an object store, through a Pulsing system."""

    def __init__(self, server: SeaweedFS, prefix: str, system: Any) -> None:
        super().__init__("persisting", Path(prefix), system)
        self.options = {**(self.options or {}), "lease": GROUP_LEASE}
        self._server, self._prefix = server, prefix

    async def read(self, **given: Any) -> Any:
        if given.get("storage_path", "") is None:  # an open topic is found without its place
            given["storage_options"] = None
        return await super().read(**given)

    def _where(self) -> dict[str, Any]:
        return {"storage_path": url(self._prefix), "storage_options": self._server.options()}
