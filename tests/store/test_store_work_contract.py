"""The contract of work groups in an object store; the keeper is in this process, or in another."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.object_stores import SeaweedFS, url
from support.work_contract import WorkContract
from support.work_places import KeeperProcess, OtherProcess, WorkPlace

pytestmark = pytest.mark.asyncio


class TestKeeperInThisProcess(WorkContract):
    @pytest.fixture
    async def place(self, server: SeaweedFS, prefix: str) -> AsyncIterator[WorkPlace]:
        place = WorkPlace(url(prefix), storage_options=server.options())
        yield place
        await place.close()


class TestKeeperInAnotherProcess(WorkContract):
    @pytest.fixture
    async def place(
        self, server: SeaweedFS, prefix: str, keepers: KeeperProcess
    ) -> AsyncIterator[OtherProcess]:
        place = OtherProcess(url(prefix), keepers, storage_options=server.options())
        yield place
        await place.close()
