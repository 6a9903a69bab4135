"""One SeaweedFS for all tests of object stores in a process; nightly, an Azurite beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.azurite import Azurite
from support.cluster_nodes import Cluster
from support.fault_proxy import FaultProxy
from support.object_stores import (
    SeaweedFS,
    environment_of,
    fresh_prefix,
    running_seaweedfs,
    storage_options,
    url,
)
from support.open_topics import no_open_topics
from support.work_places import KeeperProcess

from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.topic import store_membership
from persisting.wal import lease, sealing

QUICK_CONTRACT = frozenset(
    {
        "test_blocking_stream_delivers_new_records",
        "test_new_field_is_accepted_by_all_buckets_or_by_none",
        "test_members_share_buckets_without_overlap_and_hand_them_over",
        "test_group_continues_after_its_last_commit",
        "test_index_changes_no_result",
        "test_compaction_changes_no_offset_order_or_record",
        "test_verify_names_the_bucket_the_file_and_the_offsets",
        "test_versions_without_a_tag_are_cleaned_up",
        "test_retention_keeps_what_a_group_has_not_committed",
        "test_restored_topic_equals_the_tag_and_accepts_new_records",
        "test_logged_records_before_a_restore_are_not_replayed",
    }
)
"""The tests of the contracts that `make test` runs on an object store; folders run all of them."""

QUICK_CLUSTER_CONTRACT = frozenset(
    {
        "test_blocking_stream_delivers_new_records",
        "test_group_continues_after_its_last_commit",
        "test_restored_topic_equals_the_tag_and_accepts_new_records",
        "test_dead_letters_are_redriven_once_and_carry_their_history",
    }
)
"""The same for a cluster."""

QUICK_WORK_CONTRACT = frozenset(
    {
        "test_every_record_is_delivered_to_one_member",
        "test_dead_letters_are_redriven_once_and_carry_their_history",
        "test_a_delayed_put_is_delivered_later_and_the_record_does_not_show_it",
        "test_a_fetch_without_waiting_gets_what_was_put_before",
        "test_records_of_one_key_are_delivered_one_after_the_other",
    }
)
"""The same for work groups."""

QUICK_SOCKET_CONTRACT = frozenset(
    {
        "test_blocking_stream_delivers_new_records",
        "test_new_field_is_accepted_by_all_buckets_or_by_none",
        "test_members_share_buckets_without_overlap_and_hand_them_over",
    }
)
"""The same for topics that another process owns."""

_QUICK = {
    "test_store_contract.py": QUICK_CONTRACT,
    "test_store_socket_contract.py": QUICK_SOCKET_CONTRACT,
    "test_cluster_contract_in_store.py": QUICK_CLUSTER_CONTRACT,
    "test_store_work_contract.py": QUICK_WORK_CONTRACT,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = getattr(item, "originalname", item.name)
        quick = _QUICK.get(item.path.name)
        if quick is not None and name not in quick:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with running_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    running = Azurite(Path(tmp_path_factory.mktemp("azurite")))
    running.start()
    yield running
    running.kill()


@pytest.fixture
def proxy(server: SeaweedFS) -> Iterator[FaultProxy]:
    running = FaultProxy(server.port)
    yield running
    running.stop()


@pytest.fixture
def prefix() -> str:
    return fresh_prefix()


@pytest.fixture
def long_lease(monkeypatch: pytest.MonkeyPatch) -> float:
    """The seconds of a lease that does not expire if the machine stops for a while; its owner
    sends heartbeats, and others poll it, as often as with a short one."""
    monkeypatch.setattr(lease, "_BEATS_PER_LEASE", 600)
    monkeypatch.setattr(sealing, "_LOOKS_PER_LEASE", 1000)
    return 120.0


@pytest.fixture
def cluster(server: SeaweedFS) -> Iterator[Cluster]:
    """The test's own cluster, whose nodes have credentials in their environment."""
    with Cluster(variables=environment_of(server.options())) as cluster:
        yield cluster


@pytest.fixture
async def no_topic_is_left_open() -> AsyncIterator[None]:
    """Fail a test that leaves a topic open."""
    with no_open_topics():
        yield


@pytest.fixture(scope="module")
def keepers() -> Iterator[KeeperProcess]:
    """A process that keeps work groups."""
    with KeeperProcess() as keepers:
        yield keepers


@pytest.fixture
def where(server: SeaweedFS, prefix: str) -> dict[str, Any]:
    """The arguments that name the topic of the test."""
    return {"topic": "t", "storage_path": url(prefix), "storage_options": server.options()}


OpenStore = Callable[..., ObjectStore]


@pytest.fixture
def store(server: SeaweedFS, prefix: str) -> ObjectStore:
    """A store without faults."""
    return open_store(parse(url(prefix)), StorageOptions(server.options()))


@pytest.fixture
def faulty(proxy: FaultProxy, prefix: str) -> ObjectStore:
    """The same store behind the proxy, with short timeouts."""
    options = storage_options(proxy.port, timeout="1s", connect_timeout="1s")
    return open_store(parse(url(prefix)), StorageOptions(options), retry_seconds=6.0)


@pytest.fixture
def patient(proxy: FaultProxy, prefix: str) -> ObjectStore:
    """The same store behind the proxy, whose requests may be slow: none is repeated because the
    machine is slow."""
    options = storage_options(proxy.port, timeout="60s", connect_timeout="60s")
    return open_store(parse(url(prefix)), StorageOptions(options), retry_seconds=60.0)


@pytest.fixture
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members of groups look for others as often as with a short lease."""
    monkeypatch.setattr(store_membership, "_LOOKS_PER_LEASE", 100)
