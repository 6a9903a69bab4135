"""The contracts of queues and tables, on a topic in an object store: S3, and nightly Azure too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest
from support.store_places import StorePlace
from support.table_contract import MaintenanceContract, bucket_of, sound_topic
from support.topic_contract import TopicContract
from support.topic_homes import BUCKETS, Home

pytestmark = pytest.mark.usefixtures("frequent_looks", "no_topic_is_left_open")

_TABLE = "bucket_1/data.lance/"


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
