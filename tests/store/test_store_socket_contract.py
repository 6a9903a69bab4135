"""The contract of queues, on a topic in an object store that another process owns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.object_stores import SeaweedFS, url
from support.owner_process import OwnerProcess
from support.queue_contract import QueueContract
from support.socket_places import SocketHome

from persisting.queue import QueueReader

pytestmark = pytest.mark.usefixtures("frequent_looks", "no_topic_is_left_open")

GROUP_LEASE = 20.0
"""Members of a group are not taken for dead if the machine stops for a while."""


class StoreSocketPlace(SocketHome):
    """Opens topics below one prefix of an object store, whose buckets another process owns."""

    def __init__(self, server: SeaweedFS, prefix: str, owner: OwnerProcess) -> None:
        super().__init__("persisting", Path(prefix), owner)
        self.options = {**(self.options or {}), "lease": GROUP_LEASE}
        self._server, self._prefix = server, prefix

    async def _give(self, topic: str, given: dict[str, Any]) -> None:
        await self._owner.ask("own", topic, {"topic": topic, **self._where()})

    async def read(self, **given: Any) -> QueueReader:
        if given.get("storage_path", "") is None:  # an open topic is found without its place
            given["storage_options"] = None
        return await super().read(**given)

    def _where(self) -> dict[str, Any]:
        return {"storage_path": url(self._prefix), "storage_options": self._server.options()}


@pytest.fixture(scope="module")
def owner() -> Iterator[OwnerProcess]:
    process = OwnerProcess()
    yield process
    process.close()


@pytest.fixture
async def place(
    server: SeaweedFS, prefix: str, owner: OwnerProcess
) -> AsyncIterator[StoreSocketPlace]:
    made = StoreSocketPlace(server, prefix, owner)
    yield made
    await made.close()


typed_place = table_place = logged_place = home = evolving_home = place


class TestQueue(QueueContract):
    pass
