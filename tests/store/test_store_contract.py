"""The contracts of queues and tables, on a topic in an object store: S3, and nightly Azure too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from support.object_stores import Server
from support.table_contract import MaintenanceContract, bucket_of, sound_topic
from support.topic_contract import TopicContract
from support.topic_homes import BUCKETS, Home

from persisting.queue import QueueReader
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse

pytestmark = pytest.mark.usefixtures("frequent_looks", "no_topic_is_left_open")

_TABLE = "bucket_1/data.lance/"
GROUP_LEASE = 20.0
"""Members of a group are not taken for dead if the machine stops for a while."""


class StorePlace(Home):
    """Opens topics below one prefix of an object store."""

    def __init__(self, server: Server, prefix: str) -> None:
        super().__init__("persisting", Path(prefix))
        self.options = {**(self.options or {}), "lease": GROUP_LEASE}
        self._server, self._prefix = server, prefix

    async def read(self, **given: Any) -> QueueReader:
        if given.get("storage_path", "") is None:  # an open topic is found without its place
            given["storage_options"] = None
        return await super().read(**given)

    def store(self) -> ObjectStore:
        """Return the objects of the test's topic."""
        address = parse(self._server.url(self._prefix)) / self.topic
        return open_store(address, StorageOptions(self._server.options()))

    def _where(self) -> dict[str, Any]:
        where = self._server.url(self._prefix)
        return {"storage_path": where, "storage_options": self._server.options()}


@pytest.fixture(params=["server", pytest.param("azurite", marks=pytest.mark.nightly)])
async def place(request: pytest.FixtureRequest, prefix: str) -> AsyncIterator[StorePlace]:
    made = StorePlace(request.getfixturevalue(request.param), prefix)
    yield made
    await made.close()


typed_place = table_place = logged_place = home = evolving_home = place


class TestTopic(TopicContract):
    class TestMaintenance(MaintenanceContract):
        async def test_verify_names_the_bucket_the_file_and_the_offsets(self, home: Home) -> None:
            """An object store has other damage than a disk: missing or replaced objects."""
            reader, files = await sound_topic(home)
            assert files == 2 * BUCKETS
            store = cast(StorePlace, home).store()
            data = store.entries("bucket_1/data.lance/data")
            newest = max(data, key=lambda name: data[name].modified)
            first = sum(bucket_of(n) == 1 for n in range(40))
            end = first + sum(bucket_of(n) == 1 for n in range(40, 80))
            for replaced in (b"not a table", None):
                store.delete([newest])
                if replaced is not None:
                    store.create(newest, replaced)
                found = await reader.verify()
                (damage,) = found["damaged"]
                assert (damage["bucket"], damage["file"]) == (1, newest.removeprefix(_TABLE))
                assert damage["offsets"] in ([first, end], [0, first])
                assert found["ok"] is False
