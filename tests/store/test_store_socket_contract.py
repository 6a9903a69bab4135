"""The contract of queues, on a topic in an object store that another process owns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.object_stores import SeaweedFS, url
from support.open_topics import no_open_topics
from support.owner_process import OwnerProcess
from support.queue_contract import QueueContract
from support.topic_homes import Home

from persisting.queue import QueueReader, QueueWriter
from persisting.topic import store_membership

GROUP_LEASE = 20.0
"""Members of a group are not taken for dead if the machine stops for a while."""


class StoreSocketPlace(Home):
    """Opens topics below one prefix of an object store, whose buckets another process owns."""

    def __init__(self, server: SeaweedFS, prefix: str, owner: OwnerProcess) -> None:
        super().__init__("persisting", Path(prefix))
        self.options = {**(self.options or {}), "lease": GROUP_LEASE}
        self._server, self._prefix, self._owner = server, prefix, owner
        self._owned: set[str] = set()

    async def write(self, **given: Any) -> QueueWriter:
        writer = await super().write(**given)
        topic = given.get("topic", self.topic)
        if topic not in self._owned:
            self._owned.add(topic)
            await self._owner.ask("own", topic, {"topic": topic, **self._where()})
        return writer

    async def read(self, **given: Any) -> QueueReader:
        if given.get("storage_path", "") is None:  # an open topic is found without its place
            given["storage_options"] = None
        return await super().read(**given)

    def _where(self) -> dict[str, Any]:
        return {"storage_path": url(self._prefix), "storage_options": self._server.options()}

    async def close(self) -> None:
        await super().close()
        for topic in self._owned:
            await self._owner.ask("close", topic)


@pytest.fixture(autouse=True)
def _frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members poll for others as often as with a short lease."""
    monkeypatch.setattr(store_membership, "_LOOKS_PER_LEASE", 100)


@pytest.fixture(autouse=True)
async def no_topic_is_left_open() -> AsyncIterator[None]:
    """Fail a test that leaves a topic open."""
    with no_open_topics():
        yield


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
