"""The contract of queues, on a topic in an object store that another process owns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from support.object_stores import SeaweedFS
from support.owner_process import OwnerProcess
from support.queue_contract import QueueContract
from support.store_places import StoreSocketPlace

pytestmark = pytest.mark.usefixtures("frequent_looks", "no_topic_is_left_open")


@pytest.fixture(scope="module")
def owner() -> Iterator[OwnerProcess]:
    with OwnerProcess() as process:
        yield process


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
