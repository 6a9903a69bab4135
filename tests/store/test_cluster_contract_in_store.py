"""The contracts of queues and tables on a cluster of three nodes, on topics in an object store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from support.cluster_join import joining
from support.cluster_nodes import Cluster
from support.object_stores import SeaweedFS, environment_of, url
from support.store_places import ClusterStorePlace
from support.table_contract import MaintenanceContract
from support.tasks import spawning
from support.topic_contract import TopicContract
from support.work_contract import WorkContract
from support.work_places import WorkPlace

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def three(server: SeaweedFS) -> Iterator[Cluster]:
    """Three nodes, with credentials in their environment."""
    with Cluster(variables=environment_of(server.options())) as cluster:
        cluster.start(3)
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def system(three: Cluster) -> AsyncIterator[Any]:
    """This process as a client, which has its credentials from ``storage_options``."""
    async with joining() as enter:
        yield await enter(three)


@pytest_asyncio.fixture(loop_scope="module")
async def spawned() -> AsyncIterator[Any]:
    async with spawning() as spawn:
        yield spawn


@pytest_asyncio.fixture(loop_scope="module")
async def place(server: SeaweedFS, prefix: str, system: Any) -> AsyncIterator[ClusterStorePlace]:
    made = ClusterStorePlace(server, prefix, system)
    yield made
    await made.close()


typed_place = table_place = logged_place = home = evolving_home = place


class TestTopic(TopicContract):
    class TestMaintenance(MaintenanceContract):
        # The same damage as without a cluster: tests/store/test_store_contract.py replaces objects.
        test_verify_names_the_bucket_the_file_and_the_offsets = None


class TestWork(WorkContract):
    @pytest_asyncio.fixture(loop_scope="module")
    async def place(self, server: SeaweedFS, prefix: str, system: Any) -> AsyncIterator[WorkPlace]:
        made = WorkPlace(url(prefix), system, storage_options=server.options())
        yield made
        await made.close()
