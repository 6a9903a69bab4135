"""The contracts of queues and tables on a cluster of three nodes, on topics in an object store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from support.cluster_join import join_cluster, leave_cluster
from support.cluster_nodes import Cluster
from support.object_stores import SeaweedFS, environment_of
from support.queue_contract import (
    FindingContract,
    GroupContract,
    OnceContract,
    ReadingContract,
    SchemaContract,
    WritingContract,
)
from support.restore_contract import LoggedRestoreContract, RestoreContract
from support.retention_contract import RetentionContract
from support.store_places import ClusterStorePlace
from support.table_contract import (
    AccessContract,
    EvolvingContract,
    MaintenanceContract,
    SearchContract,
    VersionContract,
)
from support.tag_contract import TagContract
from support.tasks import spawning

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def three(server: SeaweedFS) -> Iterator[Cluster]:
    """Three nodes, with credentials in their environment."""
    cluster = Cluster(variables=environment_of(server.options()))
    cluster.start(3)
    yield cluster
    cluster.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def system(three: Cluster) -> AsyncIterator[Any]:
    """This process as a client, which has its credentials from ``storage_options``."""
    joined = await join_cluster(three)
    yield joined
    await leave_cluster(joined)


@pytest_asyncio.fixture(loop_scope="module")
async def spawned() -> AsyncIterator[Any]:
    async with spawning() as spawn:
        yield spawn


@pytest_asyncio.fixture(loop_scope="module")
async def place(server: SeaweedFS, prefix: str, system: Any) -> AsyncIterator[ClusterStorePlace]:
    made = ClusterStorePlace(server, prefix, system)
    yield made
    await made.close()


@pytest.fixture
def typed_place(place: ClusterStorePlace) -> ClusterStorePlace:
    return place


@pytest.fixture
def table_place(place: ClusterStorePlace) -> ClusterStorePlace:
    return place


@pytest.fixture
def logged_place(place: ClusterStorePlace) -> ClusterStorePlace:
    return place


@pytest.fixture
def home(place: ClusterStorePlace) -> ClusterStorePlace:
    return place


@pytest.fixture
def evolving_home(place: ClusterStorePlace) -> ClusterStorePlace:
    return place


class TestWriting(WritingContract):
    pass


class TestReading(ReadingContract):
    pass


class TestFinding(FindingContract):
    pass


class TestSchema(SchemaContract):
    pass


class TestOnce(OnceContract):
    pass


class TestGroups(GroupContract):
    pass


class TestVersions(VersionContract):
    pass


class TestSearch(SearchContract):
    pass


class TestAccess(AccessContract):
    pass


class TestEvolving(EvolvingContract):
    pass


class TestMaintenance(MaintenanceContract):
    # The same damage as without a cluster: tests/store/test_store_contract.py replaces objects.
    test_verify_names_the_bucket_the_file_and_the_offsets = None


class TestTags(TagContract):
    pass


class TestRetention(RetentionContract):
    pass


class TestRestore(RestoreContract):
    pass


class TestLoggedRestore(LoggedRestoreContract):
    pass
