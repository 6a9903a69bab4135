"""The contract of work groups on a cluster of three nodes, and what happens when one dies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.cluster_join import join_cluster, leave_cluster
from support.cluster_nodes import Cluster
from support.work_contract import WorkContract
from support.work_places import WorkPlace

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def system(three: Cluster) -> AsyncIterator[Any]:
    system = await join_cluster(three)
    yield system
    await leave_cluster(system)


class TestKeeperOnACluster(WorkContract):
    @pytest_asyncio.fixture(loop_scope="module")
    async def place(self, tmp_path: Path, system: Any) -> AsyncIterator[WorkPlace]:
        place = WorkPlace(tmp_path, system)
        yield place
        await place.close()
