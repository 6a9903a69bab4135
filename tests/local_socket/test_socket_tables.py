"""The topic as a table that another process owns: versions, search, tags, restores, retention."""

from __future__ import annotations

import pytest
from support.restore_contract import LoggedRestoreContract, RestoreContract
from support.retention_contract import RetentionContract, SlowContract
from support.table_contract import (
    AccessContract,
    EvolvingContract,
    MaintenanceContract,
    SearchContract,
    VersionContract,
)
from support.tag_contract import TagContract


class TestVersions(VersionContract):
    pass


@pytest.mark.nightly  # slow: each call of a table crosses the socket
class TestSearch(SearchContract):
    pass


class TestAccess(AccessContract):
    pass


class TestEvolving(EvolvingContract):
    pass


class TestMaintenance(MaintenanceContract):
    pass


class TestTags(TagContract):
    pass


class TestRestore(RestoreContract):
    pass


class TestLoggedRestore(LoggedRestoreContract):
    pass


@pytest.mark.nightly  # slow: each call of a table crosses the socket
class TestRetention(RetentionContract):
    pass


@pytest.mark.nightly  # slow: each call of a table crosses the socket
class TestSlow(SlowContract):
    pass
