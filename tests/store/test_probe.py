"""Stores that ignore conditions are refused, whatever would write to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.fault_proxy import FaultProxy
from support.object_stores import (
    LocalBucket,
    Rclone,
    Server,
    environment_of,
    fresh_prefix,
    storage_options,
    url,
)
from support.spark.writes import DirectStore

from persisting.cluster.node import NodeOptions, StorageNode
from persisting.errors import StorageError
from persisting.queue import write_queue
from persisting.store import probe as probes
from persisting.store.object_store import ObjectStore, StoreError, open_store
from persisting.store.probe import probe
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.topic import backup
from persisting.topic.inspect import find


@pytest.fixture(autouse=True)
def _forget_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_obeying", set())


def test_store_that_obeys_conditions_passes_and_nothing_is_left(store: ObjectStore) -> None:
    probe(store)
    assert store.list("") == []


def test_store_is_probed_once_in_a_process(patient: ObjectStore, proxy: FaultProxy) -> None:
    probe(patient)
    first = sum(proxy.counts.values())
    assert first == 7  # two creates, two swaps, two reads after refusals, one delete
    probe(patient)
    assert sum(proxy.counts.values()) == first


@pytest.fixture
def careless(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server that ignores conditions: rclone, or the one that a test names."""
    running: Server = getattr(request, "param", Rclone)(tmp_path / "server")
    running.start()
    yield running
    running.kill()


def store_at(port: int, prefix: str | None = None) -> ObjectStore:
    address = parse(url(prefix or fresh_prefix()))
    return open_store(address, StorageOptions(storage_options(port)))


@pytest.mark.parametrize(
    ("careless", "condition"),
    [(LocalBucket, "If-Match"), (Rclone, "If-None-Match")],
    indirect=["careless"],
)
def test_server_that_ignores_a_condition_is_refused(careless: Server, condition: str) -> None:
    store = store_at(careless.port)
    for _ in range(2):  # a refusal is not remembered as success
        with pytest.raises(StoreError, match=f"ignores the condition {condition} "):
            probe(store)


def open_for_writing(root: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {"topic": "t", "storage_path": root, "durable": True}
    asyncio.run(write_queue(**where))


def write_with_spark(root: str, tmp_path: Path) -> None:
    DirectStore(parse(root)).save(pa.table({"id": [1]}))  # type: ignore[arg-type]


def restore_a_backup(root: str, tmp_path: Path) -> None:
    async def fill() -> None:
        where: dict[str, Any] = {"topic": "t", "storage_path": str(tmp_path), "durable": True}
        async with await write_queue(**where) as writer:
            await writer.put({"id": 1})

    asyncio.run(fill())
    backup.create(find("t", str(tmp_path)), tmp_path / "copy")
    backup.restore(tmp_path / "copy", open_store(parse(root) / "t", StorageOptions()))


def start_a_node(root: str, tmp_path: Path) -> None:
    asyncio.run(StorageNode.start(NodeOptions(storage=root)))


@pytest.mark.parametrize(
    "write", [open_for_writing, write_with_spark, restore_a_backup, start_a_node]
)
def test_nothing_is_written_to_a_server_that_ignores_conditions(
    careless: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[str, Path], None],
) -> None:
    for name, value in environment_of(careless.options()).items():
        monkeypatch.setenv(name, value)
    prefix = fresh_prefix()
    with pytest.raises(StorageError, match=r"ignores the condition .* Use a store that"):
        write(url(prefix), tmp_path)
    assert store_at(careless.port, prefix).list("") == []


def test_store_without_conditional_puts_is_refused(faulty: ObjectStore, proxy: FaultProxy) -> None:
    proxy.add("PUT-if-absent", answer=501)
    with pytest.raises(StoreError, match="501"):
        probe(faulty)
