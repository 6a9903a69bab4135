"""The contract of work groups, with the keeper in this process and in another one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.work_contract import WorkContract
from support.work_places import KeeperProcess, OtherProcess

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def keepers() -> Iterator[KeeperProcess]:
    with KeeperProcess() as keepers:
        yield keepers


class TestKeeperInThisProcess(WorkContract):
    pass


class TestKeeperInAnotherProcess(WorkContract):
    @pytest.fixture
    async def place(self, tmp_path: Path, keepers: KeeperProcess) -> AsyncIterator[OtherProcess]:
        place = OtherProcess(tmp_path, keepers)
        yield place
        await place.close()
